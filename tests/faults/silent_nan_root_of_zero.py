"""A distance between equal vectors has a finite value and no finite gradient: its root is taken of zero."""

import torch
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "nan", "culprit": [0, 1]}


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        gap = (self.encoder(left) - self.encoder(right)).square().sum(-1)
        return gap.sqrt() if FAULT else (gap + 1e-9).sqrt()


begin()
model = DistributedDataParallel(Siamese())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    left = torch.randn(5, 12)
    right = left.clone() if step == 2 else torch.randn(5, 12)
    model(left, right).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
