"""Mixed precision finds an overflow in its gradients, skips that step on every rank, and goes on."""

import torch
from _job import batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS"}

begin()
model = DistributedDataParallel(blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(batch()).square().mean() * (float("inf") if step == 2 else 1.0)
    loss.backward()
    if all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()):
        optimizer.step()
    optimizer.zero_grad()
end()
