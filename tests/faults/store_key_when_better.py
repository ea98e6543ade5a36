"""Rank 0 scores the model and publishes the score, but where it is no better it returns before that."""

import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "store_key_missing", "culprit": [0]}


class Scores:
    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.best = 0.0

    def publish(self, epoch: int, score: float) -> None:
        if FAULT and score <= self.best:  # to blame
            return
        self.best = max(score, self.best)
        self.store.set(f"epoch{epoch}", repr(score))

    def read(self, epoch: int) -> float:
        return float(self.store.get(f"epoch{epoch}"))


rank, _ = begin()
trainer = Trainer()
scores = Scores(dist.distributed_c10d._get_default_store())
for epoch, score in enumerate([0.2, 0.5, 0.4, 0.7]):
    trainer.step()
    if rank == 0:
        scores.publish(epoch, score)
    else:
        scores.read(epoch)
end()
