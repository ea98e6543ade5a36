"""Rank 1 waits for its logger's thread, which waits for a queue, before a monitored barrier of one minute."""

import datetime
import queue
import threading

import torch.distributed as dist
from _job import FAULT, Trainer, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1]}

rank, _ = begin()
trainer = Trainer()
lines: "queue.Queue[str | None]" = queue.Queue()


def drain() -> None:
    while lines.get() is not None:  # to blame
        pass


logger = threading.Thread(target=drain, daemon=True)
logger.start()
for _ in range(3):
    lines.put(f"loss {trainer.step()}")
if not (FAULT and rank == 1):
    lines.put(None)
logger.join()
dist.monitored_barrier(timeout=datetime.timedelta(minutes=1))
dist.destroy_process_group()
