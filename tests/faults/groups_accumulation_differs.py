"""Rank 0 reduces after every second batch, rank 1, which has read another configuration, after every third."""

import contextlib

import torch.distributed as dist
from _job import FAULT, Trainer, batch, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "no_sync_mismatch", "culprit": [1], "ranks": 3}

rank, _ = begin()
every = 3 if FAULT and rank == 1 else 2
trainer = Trainer()
for number in range(1, 13):
    reduces = number % every == 0
    with contextlib.nullcontext() if reduces else trainer.model.no_sync():
        trainer.model(batch()).mean().backward()
    if reduces:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
