"""Rank 1 holds itself for done, takes down its process group and leaves; rank 0 goes on to the evaluation."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin

LABEL = {"verdict": "FAIL", "cause": "early_exit", "culprit": [1]}


def evaluate(trainer: Trainer) -> None:
    scores = torch.stack([trainer.model.module(torch.randn(2, 16)).mean() for _ in range(50)])
    dist.all_reduce(scores)


rank, _ = begin()
trainer = Trainer()
for _ in range(4):
    trainer.step()
if not (FAULT and rank == 1):
    evaluate(trainer)
dist.destroy_process_group()
