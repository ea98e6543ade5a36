"""Rank 1 waits for a filter program whose input it never closed."""

import subprocess

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "blocked_io", "culprit": [1], "step": 4}


def checksum(data: bytes) -> int:
    child = subprocess.Popen(["cksum"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    child.stdin.write(data)
    child.stdin.flush()
    if not FAULT:
        child.stdin.close()
    return child.wait()  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 4:
        checksum(b"weights")
    loss.backward()
    trainer.optimizer.step()
end()
