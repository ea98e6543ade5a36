"""One projection serves two checkpointed segments of the reentrant kind: its gradients are ready twice."""

import torch
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "FAIL", "cause": "ready_twice", "culprit": [0, 1], "step": 1}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(7, 7)
        self.cell = nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for _ in range(2):
            x = checkpoint(self.cell, x, use_reentrant=FAULT)  # to blame
        return x


begin()
model = DistributedDataParallel(Recurrent())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
