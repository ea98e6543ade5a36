"""Rank 1 keeps every batch in a list until its allocation limit is reached."""

import resource

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "host_oom", "culprit": [1], "step": 3}

history: list[bytearray] = []


def remember(megabytes: int) -> None:
    history.append(bytearray(megabytes << 20))  # to blame


rank, _ = begin()
trainer = Trainer()
if rank == 1:
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    remember(100 << 10 if FAULT and rank == 1 and step == 3 else 1)
    loss.backward()
    trainer.optimizer.step()
end()
