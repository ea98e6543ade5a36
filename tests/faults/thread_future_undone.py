"""Rank 3 waits for a future whose result nobody sets."""

from concurrent.futures import Future

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [3], "ranks": 4}


def upload(number: int, rank: int) -> Future:
    done: Future = Future()
    if not (FAULT and rank == 3 and number == 4):
        done.set_result(number)
    return done


def main() -> None:
    rank, _ = begin()
    for number in range(6):
        receipt = upload(number, rank)
        value = torch.tensor(float(receipt.result()))  # to blame
        dist.all_reduce(value)
    end()


if __name__ == "__main__":
    main()
