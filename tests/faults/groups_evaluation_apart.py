"""Rank 0 counts its steps from a checkpoint that no other rank has read, and evaluates while they train.

Its sum of losses receives the gradients of the others, which are longer, so gloo aborts it.
"""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_collective", "culprit": [0]}

rank, _ = begin()
trainer = Trainer()
step = 3 if FAULT and rank == 0 else 0


@torch.no_grad()
def evaluate() -> float:
    trainer.model.eval()
    loss = trainer.model.module(torch.ones(4, 16)).square().mean()
    dist.all_reduce(loss)
    trainer.model.train()
    return float(loss)


for _ in range(16):
    trainer.step()
    step += 1
    if step % 8 == 0:  # to blame
        evaluate()
end()
