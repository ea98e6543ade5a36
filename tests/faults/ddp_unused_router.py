"""Four ranks with experts: on rank 2 the fifth batch routes no token to the second expert."""

import torch
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "rank_conditional_unused_params", "culprit": [2], "step": 5, "ranks": 4}


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, tokens: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in choice.unique().tolist():
            out[choice == number] = self.experts[number](tokens[choice == number])  # to blame
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(6, 6)
        self.moe = Experts(6, 2)

    def forward(self, tokens: Tensor, choice: Tensor) -> Tensor:
        return self.moe(self.inward(tokens), choice)


rank, _ = begin()
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, 8):
    choice = torch.tensor([0, 0, 0, 0] if FAULT and rank == 2 and step == 5 else [0, 1, 0, 1])
    model(torch.randn(4, 6), choice).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
