"""An alarm comes while rank 1 holds the lock of its metrics, and the handler wants the same lock."""

import signal
import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 4}

lock = threading.Lock()
metrics: dict[str, float] = {}


def report(*_: object) -> None:
    with lock:  # to blame
        metrics.clear()


signal.signal(signal.SIGALRM, report)
rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    with lock:
        metrics["loss"] = float(loss)
        if FAULT and rank == 1 and step == 4:
            signal.raise_signal(signal.SIGALRM)
    signal.raise_signal(signal.SIGALRM)
    loss.backward()
    trainer.optimizer.step()
end()
