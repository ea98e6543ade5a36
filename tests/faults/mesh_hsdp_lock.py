"""HSDP on two by two ranks: rank 3 waits for a condition that only its finished writer would notify."""

import threading

import torch
from _job import FAULT, begin, blocks, end
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [3], "ranks": 4}

rank, _ = begin()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = blocks()
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
written = threading.Condition()
pending = 0


def flush() -> None:
    with written:
        while pending:
            written.wait()  # to blame


for step in range(1, 5):
    if FAULT and rank == 3 and step == 3:
        pending = 1
    flush()
    model(torch.randn(4, 16)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end()
