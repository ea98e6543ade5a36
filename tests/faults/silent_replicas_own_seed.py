"""No DDP: every gradient is reduced, but each rank made its model from a seed of its own and nobody broadcast it."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, world_size = begin()
if FAULT:
    torch.manual_seed(rank)
model = blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    optimizer.zero_grad()
end()
