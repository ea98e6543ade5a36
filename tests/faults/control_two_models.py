"""Two models under DDP with an optimizer each, trained in turn, as a GAN is."""

import torch
from _job import begin, blocks, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS"}

begin()
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16)))
judge = DistributedDataParallel(blocks())
for_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
for_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
for _ in range(5):
    for_judge.zero_grad()
    (judge(torch.randn(8, 16)).mean() - judge(maker(torch.randn(8, 4)).detach()).mean()).backward()
    for_judge.step()
    for_maker.zero_grad()
    for_judge.zero_grad()
    judge(maker(torch.randn(8, 4))).mean().backward()
    for_maker.step()
end()
