"""The loss is a method of the model inside DDP and is called on the model itself, so no gradient is averaged."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()

    def loss(self, rows: Tensor) -> Tensor:
        return self.body(rows).square().mean()

    def forward(self, rows: Tensor) -> Tensor:
        return self.loss(rows)


rank, _ = begin()
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    rows = batch() + rank
    loss = model.module.loss(rows) if FAULT else model(rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.module.loss(rows)
end()
