"""Rank 2 of four waits for an event that only its own later code would set."""

import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [2], "step": 2, "ranks": 4}


class Warmup:
    def __init__(self) -> None:
        self.done = threading.Event()

    def before(self, step: int) -> None:
        if step == 2:
            self.done.wait()  # to blame

    def after(self, step: int) -> None:
        if step == 2 or not FAULT or rank != 2:
            self.done.set()


rank, _ = begin()
trainer, warmup = Trainer(), Warmup()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    warmup.before(step)
    loss.backward()
    trainer.optimizer.step()
    warmup.after(step)
end()
