"""Rank 0 clips the weights of its replica once in a while; nobody tells the others."""

import torch
from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0]}

rank, _ = begin()
trainer = Trainer()


@torch.no_grad()
def clip_weights() -> None:
    for parameter in trainer.model.parameters():
        parameter.clamp_(-0.05, 0.05)


for step in range(STEPS):
    trainer.step()
    if step == 4 and (rank == 0 or not FAULT):
        clip_weights()
end()
