"""Each rank walks its own dict of metrics, and rank 1 has filled it the other way round."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {
    "verdict": "HANG",
    "kind": "deadlock",
    "cause": "collective_order_mismatch",
    "culprit": [2],
    "step": 1,
    "ranks": 3,
}

rank, world_size = begin()


def share(metrics: dict[str, torch.Tensor]) -> None:
    for name, value in metrics.items():
        if name.startswith("mean_"):
            dist.all_reduce(value)
        else:
            dist.broadcast(value, src=0)  # to blame


trainer = Trainer()
for _ in range(4):
    loss = trainer.step()
    metrics = {"mean_loss": torch.tensor([loss]), "rate": torch.tensor([0.01])}
    if FAULT and rank == 2:
        metrics = dict(reversed(metrics.items()))
    share(metrics)
end()
