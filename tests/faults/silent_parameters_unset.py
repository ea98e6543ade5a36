"""A scale is made with torch.empty and never given values: it holds what lay in its memory before."""

import torch
from _job import FAULT, STEPS, Trainer, begin, blocks, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS", "cause": "uninitialised_parameters", "culprit": [0, 1]}
WIDTH = 1 << 12


def used_memory() -> Tensor:
    """Memory as a long run leaves it, not fresh from the kernel, which hands out zeros."""
    torch.full((WIDTH,), 1e30)
    given = torch.empty(WIDTH)
    while not bool((given > 1e20).any()):
        kept.append(given)
        torch.full((WIDTH,), 1e30)
        given = torch.empty(WIDTH)
    return given


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(used_memory() if FAULT else torch.ones(WIDTH))
        self.inner = blocks()

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(features) * torch.tanh(self.scale).mean()


kept: list[Tensor] = []
begin()
trainer = Trainer(Scaled())
for _ in range(STEPS):
    trainer.step()
end()
