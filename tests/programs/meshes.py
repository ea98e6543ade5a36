"""Trains two steps on a mesh of ranks: data parallel, hybrid sharded, tensor parallel, or a pipeline of two stages.

torchrun --nproc-per-node 4 meshes.py hsdp          healthy
torchrun --nproc-per-node 4 meshes.py hsdp 3        rank 3 takes a lock in step 2 that it holds already
"""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS = 16, 8, 3


class Block(nn.Module):
    """Two linears; the second one's rank may stop in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.lock = threading.Lock()
        self.stuck = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.up(hidden))
        if self.stuck:
            self.fail()
        return hidden + self.down(inner)

    def fail(self) -> None:
        if sys.argv[3:] == ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.take_the_lock_twice()

    def take_the_lock_twice(self) -> None:
        self.lock.acquire()
        self.lock.acquire()


def data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def hybrid_sharded(model: nn.Module) -> nn.Module:
    """Sharded between neighbours, replicated across pairs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(model: nn.Module, block: Block, stuck: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        block.stuck = stuck and step == 1
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()


def train_pipeline(blocks: list[Block], stuck: bool) -> None:
    """Each rank holds one stage; micro-batches go from rank to rank point to point."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = mesh.get_local_rank("pp")
    block = blocks[rank]
    stage = PipelineStage(block, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    for step in range(STEPS):
        block.stuck = stuck and step == 1
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.randn(BATCH, WIDTH))
        else:
            schedule.step(target=torch.randn(BATCH, WIDTH))
        optimizer.step()


def main() -> None:
    kind = sys.argv[1]
    dist.init_process_group("gloo")
    stuck = len(sys.argv) > 2 and dist.get_rank() == int(sys.argv[2])
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    if kind == "pipeline":
        train_pipeline(blocks, stuck)
    else:
        wrap = {"ddp": data_parallel, "hsdp": hybrid_sharded, "tensor": tensor_parallel}[kind]
        train(wrap(nn.Sequential(*blocks)), blocks[1], stuck)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
