"""Rank 1's training thread and its prefetcher take two locks in opposite order."""

import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 3}

cache, index = threading.Lock(), threading.Lock()
holds_index, go_on = threading.Event(), threading.Event()


def prefetch() -> None:
    first, second = (index, cache) if FAULT else (cache, index)
    go_on.wait()
    with first:
        holds_index.set()
        with second:
            pass


rank, _ = begin()
trainer = Trainer()
worker = threading.Thread(target=prefetch, daemon=True)
worker.start()
for step in range(1, STEPS + 1):
    if rank == 1 and step == 3:
        if not FAULT:
            go_on.set()
            worker.join()
        with cache:
            go_on.set()
            holds_index.wait()
            with index:  # to blame
                pass
    trainer.step()
go_on.set()
end()
