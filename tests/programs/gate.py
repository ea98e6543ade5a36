"""Rank 1 reads one byte of a FIFO while rank 0 waits for it in a collective; under torchrun, or as a spawning program.

torchrun --nproc-per-node 2 gate.py FIFO        python gate.py FIFO PORT        (mp.spawn)
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def wait_at_the_gate(path: str) -> None:
    """Both ends are held open here, so the open itself does not block."""
    os.read(os.open(path, os.O_RDWR), 1)


def train() -> None:
    total = torch.ones(4)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        wait_at_the_gate(sys.argv[1])
    dist.all_reduce(total)
    os.write(1, f"sum {total.sum().item()}\n".encode())  # one write, so that lines of two ranks stay whole
    dist.destroy_process_group()


def spawned(rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
    train()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        mp.spawn(spawned, nprocs=2)
    else:
        dist.init_process_group("gloo")
        train()
