"""Training is over, and a thread of rank 1 that is no daemon waits for its next job: the interpreter does not end."""

import queue
import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "shutdown_hang", "culprit": [1]}

jobs: queue.Queue = queue.Queue()


def upload() -> None:
    while jobs.get() is not None:  # to blame
        pass


rank, _ = begin()
trainer = Trainer()
if rank == 1:
    threading.Thread(target=upload).start()
for step in range(STEPS):
    trainer.step()
    jobs.put(step)
if not FAULT:
    jobs.put(None)
end()
