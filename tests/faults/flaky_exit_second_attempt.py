"""The second of three launches meets a leftover that the first one did not, and rank 1 ends with an error."""

import os
from pathlib import Path

from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "FAIL", "cause": "flaky", "repeat": 3}

rank, _ = begin()
trainer = Trainer()
attempt = Path(os.environ["NSA_OUT_DIR"]).name
for step in range(4):
    if FAULT and rank == 1 and step == 2 and attempt.endswith("~2"):
        raise FileExistsError("a lock file of another launch is there")
    trainer.step()
end()
