"""A gradient hook of rank 1 checks a norm and raises in step 4."""

import torch
from _job import FAULT, STEPS, Trainer, begin, blocks, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [1], "step": 4}


def clip(grad: torch.Tensor) -> torch.Tensor:
    limit = -1.0 if FAULT and rank == 1 and step == 4 else 1e9
    if float(grad.norm()) > limit:
        raise ArithmeticError(f"gradient norm above {limit}")  # to blame
    return grad


rank, _ = begin()
net = blocks(2)
net[1][0].weight.register_hook(clip)
trainer = Trainer(net)
for step in range(1, STEPS + 1):
    loss = trainer.step()
    print(f"step {step} loss {loss:.4f}")
end()
