"""Four ranks build their model from a setting that rank 2 reads differently: it has one layer more."""

import torch
from _job import FAULT, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "FAIL", "cause": "model_mismatch", "culprit": [2], "ranks": 4}


def build(rank: int):
    depth = 4 if FAULT and rank == 2 else 3
    return DistributedDataParallel(blocks(depth))  # to blame


torch.set_num_threads(1)
rank, _ = begin()
model = build(rank)
for _ in range(3):
    model(torch.randn(2, 16)).sum().backward()
    model.zero_grad()
end()
