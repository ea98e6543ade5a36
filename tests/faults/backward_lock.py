"""A custom function's backward wants a lock that a thread of rank 0 took for good in its third step."""

import threading

import torch
from _job import FAULT, Trainer, begin, end
from torch import nn

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "backward_function_blocked", "culprit": [0], "step": 3}
guard = threading.Lock()


class Guarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2
        return x * ctx.factor

    @staticmethod
    def backward(ctx, grad):
        with guard:  # to blame
            return grad * ctx.factor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.leave(Guarded.apply(self.enter(x)))


rank, _ = begin()
trainer = Trainer(Net())
for step in range(1, 6):
    if FAULT and rank == 0 and step == 3:
        taker = threading.Thread(target=guard.acquire)
        taker.start()
        taker.join()
    trainer.step()
end()
