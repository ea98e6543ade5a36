"""Rank 3 of four stops itself, as a debugger or a scheduler would."""

import os
import signal

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "stopped", "cause": "stopped_process", "culprit": [3], "step": 2, "ranks": 4}

rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 3 and step == 2:
        os.kill(os.getpid(), signal.SIGSTOP if FAULT else signal.SIGCONT)  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
