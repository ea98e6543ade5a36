"""Rank 1 waits for a command of its own, such as a compiler, that computes on one line until it is done."""

import subprocess
import sys

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS", "limits": {"busy_s": 4}}

COMMAND = """
import time
end_s = time.monotonic() + 14
while time.monotonic() < end_s: compile("total = sum(range(9))", "generated.py", "exec")
"""

rank, _ = begin()
trainer = Trainer()
for step in range(4):
    trainer.step()
    if step == 2 and rank == 1:
        subprocess.run([sys.executable, "-c", COMMAND], check=True)
end()
