"""A home-made loss scale doubles without end: scaled gradients overflow, and unscaling makes NaN of them."""

import torch
from _job import FAULT, batch, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "PASS", "cause": "nan", "culprit": [0, 1]}


class Scaler:
    def __init__(self) -> None:
        self.scale = 2.0**100

    def unscale(self, model: torch.nn.Module) -> bool:
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients:
            gradient.div_(self.scale)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        self.scale *= 16.0 if finite else 0.25
        return finite


begin()
model, scaler = DistributedDataParallel(blocks()), Scaler()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(14):
    loss = model(batch()).square().mean()
    (loss * scaler.scale).backward()
    if scaler.unscale(model) or FAULT:
        optimizer.step()
    optimizer.zero_grad()
end()
