"""Rank 1 finds its data too old and leaves with code 3."""

import sys

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "bad_exit", "culprit": [1], "step": 5}


def verify(version: int) -> None:
    if version < 2:
        print("the shards are of version 1, this program needs 2", file=sys.stderr)
        sys.exit(3)  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    verify(1 if FAULT and rank == 1 and step == 5 else 2)
    loss.backward()
    trainer.optimizer.step()
end()
