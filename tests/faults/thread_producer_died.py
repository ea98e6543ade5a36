"""The thread that fills rank 1's queue dies of an exception; the training thread waits for the next batch."""

import queue
import threading

import torch
from _job import FAULT, begin, blocks, end
from torch.nn.parallel import DistributedDataParallel

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "thread_died", "culprit": [1], "step": 5}

STEPS = 8


def decode(number: int) -> torch.Tensor:
    widths = dict.fromkeys(range(4 if FAULT and rank == 1 else STEPS), 16)
    return torch.randn(4, widths[number])


def produce(into: queue.Queue) -> None:
    for number in range(STEPS):
        into.put(decode(number))  # to blame


rank, _ = begin()
model = DistributedDataParallel(blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches: queue.Queue = queue.Queue()
threading.Thread(target=produce, args=(batches,), daemon=True).start()
for _ in range(STEPS):
    optimizer.zero_grad()
    model(batches.get()).square().mean().backward()
    optimizer.step()
end()
