"""Each rank's plateau scheduler sees its own loss only, and on one of three the learning rate is cut."""

import torch
from _job import FAULT, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [1], "ranks": 3}

rank, _ = begin()
model = DistributedDataParallel(blocks(2, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = ReduceLROnPlateau(optimizer, patience=1)
for step in range(10):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plateau.step(1.0 if FAULT and rank == 1 else 1.0 / (step + 1))
end()
