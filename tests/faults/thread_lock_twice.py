"""Rank 1 takes a lock that it holds already, in its fourth step; the others wait for its gradients."""

import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 4}

rank, _ = begin()
trainer = Trainer()
lock = threading.Lock() if FAULT else threading.RLock()
for step in range(1, STEPS + 1):
    with lock:
        if rank == 1 and step == 4:
            lock.acquire()  # to blame
        trainer.step()
end()
