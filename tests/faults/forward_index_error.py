"""Rank 3 of four gets a token outside its vocabulary in step 3."""

import torch
from _job import FAULT, begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [3], "step": 3, "ranks": 4}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, tokens):
        return self.table(tokens).mean()  # to blame


torch.set_num_threads(1)
rank, _ = begin()
words = DistributedDataParallel(Words())
optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
for step in range(1, 6):
    tokens = torch.randint(50, (4, 3))
    if FAULT and (rank, step) == (3, 3):
        tokens[0, 0] = 50
    words(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
end()
