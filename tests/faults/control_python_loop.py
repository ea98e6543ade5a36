"""The forward pass is a slow loop in Python over tokens, on every rank."""

import torch
from _job import Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, states: Tensor) -> Tensor:
        hidden = torch.zeros_like(states)
        for _ in range(2500):
            hidden = torch.tanh(self.inner(states + hidden))
        return self.out(hidden)


begin()
trainer = Trainer(Recurrent())
for _ in range(5):
    trainer.step()
end()
