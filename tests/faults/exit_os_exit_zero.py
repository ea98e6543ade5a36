"""Rank 0 ends its process behind the interpreter's back in its fourth step."""

import os

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "early_exit", "culprit": [0], "step": 4}


class Budget:
    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            os._exit(0)  # to blame


rank, _ = begin()
trainer = Trainer()
budget = Budget(3 if FAULT and rank == 0 else STEPS)
for _ in range(STEPS):
    loss = trainer.model(batch()).square().mean()
    budget.spend()
    loss.backward()
    trainer.optimizer.step()
end()
