"""A layer under fully_shard refuses the input of rank 2 of four in the second step."""

import torch
from _job import FAULT, begin, end
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [2], "step": 2, "ranks": 4}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.max() > 100:
            raise ValueError(f"token {int(tokens.max())} is outside the vocabulary")  # to blame
        return self.table(tokens)


rank, _ = begin()
model = nn.Sequential(Embedding(), nn.Tanh(), nn.Linear(16, 1))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 5):
    tokens = torch.ones(2, 16)
    if FAULT and rank == 2 and step == 2:
        tokens[0, 0] = 999
    model(tokens).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
