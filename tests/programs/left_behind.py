"""A job that nobody watches: it hangs, fails or is killed, and its ranks write the dumps that somebody asks them for.

torchrun --nproc-per-node 2 left_behind.py hang|raise|kill|healthy [DIR]     a byte into DIR/ask.RANK asks for the dumps
"""

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist


def dump_when_asked(folder: Path, rank: int) -> None:
    """As torch.distributed's watchdog does with NCCL: gloo has none that would write the recorder to a file."""
    with open(folder / f"ask.{rank}", "rb") as asked:
        asked.read(1)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    with (folder / f"threads_rank{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    (folder / f"dumped.{rank}").touch()


def log_mean(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def train(mode: str, rank: int) -> None:
    value = torch.ones(4)
    for step in range(6):
        dist.all_reduce(value)
        if step == 3 and mode == "raise" and rank == 1:
            raise ValueError("bad batch")
        if step == 3 and mode == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hang" and rank == 0:
        log_mean(value)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if len(sys.argv) > 2:
        threading.Thread(target=dump_when_asked, args=(Path(sys.argv[2]), dist.get_rank()), daemon=True).start()
    train(sys.argv[1], dist.get_rank())
    dist.destroy_process_group()
