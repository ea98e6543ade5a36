"""Ranks exchange rows with those they need rows of. Who needs none of a peer does not send it its own either."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "p2p_unmatched", "culprit": [1], "ranks": 3}


def exchange(needed: list[list[int]], rank: int) -> None:
    works = []
    for peer in range(len(needed)):
        receives, sends = needed[rank][peer], needed[peer][rank]
        if peer == rank or receives + (0 if FAULT else sends) == 0:  # to blame
            continue
        if sends:
            works.append(dist.isend(torch.ones(sends), peer))
        if receives:
            works.append(dist.irecv(torch.empty(receives), peer))
    for work in works:
        work.wait()


rank, world_size = begin()
trainer = Trainer()
for step in range(6):
    needed = [[int(one != other) for other in range(world_size)] for one in range(world_size)]
    if step == 3:
        needed[1][2] = 0
    exchange(needed, rank)
    trainer.step()
end()
