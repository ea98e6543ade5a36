"""A layer is made and forgotten: no rank ever calls it, so the second step cannot begin."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "FAIL", "cause": "unused_params", "culprit": [0, 1], "step": 1}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.pooler = nn.Linear(8, 8)  # to blame
        self.out = nn.Linear(8, 1)
        if not FAULT:
            self.pooler.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.embed(x))))


begin()
trainer = Trainer(Encoder())
for _ in range(4):
    trainer.step()
end()
