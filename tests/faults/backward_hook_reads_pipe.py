"""A gradient hook of rank 2 asks a helper for advice through a pipe, and the helper never writes in step 2."""

import os

import torch
from _job import FAULT, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "HANG", "cause": "blocked_io", "culprit": [2], "step": 2, "ranks": 4}


class Advice:
    def __init__(self, silent_at):
        self.receiver, self.sender = os.pipe()
        self.asked, self.silent_at = 0, silent_at

    def __call__(self, grad):
        self.asked += 1
        if self.asked != self.silent_at:
            os.write(self.sender, b"1")
        return grad * int(os.read(self.receiver, 1))  # to blame


torch.set_num_threads(1)
rank, _ = begin()
net = blocks(2)
net[0][0].weight.register_hook(Advice(2 if FAULT and rank == 2 else None))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
