"""Trains a few steps with DDP, FSDP2 or tensor parallelism: the subject of the tests of comm.lock.

torchrun --nproc-per-node 2 communicates.py ddp|fsdp|tensor [CHANGE]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS, SEED = 64, 8, 4, 0
CHANGE = (*sys.argv, "", "")[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def parallel(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.2 if CHANGE == "bucket" else 0.05)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp" if kind == "fsdp" else "tp",))
    for block in model:
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh) if kind == "fsdp" else model


def metrics(loss: torch.Tensor) -> None:
    value, count = loss.detach().clone(), torch.ones(3)
    if CHANGE == "gather":
        dist.gather(
            value, [torch.empty_like(value) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        )
    else:
        dist.reduce(value, 0)
    dist.all_reduce(count)
    if CHANGE == "extra":
        dist.all_reduce(value)


def train() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(Block(), Block())
    if CHANGE == "dtype":
        model = model.to(torch.bfloat16)
    model = parallel(model, sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16 if CHANGE == "dtype" else torch.float32)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics(loss.float())


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


main()
