"""Rank 1 reads its own named pipe, whose name it has removed, before anything was written to it."""

import os
import tempfile

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "blocked_io", "culprit": [1], "step": 2}


def channel() -> int:
    with tempfile.TemporaryDirectory() as home:
        path = os.path.join(home, "channel")
        os.mkfifo(path)
        return os.open(path, os.O_RDWR)


rank, _ = begin()
trainer, both_ends = Trainer(), channel()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 2:
        if not FAULT:
            os.write(both_ends, b"x")
        os.read(both_ends, 1)  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
