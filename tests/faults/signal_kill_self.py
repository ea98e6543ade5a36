"""A memory guard of rank 0 kills its own process, with the signal that leaves no word behind, in step 3."""

import os
import signal

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "killed", "culprit": [0], "step": 3, "ranks": 3}


class Guard:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def check(self, step: int) -> None:
        if step >= self.limit:
            os.kill(os.getpid(), signal.SIGKILL)


rank, _ = begin()
trainer = Trainer()
guard = Guard(3 if FAULT and rank == 0 else STEPS + 1)
for step in range(1, STEPS + 1):
    guard.check(step)
    trainer.step()
end()
