"""A checkpointed block counts its calls and takes another way when it is computed once more, in step 2 of rank 1."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import nn
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "FAIL", "cause": "checkpoint_recompute_mismatch", "culprit": [1], "step": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if FAULT and self.calls == 4 and rank == 1:  # to blame
            return self.linear(x)
        return torch.tanh(self.linear(x)).exp()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


rank, _ = begin()
trainer = Trainer(Net())
for _ in range(4):
    trainer.step()
end()
