"""Rank 1 asks a queue again and again for the sample of its child, and logs each attempt; the child left long ago."""

import multiprocessing
import queue
import time

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "livelock", "culprit": [1], "step": 3,
    "limits": {"open_wait_s": 8},
}  # fmt: skip


def produce(samples: "multiprocessing.Queue[int]") -> None:
    if not FAULT:
        time.sleep(12)
        samples.put(1)


def take(samples: "multiprocessing.Queue[int]") -> int:
    while True:
        try:
            return samples.get(timeout=0.5)  # to blame
        except queue.Empty:
            print(f"{time.time():.0f} still waiting", flush=True)


rank, _ = begin()
trainer = Trainer()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 1 and step == 3:
        context = multiprocessing.get_context("fork")
        samples = context.Queue()
        context.Process(target=produce, args=(samples,), daemon=True).start()
        take(samples)
    loss.backward()
    trainer.optimizer.step()
end()
