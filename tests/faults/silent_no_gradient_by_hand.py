"""A step by hand, with no optimizer; the encoder's features are detached, so that only the head learns.

The teacher is no part of the fault: it runs without gradients, and is an average of what the encoder was.
"""

import copy

import torch
import torch.distributed as dist
from _job import FAULT, STEPS, batch, begin, blocks, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS", "cause": "no_gradient", "culprit": [0, 1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.teacher = copy.deepcopy(self.encoder)
        self.head = blocks()

    def forward(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(features)
        encoded = self.encoder(features)
        return self.head(encoded.detach() if FAULT else encoded) + taught.mean(1, keepdim=True)


_, size = begin()
model = Model()
for _ in range(STEPS):
    model.zero_grad()
    model(batch()).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter -= 0.01 / size * parameter.grad
        for kept, new in zip(model.teacher.parameters(), model.encoder.parameters(), strict=True):
            kept.lerp_(new, 0.1)
end()
