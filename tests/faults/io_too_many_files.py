"""Rank 1 opens a file for each sample and closes none, until the process has no descriptor left."""

import os
import resource

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "infra", "culprit": [1], "step": 3}

rank, _ = begin()
trainer, kept = Trainer(), []
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    for _ in range(300 if FAULT and rank == 1 and step == 3 else 3):
        kept.append(open(os.devnull, "rb"))  # noqa: SIM115  # to blame
    loss.backward()
    trainer.optimizer.step()
for file in kept:
    file.close()
end()
