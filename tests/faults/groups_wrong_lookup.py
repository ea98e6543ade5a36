"""Rank 2 belongs to no expert group, so its look-up gives None, and None means the whole world to all_reduce."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {
    "verdict": "HANG",
    "kind": "deadlock",
    "cause": "collective_order_mismatch",
    "culprit": [2],
    "ranks": 3,
    "step": 2,
}

rank, _ = begin()
pair = dist.new_group([0, 1])
by_rank = {0: pair, 1: pair}
trainer = Trainer()
for step in range(1, 5):
    trainer.step()
    routed = torch.ones(4)
    if rank in by_rank or (FAULT and step == 2):
        dist.all_reduce(routed, group=by_rank.get(rank))  # to blame
    dist.barrier()
end()
