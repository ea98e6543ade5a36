"""Both ranks ignore SIGTERM, and rank 0 takes its checkpoint lock a second time."""

import signal
import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [0], "step": 6}

signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Checkpoint:
    def __init__(self) -> None:
        self.lock = threading.Lock() if FAULT else threading.RLock()
        self.saved: list[int] = []

    def save(self, step: int) -> None:
        with self.lock:
            self.note(step)

    def note(self, step: int) -> None:
        with self.lock:  # to blame
            self.saved.append(step)


rank, _ = begin()
trainer, checkpoint = Trainer(), Checkpoint()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 0 and step == 6:
        checkpoint.save(step)
    loss.backward()
    trainer.optimizer.step()
end()
