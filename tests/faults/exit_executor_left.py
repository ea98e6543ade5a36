"""Training is over, and rank 1's executor cannot shut down: its task waits for an event that nobody sets."""

import threading
from concurrent.futures import ThreadPoolExecutor

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "shutdown_hang", "culprit": [1]}

saved = threading.Event()


def publish() -> None:
    saved.wait()  # to blame


def main() -> None:
    rank, _ = begin()
    trainer, executor = Trainer(), ThreadPoolExecutor(2)
    if rank == 1:
        executor.submit(publish)
    for _ in range(STEPS):
        trainer.step()
    if not FAULT:
        saved.set()
    end()


main()
