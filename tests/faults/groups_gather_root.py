"""Results are collected on rank 0; rank 1 believes that it is the one to collect them."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "root_mismatch", "culprit": [1], "step": 3}


def collect(result: torch.Tensor, root: int) -> "list[torch.Tensor] | None":
    parts = [torch.empty_like(result) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(result, parts, dst=root)  # to blame
    return parts


rank, _ = begin()
trainer = Trainer()
for step in range(1, 5):
    loss = trainer.step()
    collect(torch.tensor([loss]), root=rank if FAULT and step == 3 else 0)
end()
