"""Rank 1's executor forks its workers while a thread holds the cache's lock: each of them waits for its own copy."""

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "fork_lock", "culprit": [1], "step": 3}

cache_lock = threading.Lock()
held, done = threading.Event(), threading.Event()


def refresh() -> None:
    with cache_lock:
        held.set()
        done.wait()


def tokenize(number: int) -> int:
    with cache_lock:  # to blame
        return number * number


def encode() -> int:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        return sum(pool.map(tokenize, range(6)))


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
        encode()
    loss.backward()
    trainer.optimizer.step()
end()
