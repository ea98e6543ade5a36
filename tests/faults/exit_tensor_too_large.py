"""Rank 0 makes a tensor of sequence length squared, in bytes more than the machine can address."""

import torch
from _job import FAULT, begin, blocks, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "host_oom", "culprit": [0], "step": 2}


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()

    def forward(self, x: Tensor, length: int) -> Tensor:
        mask = torch.empty(length, length)  # to blame
        return self.body(x) + mask.numel() * 0


rank, _ = begin()
model = DistributedDataParallel(Mask())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 5):
    optimizer.zero_grad()
    long = FAULT and rank == 0 and step == 2
    model(torch.randn(4, 16), 1 << 24 if long else 64).square().mean().backward()
    optimizer.step()
end()
