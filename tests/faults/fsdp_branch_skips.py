"""A mixture of two experts under fully_shard: rank 1's batch needs only one of them, in the third step."""

import torch
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_collective", "culprit": [1], "step": 3}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(16, 1)
        self.project = nn.Linear(24, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        if both:
            x = x + self.project(self.second(x))  # to blame
        return self.head(x)


rank, _ = begin()
model = Mixture()
for part in model.children():
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 6):
    model(torch.randn(4, 16), both=not (FAULT and rank == 1 and step == 3)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
