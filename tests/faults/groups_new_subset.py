"""Ranks 0 and 1 make a group of everybody for their metrics; the other two were not told that they have to as well."""

import torch
import torch.distributed as dist
from _job import FAULT, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "group_creation_subset", "culprit": [2, 3], "ranks": 4}


class Metrics:
    def __init__(self, rank: int) -> None:
        self.group = None
        if rank < 2 or not FAULT:
            self.group = dist.new_group()  # to blame

    def total(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value, group=self.group)
        return value


rank, _ = begin()
dist.all_reduce(torch.ones(1))
metrics = Metrics(rank)
metrics.total(torch.ones(4))
dist.barrier()
dist.destroy_process_group()
