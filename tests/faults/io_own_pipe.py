"""Rank 1 reads the pipe that wakes its loop, and nothing is left that could write to it."""

import os

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "blocked_io", "culprit": [1], "step": 5}


class Wakeup:
    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def send(self) -> None:
        os.write(self.writing, b"x")

    def take(self) -> bytes:
        return os.read(self.reading, 1)  # to blame


rank, _ = begin()
trainer, wakeup = Trainer(), Wakeup()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if not (FAULT and rank == 1 and step == 5):
        wakeup.send()
    wakeup.take()
    loss.backward()
    trainer.optimizer.step()
end()
