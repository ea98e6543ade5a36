"""Rank 0 opens a store of its own on a port that somebody has taken already."""

import socket

import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "FAIL", "cause": "infra", "culprit": [0]}

rank, _ = begin()
taken = socket.create_server(("0.0.0.0", 0))
port = taken.getsockname()[1]
if not FAULT:
    taken.close()
if rank == 0:
    dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)  # to blame
dist.barrier()
end()
