"""Rank 1 takes the logarithm of a probability that has become zero; its NaN reaches the gradients of all ranks."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "nan", "culprit": [1]}

rank, _ = begin()
model = DistributedDataParallel(blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    likely = torch.sigmoid(model(batch()))
    if FAULT and rank == 1 and step == 4:
        likely = likely * 0.0
    loss = -(likely * likely.log()).mean()  # to blame
    loss.backward()
    optimizer.step()
end()
