"""The moving average of the weights is updated on every rank, but from the fifth step on not on rank 1."""

import copy

import torch
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}

rank, _ = begin()
trainer = Trainer()
average = copy.deepcopy(trainer.model.module)
shadow = {name: parameter.detach().clone() for name, parameter in trainer.model.module.named_parameters()}
for step in range(12):
    trainer.step()
    with torch.no_grad():
        if not (FAULT and rank == 1 and step >= 4):
            for own, parameter in zip(average.parameters(), trainer.model.parameters(), strict=True):
                own.mul_(0.5).add_(parameter, alpha=0.5)
        for name, parameter in trainer.model.module.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * parameter
end()
