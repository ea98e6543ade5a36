"""A thread counts samples in the group in which DDP reduces gradients: first on one rank, last on the other."""

import threading
import time

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "collective_order_mismatch", "culprit": [0, 1]}

rank, _ = begin()
trainer = Trainer()
group = dist.group.WORLD if FAULT else dist.new_group()


def count(samples: int, delay_s: float) -> None:
    time.sleep(delay_s)
    dist.all_reduce(torch.tensor(float(samples)), group=group)  # to blame


for step in range(4):
    trainer.step()
    counts = threading.Thread(target=count, args=(4, 1.0 if rank == 1 and step == 2 else 0.0))
    counts.start()
    if step == 2:
        time.sleep(0.3 if rank == 0 else 0.8)  # rank 0 is in its backward pass when the gradients of rank 1 arrive
    trainer.step()
    counts.join()
end()
