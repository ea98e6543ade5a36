"""Rank 0 feeds a batch with a row too many in its second step."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [0], "step": 2}


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, memory):
        scores = self.query(x) @ self.key(memory).t()
        return scores + torch.eye(4)  # to blame


rank, _ = begin()
model = DistributedDataParallel(Attention(6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 5):
    rows = 5 if FAULT and rank == 0 and step == 2 else 4
    model(torch.randn(rows, 6), torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
