"""Rank 1 opens a named pipe to read commands, and nobody ever opens it to write."""

import os
import tempfile

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "cause": "blocked_io", "culprit": [1], "step": 2, "limits": {"open_wait_s": 6},
}  # fmt: skip


def command(path: str) -> str:
    with open(path) as pipe:  # to blame
        return pipe.readline()


rank, _ = begin()
trainer = Trainer()
with tempfile.TemporaryDirectory() as home:
    fifo = os.path.join(home, "control")
    os.mkfifo(fifo)
    for step in range(1, STEPS + 1):
        loss = trainer.model(batch()).square().mean()
        if rank == 1 and step == 2:
            command(fifo if FAULT else os.devnull)
        loss.backward()
        trainer.optimizer.step()
end()
