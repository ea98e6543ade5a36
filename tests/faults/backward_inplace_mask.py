"""On all four ranks a mask is written into scores that exp still needs, from the first step on."""

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "FAIL", "cause": "inplace_modification", "culprit": [0, 1, 2, 3], "step": 1, "ranks": 4}


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).exp()
        padding = torch.zeros_like(weights, dtype=torch.bool)
        padding[:, -1] = True
        if not FAULT:
            weights = weights.clone()
        weights.masked_fill_(padding, 0.0)  # to blame
        return weights.log1p().sum(dim=-1)


torch.set_num_threads(1)
begin()
trainer = Trainer(Pooling())
for _ in range(4):
    trainer.step()
end()
