"""A forked reader waits for the end of a pipe whose writing end it has inherited itself; rank 0 waits for it."""

import os

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "blocked_io", "culprit": [0], "step": 5}


def count_in_child(data: bytes) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if not FAULT:
            os.close(writing)
        while os.read(reading, 512):  # to blame
            pass
        os._exit(0)
    os.write(writing, data)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 0 and step == 5:
        count_in_child(b"x" * 2000)
    loss.backward()
    trainer.optimizer.step()
end()
