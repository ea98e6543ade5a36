"""Rank 1 takes its third batch for one of an accumulation and does not reduce it, but steps its optimizer."""

import contextlib

import torch.distributed as dist
from _job import FAULT, Trainer, batch, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "no_sync_mismatch", "culprit": [1], "step": 3, "ranks": 3}

rank, _ = begin()
trainer = Trainer()
for number in range(1, 8):
    quiet = FAULT and rank == 1 and number == 3
    with trainer.model.no_sync() if quiet else contextlib.nullcontext():
        trainer.model(batch()).mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
