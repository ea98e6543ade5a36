"""Under DDP the first block is checkpointed the reentrant way on data that needs no gradient."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import nn
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "FAIL", "cause": "reentrant_no_grad_input", "culprit": [0, 1], "step": 1}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=FAULT)  # to blame
            x = torch.tanh(x)
        return x


begin()
trainer = Trainer(nn.Sequential(Stack(), nn.Linear(16, 1)))
for _ in range(4):
    trainer.step()
end()
