"""A cache inside a module is guarded by a lock that rank 1 leaves locked when its second batch is empty."""

import threading

import torch
from _job import FAULT, STEPS, Trainer, begin, end
from torch import nn

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 3}


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.lock, self.seen = threading.Lock(), 0

    def forward(self, x):
        self.lock.acquire()  # to blame
        self.seen += 1
        y = torch.tanh(self.inner(x))
        if not (FAULT and rank == 1 and self.seen == 2):
            self.lock.release()
        return y


rank, _ = begin()
trainer = Trainer(nn.Sequential(nn.Linear(16, 16), Cached(), nn.Linear(16, 1)))
for _ in range(STEPS):
    trainer.step()
end()
