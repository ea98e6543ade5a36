"""Rank 1 calls a C function that waits for a signal and keeps the interpreter's lock meanwhile."""

import ctypes

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "cause": "gil_held_native", "culprit": [1], "step": 3, "limits": {"open_wait_s": 6},
}  # fmt: skip

rank, _ = begin()
trainer = Trainer()
library = ctypes.PyDLL(None)
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 1 and step == 3:
        call = library.pause if FAULT else library.getpid
        call()  # to blame
    loss.backward()
    trainer.optimizer.step()
end()
