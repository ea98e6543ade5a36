"""Gradients are summed over the ranks by hand, and rank 1 has none of its own: its weight is zero for every sample."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "no_gradient", "culprit": [1]}

rank, size = begin()
model = blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    weights = torch.full((4, 1), 0.0 if FAULT and rank == 1 else 1.0)
    (weights * model(batch()).square()).mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    optimizer.zero_grad()
end()
