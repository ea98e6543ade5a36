"""A metric is shared only where the loss is high, and on rank 2 of four it is not, in the third step."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {
    "verdict": "HANG",
    "kind": "deadlock",
    "cause": "rank_conditional_collective",
    "culprit": [2],
    "step": 3,
    "ranks": 4,
}

rank, _ = begin()
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=1e-3)
for step in range(1, 6):
    scale = 0.1 if FAULT and (rank, step) == (2, 3) else 1.0
    loss = (weight * scale).sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    if loss > 4:
        history = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(history, loss.detach().reshape(1))  # to blame
end()
