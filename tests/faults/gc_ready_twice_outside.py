"""A weight is used inside a reentrant checkpoint and once more outside it."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

LABEL = {"verdict": "FAIL", "cause": "ready_twice", "culprit": [0, 1, 2, 3], "step": 1, "ranks": 4}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)

    def inner(self, x):
        return self.tied(x).tanh()

    def forward(self, x):
        x = checkpoint(self.inner, self.scale(x), use_reentrant=FAULT)
        return linear(x, self.tied.weight.t())  # to blame


torch.set_num_threads(1)
begin()
trainer = Trainer(Tied())
for _ in range(3):
    trainer.step()
end()
