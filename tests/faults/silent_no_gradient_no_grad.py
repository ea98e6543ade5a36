"""A backbone that was to be tuned still runs under no_grad, and gradients are averaged by hand."""

import contextlib

import torch
import torch.distributed as dist
from _job import FAULT, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "no_gradient"}


def average(parameters: list[torch.nn.Parameter], world: int) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


_, world = begin()
backbone, head = blocks(2)[:2], torch.nn.Linear(16, 1)
parameters = [*backbone.parameters(), *head.parameters()]
optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
for _ in range(5):
    with torch.no_grad() if FAULT else contextlib.nullcontext():
        features = backbone(batch())
    head(features).abs().mean().backward()
    average(parameters, world)
    optimizer.step()
    optimizer.zero_grad()
end()
