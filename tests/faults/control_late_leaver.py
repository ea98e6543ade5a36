"""Rank 1 still writes its results when the other has long ended, in order."""

import time

import torch.distributed as dist
from _job import Trainer, begin

LABEL = {"verdict": "PASS"}

rank, _ = begin()
trainer = Trainer()
for _ in range(3):
    trainer.step()
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    time.sleep(8)
