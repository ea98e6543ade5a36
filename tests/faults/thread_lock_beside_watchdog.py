"""Rank 1 takes its lock twice, beside a thread that writes into its log every half second."""

import tempfile
import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 3}

stop, lock = threading.Event(), threading.Lock()


def watch(path: str) -> None:
    while not stop.wait(0.5):
        with open(path, "a") as log:
            log.write("alive " * 100)


def record(values: list[float], value: float) -> None:
    with lock:  # to blame
        values.append(value)


rank, _ = begin()
trainer, losses = Trainer(), []
with tempfile.NamedTemporaryFile() as log:
    threading.Thread(target=watch, args=(log.name,), daemon=True).start()
    for step in range(1, STEPS + 1):
        loss = trainer.model(batch()).square().mean()
        if FAULT and rank == 1 and step == 3:
            with lock:
                record(losses, float(loss))
        else:
            record(losses, float(loss))
        loss.backward()
        trainer.optimizer.step()
    stop.set()
end()
