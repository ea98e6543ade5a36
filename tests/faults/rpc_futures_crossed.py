"""Both ranks wait for the result of a remote call while they hold the lock that the called function takes.

Rank 0 waits for a future, rank 1 for a remote reference.
"""

import os
import threading
import time

import torch
from _job import FAULT
from torch import Tensor
from torch.distributed import rpc

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "rpc_deadlock", "culprit": [0, 1]}

state = threading.Lock()


def is_locked() -> None:
    while not state.locked():
        time.sleep(0.01)


def add(value: Tensor) -> Tensor:
    if not FAULT:
        time.sleep(3)  # a handler that works is no deadlock
    with state:
        return value + 1


def call(peer: str, value: Tensor) -> Tensor:
    if rank == 0:
        return rpc.rpc_async(peer, add, args=(value,)).wait()  # to blame
    return rpc.remote(peer, add, args=(value,)).to_here()


def ask(peer: str, value: Tensor) -> Tensor:
    if not FAULT:
        return call(peer, value)
    with state:
        rpc.rpc_sync(peer, is_locked, args=())  # both ranks hold their locks
        return call(peer, value)


rank = int(os.environ["RANK"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
for _ in range(2):
    ask(f"rank{1 - rank}", torch.ones(2))
rpc.shutdown()
