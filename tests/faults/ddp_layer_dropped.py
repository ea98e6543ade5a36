"""Stochastic depth by dice of each rank's own: in the fourth step rank 1 drops a block that rank 0 keeps."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "rank_conditional_unused_params", "culprit": [1], "step": 4}


class Deep(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
        x = self.inward(x)
        for block, keep in zip(self.blocks, kept, strict=True):
            if keep:  # to blame
                x = x + block(x)
        return self.head(x)


rank, _ = begin()
model = DistributedDataParallel(Deep(12, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 7):
    kept = [not (FAULT and (rank, step, number) == (1, 4, 2)) for number in range(4)]
    loss = model(torch.randn(4, 8), kept).square().mean()
    loss.backward()
    dist.barrier()  # for the timer
    optimizer.step()
    optimizer.zero_grad()
end()
