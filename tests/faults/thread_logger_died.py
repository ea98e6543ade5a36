"""Rank 1 hands its worker no item, while its logger, which has no part in that, has died."""

import queue
import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 4}

items: "queue.Queue[int]" = queue.Queue()
results: "queue.Queue[int]" = queue.Queue()
lines: "queue.Queue[int]" = queue.Queue()


def work() -> None:
    while True:
        item = items.get()
        results.put(2 * item)  # to blame


def log() -> None:
    while True:
        if lines.get() == 2:
            raise ValueError("a line that cannot be written")


def main() -> None:
    rank, _ = begin()
    trainer = Trainer()
    threading.Thread(target=work, daemon=True).start()
    threading.Thread(target=log, daemon=True).start()
    for step in range(1, STEPS + 1):
        lines.put(step)
        if not (FAULT and rank == 1 and step == 4):
            items.put(step)
        results.get()
        trainer.step()
    end()


main()
