"""Rank 1 waits for a converter that sleeps for hours before it tries its server again."""

import subprocess

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "starved", "cause": "starved", "culprit": [1], "step": 2, "limits": {"open_wait_s": 6},
}  # fmt: skip

rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 2:
        subprocess.run(["sleep", "86400" if FAULT else "0.1"], check=True)  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
