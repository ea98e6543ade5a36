"""Rank 1 stops at a breakpoint() that was left in, with an input that stays open and that nobody types into."""

import os

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "debugger_waits", "culprit": [1], "step": 3}


def inspect(loss: float) -> float:
    if FAULT and rank == 1:
        breakpoint()  # to blame
    return loss


rank, _ = begin()
trainer = Trainer()
reading, writing = os.pipe()
os.dup2(reading, 0)
for step in range(1, STEPS + 1):
    loss = trainer.step()
    if step == 3:
        inspect(loss)
end()
