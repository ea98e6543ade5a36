"""Spawns two ranks, as often as it is told how rank 1 ends, and catches whatever comes of it.

spawned.py FOLDER raises|killed|well ...
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

ENDS = {
    "well": lambda: None,
    "raises": lambda: {}["shard 7"],
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def work(rank: int, folder: str, number: int, end: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=2)
    journals = Path(folder).glob("reports/latest/*/watch.jsonl")
    while not any(f'"pid":{os.getpid()}}}' in journal.read_text() for journal in journals):
        time.sleep(0.1)  # until it is watched
        journals = Path(folder).glob("reports/latest/*/watch.jsonl")
    dist.barrier()
    if rank == 1:
        ENDS[end]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, folder, *ends = sys.argv
    for number, end in enumerate(ends):
        try:
            mp.spawn(work, args=(folder, number, end), nprocs=2)
        except Exception as error:
            print("went on after", type(error).__name__)
