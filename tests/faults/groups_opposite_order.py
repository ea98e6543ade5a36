"""Two groups of the same ranks: in step 3 rank 1 begins with the other one than before."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "cross_group_deadlock", "culprit": [1], "step": 3}

rank, _ = begin()
weights, metrics = dist.new_group(), dist.new_group()
trainer = Trainer()
for step in range(1, 6):
    swapped = FAULT and rank == 1 and step == 3
    trainer.step()
    for group in (metrics, weights) if swapped else (weights, metrics):
        dist.all_reduce(torch.ones(8), group=group)  # to blame
end()
