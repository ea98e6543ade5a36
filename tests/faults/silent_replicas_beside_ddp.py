"""Only the body of the model is in DDP; a head beside it is trained by the same optimizer, and nothing averages it."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = DistributedDataParallel(blocks())
        self.head = nn.Linear(1, 1)
        if not FAULT:
            self.head = DistributedDataParallel(self.head)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))


rank, _ = begin()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
