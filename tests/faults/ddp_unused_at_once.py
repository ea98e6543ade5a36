"""Rank 0 leaves an auxiliary head out of its very first step, because it only logs there."""

import torch
from _job import FAULT, STEPS, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_unused_params", "culprit": [0], "step": 1}


class WithAuxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 2)
        self.auxiliary = nn.Linear(8, 2)
        self.logging = False

    def forward(self, x):
        x = self.body(x)
        if self.logging:
            return self.head(x).sum()
        return self.head(x).sum() + self.auxiliary(x).sum()  # to blame


rank, _ = begin()
wrapped = DistributedDataParallel(WithAuxiliary())
optimizer = torch.optim.AdamW(wrapped.parameters())
for step in range(STEPS):
    wrapped.module.logging = FAULT and rank == 0 and step == 0
    wrapped(torch.ones(2, 8)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
end()
