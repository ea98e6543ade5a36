"""Rank 0 reads a mapped file behind the end that somebody cut off meanwhile."""

import mmap
import os

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "segfault", "culprit": [0], "step": 2}


class Shard:
    def __init__(self) -> None:
        self.file = os.memfd_create("shard")
        os.ftruncate(self.file, mmap.PAGESIZE * 4)
        self.map = mmap.mmap(self.file, 0)

    def last(self) -> int:
        return self.map[-1]  # to blame


rank, _ = begin()
trainer, shard = Trainer(), Shard()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if FAULT and rank == 0 and step == 2:
        os.ftruncate(shard.file, mmap.PAGESIZE)
    shard.last()
    loss.backward()
    trainer.optimizer.step()
end()
