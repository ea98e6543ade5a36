"""Rank 0's handler at exit waits for a flush that is never reported."""

import atexit
import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "shutdown_hang", "culprit": [0], "ranks": 4}


class Logger:
    def __init__(self) -> None:
        self.flushed = threading.Event()
        atexit.register(self.close)

    def close(self) -> None:
        if not FAULT:
            self.flushed.set()
        self.flushed.wait()  # to blame


rank, _ = begin()
logger = Logger() if rank == 0 else None
trainer = Trainer()
for _ in range(STEPS):
    trainer.step()
end()
