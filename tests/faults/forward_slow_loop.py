"""Attention is a loop in Python over tokens and heads: it moves, and will not be done by the deadline."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "FAIL", "cause": "slow", "limits": {"deadline_s": 30}}


class Attention(nn.Module):
    def __init__(self, tokens: int, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.read, self.out = tokens, nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        mixed = torch.zeros_like(states)
        for token in range(self.tokens):
            mixed = mixed + torch.softmax(self.read(states + 0.001 * token), dim=-1)
        return self.out(mixed)


begin()
trainer = Trainer(Attention(20_000 if FAULT else 20))
for _ in range(40):
    trainer.step()
end()
