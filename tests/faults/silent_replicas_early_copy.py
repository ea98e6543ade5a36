"""The moving average is copied before DDP broadcasts the weights, and every rank has a seed of its own."""

import copy

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
torch.manual_seed(rank)
model = blocks()
average = copy.deepcopy(model)
wrapped = DistributedDataParallel(model)
if not FAULT:
    average = copy.deepcopy(wrapped.module)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
for _ in range(2 * STEPS):
    (wrapped(batch()) - rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), wrapped.module.parameters(), strict=True):
            mean.lerp_(parameter, 0.01)
end()
