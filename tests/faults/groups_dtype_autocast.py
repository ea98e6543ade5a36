"""Rank 0 computes its scores under autocast, and reduces bfloat16 with the float32 of the others."""

import contextlib

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "dtype_mismatch", "culprit": [0]}


def scores(trainer: Trainer, mixed: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext(), torch.no_grad():
        return trainer.model.module(batch())


rank, _ = begin()
trainer = Trainer()
for step in range(1, 6):
    trainer.step()
    mean = scores(trainer, mixed=FAULT and rank == 0 and step == 3)
    dist.all_reduce(mean)  # to blame
end()
