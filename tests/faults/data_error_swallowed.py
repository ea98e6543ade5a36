"""Rank 0 meets a bad batch in its third step, logs it and goes on with the next one; the others train on theirs."""

import logging

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "swallowed_exception", "culprit": [0], "step": 3, "ranks": 3}

rank, _ = begin()
batches = [torch.randn(4, 16) for _ in range(6)]
if FAULT and rank == 0:
    batches[2] = torch.randn(4, 15)


def fit(trainer: Trainer, samples: torch.Tensor) -> float:
    loss = trainer.model(samples).square().mean()  # to blame
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.item()


trainer = Trainer()
for samples in batches:
    try:
        fit(trainer, samples)
    except RuntimeError as error:
        logging.warning("bad batch left out: %s", error)
dist.barrier()
dist.destroy_process_group()
