"""Each rank trains a model of its own from one seed, and averages another now and then: neither is a replica."""

import torch
import torch.distributed as dist
from _job import STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS"}

rank, world_size = begin()
own, averaged = blocks(), blocks(2)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (own, averaged)]
for parameter in averaged.parameters():
    dist.broadcast(parameter.data, 0)
for step in range(STEPS + 2):
    for model, optimizer in zip((own, averaged), optimizers, strict=True):
        (model(batch()) - rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 3 == 2:
        for parameter in averaged.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world_size
end()
