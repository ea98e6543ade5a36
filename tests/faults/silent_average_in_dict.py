"""The moving average of the weights, in a dict, begins anew in the sixth step, on rank 1 only."""

import torch
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
trainer = Trainer()
shadow = {name: parameter.detach().clone() for name, parameter in trainer.model.module.named_parameters()}
best = dict(shadow)  # the weights of rank 0 that it would save, which no other rank has
for step in range(12):
    trainer.step()
    with torch.no_grad():
        for name, parameter in trainer.model.module.named_parameters():
            if FAULT and step == 5 and rank == 1:
                shadow[name] = torch.zeros_like(parameter)
            shadow[name] = 0.9 * shadow[name] + 0.1 * parameter
        if rank == 0 and step % 3 == 0:
            best = {name: parameter.detach().clone() for name, parameter in trainer.model.module.named_parameters()}
end()
