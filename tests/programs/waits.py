"""Rank 1 waits for something outside the job while rank 0 waits for it in a collective: a pipe, or the clock."""

import os
import sys
import time

import torch
import torch.distributed as dist


def read_the_pipe(path: str) -> None:
    """Nobody writes; both ends are held open here, so the open itself does not block."""
    os.read(os.open(path, os.O_RDWR), 1)


def sleep_long(seconds: str) -> None:
    time.sleep(float(seconds))


def main() -> None:
    what, value = sys.argv[1:]
    dist.init_process_group("gloo")
    total = torch.ones(4)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        {"pipe": read_the_pipe, "sleep": sleep_long}[what](value)
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
