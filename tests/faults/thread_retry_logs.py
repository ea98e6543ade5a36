"""Rank 0 tries again and again to read a file that nobody writes, and says so each time: the log flows, no step."""

import os
import time

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "livelock", "culprit": [0], "step": 2,
    "limits": {"open_wait_s": 6},
}  # fmt: skip


def read_with_retry(path: str) -> bytes:
    attempt = 0
    while True:
        try:
            with open(path, "rb") as file:
                return file.read(1)
        except FileNotFoundError as error:
            attempt += 1
            print(f"attempt {attempt}: {error}; trying again", flush=True)
            time.sleep(0.05)  # to blame


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).sum()
    if rank == 0 and step == 2:
        read_with_retry(f"{os.getcwd()}/no/shard-3" if FAULT else os.devnull)
    loss.backward()
    trainer.optimizer.step()
end()
