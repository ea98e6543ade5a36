"""Rank 1 waits for a child that a signal has stopped."""

import os
import signal
import subprocess
import sys

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "stopped", "cause": "stopped_process", "culprit": [1], "step": 3}

rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 3:
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        if FAULT:
            os.kill(child.pid, signal.SIGSTOP)  # to blame
        child.communicate(b"go\n")
    loss.backward()
    trainer.optimizer.step()
end()
