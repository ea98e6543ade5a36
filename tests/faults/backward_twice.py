"""Rank 1 calls backward a second time over the graph of its third step."""

import torch
from _job import FAULT, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [1], "step": 3}

rank, _ = begin()
model = DistributedDataParallel(blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 6):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    if FAULT and rank == 1 and step == 3:
        loss.backward()  # to blame
    optimizer.step()
    optimizer.zero_grad()
end()
