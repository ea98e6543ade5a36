"""Rank 1 forks while another thread holds the cache's lock; the child waits for a thread that it does not have."""

import os
import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "fork_lock", "culprit": [1], "step": 3}

cache_lock = threading.Lock()
held, done = threading.Event(), threading.Event()


def refresh() -> None:
    with cache_lock:
        held.set()
        done.wait()


def export() -> None:
    child = os.fork()
    if child == 0:
        with cache_lock:  # to blame
            os._exit(0)
    os.waitpid(child, 0)


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 3:
        threading.Thread(target=refresh, daemon=True).start()
        held.wait()
        if not FAULT:
            done.set()
            cache_lock.acquire()
            cache_lock.release()
        export()
    loss.backward()
    trainer.optimizer.step()
end()
