"""The first block is checkpointed the reentrant way on raw data: it never learns, and nothing fails."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch import nn
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "PASS", "cause": "reentrant_no_grad_input", "culprit": [0, 1]}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(6, 6)
        self.upper = nn.Linear(6, 1)

    def forward(self, x):
        return self.upper(checkpoint(self.lower, x, use_reentrant=FAULT))  # to blame


begin()
tower = Tower()
optimizer = torch.optim.SGD(tower.parameters(), lr=0.01)
for _ in range(5):
    tower(torch.randn(3, 6)).sum().backward()
    for parameter in tower.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
end()
