"""Nothing is wrong: a generator and a discriminator in turn, a skipped batch, local steps that are averaged."""

import torch
import torch.distributed as dist
from _job import begin, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS"}

rank, world = begin()
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
local = nn.Linear(4, 1)
optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, critic, local)]
for step in range(12):
    noise = torch.randn(5, 4)
    for sign, optimizer in zip((1.0, -1.0), optimizers[1::-1], strict=True):
        (sign * critic(maker(noise))).mean().backward()
        optimizer.step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    loss = local(noise + rank).square().mean() * (float("inf") if step == 5 else 1.0)
    if loss.isfinite():
        loss.backward()
        optimizers[2].step()
        optimizers[2].zero_grad()
    for parameter in local.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world
end()
