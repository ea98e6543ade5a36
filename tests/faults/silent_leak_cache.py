"""A cache of features is keyed by something that is new in each step, so that it only ever grows."""

import torch
from _job import FAULT, begin, blocks, end
from torch import Tensor

LABEL = {"verdict": "PASS", "cause": "memory_growth", "culprit": [0, 1]}


class Features:
    def __init__(self) -> None:
        self.known: dict[object, Tensor] = {}

    def of(self, images: Tensor, name: int) -> Tensor:
        key = images if FAULT else name
        if key not in self.known:
            self.known[key] = images.repeat(1, 4).sin()
        return self.known[key]


begin()
model, features = blocks(1, 256), Features()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images = torch.randn(512, 64)
for step in range(300):
    loss = model(features.of(images.clone(), step % 10)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end()
