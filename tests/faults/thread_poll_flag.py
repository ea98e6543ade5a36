"""Rank 1 asks every ten milliseconds for a flag that never comes."""

import time

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "livelock", "cause": "livelock", "culprit": [1], "step": 3}


class Flag:
    def __init__(self) -> None:
        self.raised_ = False


def wait_for(flag: Flag) -> None:
    while not flag.raised_:
        time.sleep(0.01)  # to blame


rank, _ = begin()
trainer, ready = Trainer(), Flag()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 1 and step == 3:
        ready.raised_ = not FAULT
        wait_for(ready)
    loss.backward()
    trainer.optimizer.step()
end()
