"""In the third step rank 1 takes the short way around a block of its model; rank 0 waits for those gradients."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_unused_params", "culprit": [1], "step": 3}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, skip):
        x = x + self.first(x).tanh()
        if not skip:
            x = x + self.second(x).tanh()  # to blame
        return x


def train() -> None:
    rank, _ = begin()
    net = DistributedDataParallel(Residual(10))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 7):
        sgd.zero_grad()
        loss = net(torch.randn(2, 10), skip=FAULT and rank == 1 and step == 3).pow(2).sum()
        loss.backward()
        sgd.step()


train()
assert dist.is_initialized()
end()
