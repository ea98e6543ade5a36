"""Rank 1 of four takes an empty shard for the end of the data and leaves with success."""

import sys

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "early_exit", "culprit": [1], "step": 3, "ranks": 4}


def check(shard: list[int]) -> None:
    if not shard:
        sys.exit(0)  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    check([] if FAULT and rank == 1 and step == 3 else [1])
    loss.backward()
    trainer.optimizer.step()
end()
