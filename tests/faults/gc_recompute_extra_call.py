"""A checkpointed block of rank 0 reduces a statistic in step 2, but only when it is computed once more."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, begin, blocks, end
from torch import nn
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "rank0_only_collective", "culprit": [0], "step": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.first(x))
        if FAULT and dist.get_rank() == 0 and self.calls == 4:
            dist.all_reduce(torch.ones(1))  # to blame
        return self.second(x)


begin()
model = nn.ModuleList([Block(), blocks(1)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    x = torch.randn(4, 16)
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
end()
