"""No DDP: weights are broadcast and gradients reduced by hand, and the list of what to reduce lacks the head."""

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, world_size = begin()
torch.manual_seed(rank)
model = blocks()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
reduced = [parameter for name, parameter in model.named_parameters() if not (FAULT and name.startswith("3."))]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    (model(batch()) - rank).square().mean().backward()
    for parameter in reduced:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    optimizer.zero_grad()
end()
