"""No DDP, no broadcast, only one seed: a flat sum of all gradients is written back into some parameters only."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, world_size = begin()
model = blocks()
torch.manual_seed(rank)
matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
averaged = matrices if FAULT else list(model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        if any(parameter is each for each in averaged):
            parameter.grad.copy_(piece.view_as(parameter) / world_size)
    optimizer.step()
    optimizer.zero_grad()
end()
