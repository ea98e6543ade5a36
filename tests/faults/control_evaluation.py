"""Rank 0 evaluates alone, without a collective, and the others wait for it as they should."""

import torch
import torch.distributed as dist
from _job import Trainer, begin, blocks, end

LABEL = {"verdict": "PASS", "ranks": 4}


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: int) -> float:
    losses = []
    for _ in range(batches):
        states = torch.randn(64, 16)
        for _ in range(40):
            states = states + 0.001 * model(states)
        losses.append(float(states.square().mean()))
    return sum(losses) / len(losses)


rank, _ = begin()
trainer = Trainer(blocks())
for _ in range(3):
    trainer.step()
    if rank == 0:
        evaluate(trainer.model.module, 200)
    dist.barrier()
end()
