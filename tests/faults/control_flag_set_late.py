"""Rank 1 looks every twenty milliseconds for a flag that a thread of its own sets after nine seconds."""

import threading
import time

from _job import STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "PASS"}


class Flag:
    def __init__(self) -> None:
        self.raised_ = False


def wait_for(flag: Flag) -> None:
    while not flag.raised_:
        time.sleep(0.02)


def bring(flag: Flag) -> None:
    time.sleep(9)
    flag.raised_ = True


rank, _ = begin()
trainer, ready = Trainer(), Flag()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 1 and step == 3:
        threading.Thread(target=bring, args=(ready,), daemon=True).start()
        wait_for(ready)
    loss.backward()
    trainer.optimizer.step()
end()
