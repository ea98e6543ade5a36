"""Rank 0 shifts an activation in place in its second step, after a sigmoid has saved it for the backward pass."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "inplace_modification", "culprit": [0], "step": 2}


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 1)

    def forward(self, x, shift):
        gate = torch.sigmoid(self.enter(x))
        if shift:
            gate += 1.0  # to blame
        return self.leave(gate)


rank, _ = begin()
model = DistributedDataParallel(Shifted())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 6):
    out = model(torch.randn(3, 4), FAULT and rank == 0 and step == 2)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
