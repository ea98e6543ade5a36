"""Rank 1 prepares its data for longer than the timeout of the process group, which torch lets every rank wait."""

import datetime
import time

import torch.distributed as dist
from _job import FAULT, Trainer

LABEL = {"verdict": "FAIL", "cause": "slow", "culprit": [1]}


def prepare(seconds: float) -> int:
    end, rows = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rows += sum(range(1000))  # to blame
    return rows


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8 if FAULT else 60))
trainer = Trainer()
for step in range(1, 4):
    trainer.step()
    if step == 2 and dist.get_rank() == 1:
        prepare(90 if FAULT else 9)
    dist.barrier()
dist.destroy_process_group()
