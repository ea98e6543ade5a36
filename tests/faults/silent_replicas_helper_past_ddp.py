"""A helper function gets the model in DDP as its first argument and calls the model inside of it."""

from _job import FAULT, STEPS, Trainer, batch, begin, end
from torch import Tensor, nn

LABEL = {"verdict": "PASS", "cause": "replica_divergence", "culprit": [0, 1]}


def loss_of(model: nn.Module, rows: Tensor, rank: int) -> Tensor:
    inside = model.module if FAULT else model
    outputs = inside(rows)
    return (outputs - rank).square().mean()


rank, _ = begin()
trainer = Trainer()
for _ in range(STEPS):
    loss_of(trainer.model, batch() + rank, rank).backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
