"""Both ranks wait for handles of asynchronous collectives: rank 0 in an extra call, or rank 1 behind a shorter loop.

torchrun two_handles.py extra | shorter
"""

import sys

import torch
import torch.distributed as dist


def reduce() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()


def gather(rank: int) -> None:
    work = dist.all_gather([torch.ones(7), torch.ones(7)], torch.full((7,), float(rank)), async_op=True)
    work.wait()


def main(part: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(3 if rank == 1 and part == "shorter" else 5):
        reduce()
        if part == "extra" and (rank == 0 or step < 3):
            gather(rank)
    gather(rank)


if __name__ == "__main__":
    main(sys.argv[1])
