"""static_graph is promised, and in step 3 a layer that was unused so far is thawed into the graph."""

import torch
from _job import FAULT, STEPS, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "static_graph_changed", "culprit": [0, 1], "step": 3}


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.refine = nn.Linear(5, 5)
        self.stage = 1

    def forward(self, x):
        x = self.base(x)
        if self.stage > 1:
            x = self.refine(x)  # to blame
        return x


begin()
staged = Staged()
if not FAULT:
    staged.stage = 2
model = DistributedDataParallel(staged, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, STEPS + 1):
    if step == 3:
        staged.stage = 2
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
