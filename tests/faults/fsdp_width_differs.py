"""Rank 2 builds its last layer for another number of classes, and fully_shard gathers shards of two sizes."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.distributed.fsdp import fully_shard

LABEL = {"verdict": "FAIL", "cause": "shape_mismatch", "culprit": [2], "ranks": 3}


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


rank, _ = begin()
model = Classifier(60 if FAULT and rank == 2 else 12)  # to blame
fully_shard(model.head)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    loss = model(torch.randn(3, 16)).logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end()
