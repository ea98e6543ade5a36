"""The program calls the model inside of DDP and updates its parameters itself, without an optimizer of torch."""

import torch
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
model = DistributedDataParallel(blocks())
for _ in range(STEPS):
    rows = batch() + rank
    outputs = model.module(rows) if FAULT else model(rows)
    outputs.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    model.zero_grad()
end()
