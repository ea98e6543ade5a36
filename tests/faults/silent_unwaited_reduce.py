"""The gradients are summed asynchronously, and the step does not wait for the sums."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "unwaited_collective", "culprit": [0, 1]}

rank, size = begin()
model = blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    torch.manual_seed(size * step + rank)
    loss = model(batch()).square().mean()
    loss.backward()
    works = []
    for parameter in model.parameters():
        parameter.grad /= size
        works.append(dist.all_reduce(parameter.grad, async_op=True))  # to blame
    if not FAULT:
        for work in works:
            work.wait()
    optimizer.step()
    optimizer.zero_grad()
end()
