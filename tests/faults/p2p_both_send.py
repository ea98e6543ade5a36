"""Both ranks send a large block before they receive the other's, and neither's is taken."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "p2p_unmatched", "culprit": [0, 1]}

rank, _ = begin()
mine = torch.full((1 << 22,), float(rank))
other = torch.empty_like(mine)
for _ in range(2):
    if FAULT or rank == 0:
        dist.send(mine, dst=1 - rank)  # to blame
        dist.recv(other, src=1 - rank)
    else:
        dist.recv(other, src=1 - rank)
        dist.send(mine, dst=1 - rank)
end()
