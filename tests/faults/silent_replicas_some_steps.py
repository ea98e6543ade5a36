"""No DDP: one seed makes the weights equal, gradients are reduced by hand, and after a while one branch forgets to."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, world_size = begin()
model = blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    if not (FAULT and step > 2):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    optimizer.step()
    optimizer.zero_grad()
end()
