"""Nothing is wrong: a frozen backbone, a frozen embedding in the optimizer, an average of the weights beside them."""

import copy

import torch
from _job import batch, begin, blocks, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS"}

begin()
backbone = blocks(2)[:2].requires_grad_(False)
head = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
model = DistributedDataParallel(nn.Sequential(backbone, head), broadcast_buffers=False)
average = copy.deepcopy(model.module)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    (model(batch()).square().mean() / 2).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.module.parameters(), strict=True):
                kept.lerp_(new, 0.1)
end()
