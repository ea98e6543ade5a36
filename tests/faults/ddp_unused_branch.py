"""From the third step on no rank uses one of two heads any more, and DDP still waits for its gradients."""

import torch
from _job import FAULT, STEPS, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "unused_params", "culprit": [0, 1], "step": 3}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.value = nn.Linear(12, 1)
        self.policy = nn.Linear(12, 4)

    def forward(self, x: Tensor, warm: bool) -> Tensor:
        hidden = self.trunk(x).relu()
        loss = self.value(hidden).square().mean()
        if warm:
            loss = loss + self.policy(hidden).square().mean()  # to blame
        return loss


begin()
model = DistributedDataParallel(TwoHeads())
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, STEPS + 1):
    model(torch.randn(3, 12), warm=step < 3 or not FAULT).backward()
    optimizer.step()
    optimizer.zero_grad()
end()
