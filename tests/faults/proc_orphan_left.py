"""Rank 0 starts a metrics server in a session of its own and forgets it; the run ends well."""

import subprocess

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "orphan_process"}

rank, _ = begin()
trainer = Trainer()
server = None
if rank == 0:
    server = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
for _ in range(STEPS):
    trainer.step()
if server is not None and not FAULT:
    server.terminate()
    server.wait()
end()
