"""Rank 1's log grows past the size that its account may write."""

import resource
import signal
import tempfile

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "infra", "culprit": [1], "step": 4}

rank, _ = begin()
trainer = Trainer()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryFile(buffering=0) as log:
    for step in range(1, STEPS + 1):
        loss = trainer.model(batch()).square().mean()
        if FAULT and rank == 1 and step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for _ in range(4):
            log.write(b"." * 100 if step < 4 else b"x" * 400)  # to blame
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        loss.backward()
        trainer.optimizer.step()
end()
