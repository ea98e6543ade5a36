"""Rank 1 reads through a pointer that points nowhere in its third step."""

import ctypes

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "FAIL", "cause": "segfault", "culprit": [1], "step": 3}


def header(address: int) -> bytes:
    return ctypes.string_at(address, 8)  # to blame


rank, _ = begin()
trainer = Trainer()
buffer = ctypes.create_string_buffer(16)
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    header(8 if FAULT and rank == 1 and step == 3 else ctypes.addressof(buffer))
    loss.backward()
    trainer.optimizer.step()
end()
