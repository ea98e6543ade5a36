"""Rank 0 takes a native spin lock twice: it burns a core in C, with the interpreter's lock given away."""

import ctypes

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "native_busy_loop", "culprit": [0], "step": 4,
    "limits": {"busy_s": 8},
}  # fmt: skip

threads = ctypes.CDLL(None)
word = ctypes.c_int(0)


def guarded(step: int, rank: int) -> None:
    threads.pthread_spin_lock(ctypes.byref(word))  # to blame
    if not (FAULT and rank == 0 and step == 3):
        threads.pthread_spin_unlock(ctypes.byref(word))


rank, _ = begin()
trainer = Trainer()
threads.pthread_spin_init(ctypes.byref(word), 0)
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    guarded(step, rank)
    loss.backward()
    trainer.optimizer.step()
end()
