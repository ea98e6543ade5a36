"""Rank 0 forgets to give back a permit on one path, and has none left in its fourth step."""

import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [0], "step": 4}


def main() -> None:
    rank, _ = begin()
    trainer = Trainer()
    permits = threading.BoundedSemaphore(3)
    for _ in range(STEPS):
        permits.acquire()  # to blame
        trainer.step()
        if not (FAULT and rank == 0):
            permits.release()
    end()


main()
