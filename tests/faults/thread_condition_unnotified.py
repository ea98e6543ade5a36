"""Rank 0 waits for a condition after its last notification went by; the other three wait for its reduction."""

import threading

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [0], "ranks": 4}


class Buffer:
    def __init__(self) -> None:
        self.filled = threading.Condition()
        self.items: list[int] = []

    def put(self, item: int) -> None:
        with self.filled:
            self.items.append(item)
            self.filled.notify()

    def take(self) -> int:
        with self.filled:
            if FAULT or not self.items:
                self.filled.wait()  # to blame
            return self.items.pop()


rank, _ = begin()
buffer = Buffer()
total = torch.zeros(1)
for turn in range(5):
    filler = threading.Thread(target=buffer.put, args=(turn,))
    filler.start()
    filler.join()
    if rank == 0 and turn == 3:
        total += buffer.take()
    dist.all_reduce(total)
end()
