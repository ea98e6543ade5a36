"""The best rank sends its weights to the others, but rank 1 has another opinion of who that is."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "root_mismatch", "culprit": [1], "step": 4, "ranks": 3}

rank, world_size = begin()
trainer = Trainer()
for step in range(1, 6):
    trainer.step()
    best = step % world_size
    if FAULT and rank == 1 and step == 4:
        best = 2
    weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
    dist.broadcast(weights.detach(), src=best)  # to blame
end()
