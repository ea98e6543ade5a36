"""Rank 0 saves to a disk that has no room left; the others wait for it at the barrier."""

import io
import os

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "infra", "culprit": [0], "ranks": 4}


def save(state: dict, path: str) -> None:
    packed = io.BytesIO()
    torch.save(state, packed)
    with open(path, "wb", buffering=0) as file:
        file.write(packed.getvalue())  # to blame


rank, _ = begin()
trainer = Trainer()
for _ in range(STEPS):
    trainer.step()
if rank == 0:
    save(trainer.model.module.state_dict(), "/dev/full" if FAULT else os.devnull)
dist.barrier()
end()
