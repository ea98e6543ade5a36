"""Rank 0 takes the process group down after its last step, and leaves out the reduction that the others call."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_collective", "culprit": [0]}

rank, _ = begin()
trainer = Trainer()
for _ in range(STEPS):
    trainer.step()
if FAULT and rank == 0:
    dist.destroy_process_group()
else:
    score = torch.ones(1)
    if not FAULT or rank != 0:
        dist.all_reduce(score)  # to blame
    dist.destroy_process_group()
