"""A search inside rank 1's forward never comes closer to its end: 64-bit wrap-around in plain Python."""

import torch
from _job import FAULT, STEPS, Trainer, begin, end
from torch import nn

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "infinite_loop", "culprit": [1], "step": 3,
    "limits": {"busy_s": 8},
}  # fmt: skip


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        odd = FAULT and rank == 1 and self.calls == 3
        value = 3 if odd else 4
        while value % 4:
            value = value * value % 8 + 2 * odd - 2 * odd  # to blame
        return self.inner(x)


rank, _ = begin()
trainer = Trainer(nn.Sequential(Rounded(), nn.Linear(16, 1)))
for _ in range(STEPS):
    trainer.step()
end()
