"""Handles that are asked in every way but by their own wait: a future, a poll, at the root none, and the last one."""

import torch
import torch.distributed as dist
from _job import STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS"}

rank, size = begin()
trainer = Trainer()
numbers = torch.ones(4)
for _ in range(STEPS):
    trainer.step()
    dist.all_reduce(numbers, async_op=True).get_future().wait()
    polled = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, async_op=True)
    while not polled.is_completed():
        pass
    # The root has what it sends, and the others wait for it.
    sent = dist.broadcast(numbers, src=0, async_op=True)
    if rank != 0:
        sent.wait()
# A program that ends may leave the newest ones, which would have been for a round that does not come.
ahead = dist.all_reduce(torch.ones(4), async_op=True)
end()
