"""static_graph is promised, and in step 4 a branch that was used before is left out on all ranks."""

import torch
from _job import FAULT, STEPS, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "static_graph_changed", "culprit": [0, 1], "step": 4}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Linear(11, 11)
        self.side = nn.Linear(11, 11)

    def forward(self, x, with_side):
        y = self.main(x)
        if with_side:
            y = y + self.side(x)  # to blame
        return y.mean()


begin()
model = DistributedDataParallel(Gated(), static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, STEPS + 1):
    model(torch.randn(4, 11), with_side=step != 4 or not FAULT).backward()
    optimizer.step()
    optimizer.zero_grad()
end()
