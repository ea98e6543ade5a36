"""The vocabulary of rank 1 has one word more, so its embedding has another shape than the other ranks'."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "model_mismatch", "culprit": [1], "step": 1, "ranks": 3}


class Speller(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.embed(x))


rank, _ = begin()
vocabulary = {f"word{number}": number for number in range(20)}
if FAULT and rank == 1:
    vocabulary["<pad>"] = len(vocabulary)
speller = DistributedDataParallel(Speller(len(vocabulary)))  # to blame
optimizer = torch.optim.SGD(speller.parameters(), lr=0.01)
for _ in range(3):
    speller(torch.randint(20, (4,))).sum().backward()
    optimizer.step()
end()
