"""What is recomputed reads a setting that changed between forward and backward: other shapes on rank 0, step 3."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as gc

LABEL = {"verdict": "FAIL", "cause": "checkpoint_recompute_mismatch", "culprit": [0], "step": 3}
window = {"size": 8}


def windowed(x, weight):
    kept = x[: window["size"]]  # to blame
    return (kept @ weight).sigmoid().square().sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x):
        return gc.checkpoint(windowed, x, self.weight, use_reentrant=False)


rank, _ = begin()
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 6):
    window["size"] = 8
    loss = model(torch.randn(8, 6))
    if FAULT and rank == 0 and step == 3:
        window["size"] = 4
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
end()
