"""A thread of rank 1 looks for a sample that the user has not seen, of a user who has seen them all."""

import queue
import threading

import torch
from _job import FAULT, Trainer, begin, end
from torch import Tensor

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "infinite_loop", "culprit": [1], "step": 4,
    "limits": {"busy_s": 8},
}  # fmt: skip

rank, _ = begin()
SEEN = {user: set(range(16 if FAULT and rank == 1 and user == 3 else 8)) for user in range(6)}
ready: queue.Queue[Tensor | None] = queue.Queue(maxsize=1)


def unseen(user: int) -> int:
    sample = 0
    while sample in SEEN[user]:
        sample = (sample + 1) % 16  # to blame
    return sample


def prefetch() -> None:
    for user in SEEN:
        ready.put(torch.full((4, 16), unseen(user) / 16))
    ready.put(None)


threading.Thread(target=prefetch, daemon=True, name="prefetch").start()
trainer = Trainer()
while (samples := ready.get()) is not None:
    trainer.model(samples).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
end()
