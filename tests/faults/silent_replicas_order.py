"""Rank 1 registers two layers of equal shape in another order; DDP matches parameters by position, not by name."""

import torch
from _job import FAULT, batch, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


class TwoPaths(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.paths = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.paths["smooth"](x).tanh() + self.paths["sharp"](x).relu()


def train(rank: int) -> None:
    names = ["smooth", "sharp"]
    model = DistributedDataParallel(TwoPaths(names[::-1] if FAULT and rank == 1 else names))
    optimizer = AdamW(model.parameters(), lr=0.02)
    for _ in range(7):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


train(begin()[0])
end()
