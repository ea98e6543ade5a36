"""The model is wrapped in DDP, but the result is not kept, and the program trains the model without DDP."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
model = blocks()
wrapped = DistributedDataParallel(model)
if FAULT:
    del wrapped
else:
    model = wrapped
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
