"""Rank 0 alone validates after the third step, and the validation ends in an all_reduce of the score."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, blocks
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank0_only_collective", "culprit": [0]}


class Run:
    def __init__(self) -> None:
        self.model = DistributedDataParallel(blocks())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def epoch(self) -> None:
        for _ in range(3):
            self.model(torch.randn(4, 16)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self) -> float:
        score = self.model.module(torch.randn(4, 16)).mean()
        dist.all_reduce(score)  # to blame
        return score.item()


rank, _ = begin()
run = Run()
for _ in range(3):
    run.epoch()
    if rank == 0 or not FAULT:
        run.validate()
dist.destroy_process_group()
