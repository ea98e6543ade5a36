"""An adapter is added to the model after DDP has wrapped the model, so DDP does not average the adapter's gradients."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.adapter = nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(self.adapter(rows))


rank, _ = begin()
model = Model()
if not FAULT:
    model.adapter = nn.Linear(16, 16)
wrapped = DistributedDataParallel(model)
if FAULT:
    wrapped.module.adapter = nn.Linear(16, 16)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
for _ in range(STEPS):
    (wrapped(batch()) - rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
