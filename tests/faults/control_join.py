"""Ranks have unequal numbers of batches, and the Join context makes that right."""

import torch
from _job import batch, begin, blocks, end
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS"}

rank, _ = begin()
model = DistributedDataParallel(blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Join([model]):
    for _ in range(4 + 3 * rank):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
end()
