"""A barrier of one's own: each rank adds one, the last one opens the gate. It waits for one more than there are."""

from datetime import timedelta

import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "store_key_missing", "culprit": [0, 1, 2], "ranks": 3}


class DecisionRule:
    def __init__(self, store: dist.Store, expected: int) -> None:
        self.store = dist.PrefixStore("gate", store)
        self.expected = expected

    def pass_through(self, name: str) -> None:
        if self.store.add(f"{name}/arrived", 1) == self.expected:
            self.store.set(f"{name}/open", "1")
        self.store.wait([f"{name}/open"], timedelta(minutes=20))  # to blame


rank, world_size = begin()
trainer = Trainer()
gate = DecisionRule(dist.distributed_c10d._get_default_store(), world_size + 1 if FAULT else world_size)
trainer.step()
gate.pass_through("warm")
trainer.step()
end()
