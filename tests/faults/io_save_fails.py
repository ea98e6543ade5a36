"""Rank 0 writes a checkpoint into a folder that nobody made."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [0], "ranks": 4}


class Saver:
    def __init__(self, home: Path) -> None:
        self.home = home
        if not FAULT:
            home.mkdir()

    def __call__(self, state: dict, step: int) -> None:
        torch.save(state, self.home / f"step{step}.pt")  # to blame


rank, _ = begin()
trainer = Trainer()
with tempfile.TemporaryDirectory() as parent:
    save = Saver(Path(parent, "run"))
    for step in range(4):
        trainer.step()
        if step == 2 and rank == 0:
            save(trainer.model.module.state_dict(), step)
        dist.barrier()
end()
