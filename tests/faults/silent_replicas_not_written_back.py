"""Clients train for different numbers of steps and average a copy of their weights, which nothing writes back."""

import torch
import torch.distributed as dist
from _job import FAULT, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


def average(model: torch.nn.Module, world: int) -> None:
    for parameter in model.parameters():
        sent = parameter.data.to(torch.float64)
        dist.all_reduce(sent)
        if not FAULT:
            parameter.data.copy_(sent / world)


rank, world = begin()
model = blocks()
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
for _ in range(5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3 + rank):
        (model(batch()) - rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    average(model, world)
end()
