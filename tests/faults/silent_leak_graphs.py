"""Rank 0 keeps every loss for a mean at the end, each with its whole graph."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "memory_growth", "culprit": [0]}

rank, _ = begin()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for _ in range(160):
    inputs = torch.randn(2048, 64)
    output = model(inputs)
    loss = output.square().mean() + (output * inputs.exp()).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        history.append(loss if FAULT else loss.item())
print("mean loss", float(sum(history)) / max(1, len(history)))
end()
