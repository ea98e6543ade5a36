"""Rank 0 enters an all_reduce; rank 1 enters it only when a line comes in on stdin."""

import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    value = torch.ones(5)
    if dist.get_rank() == 1:
        sys.stdin.readline()
    dist.all_reduce(value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
