"""Ranks train eight steps on gloo; the argument says how they come to differ, or that they rightly do not."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

STEPS = 8


class Job:
    """What every kind needs: a model under DDP, its optimizer, two groups of all ranks."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sharded, self.adam = nn.Sequential(), self.optimizer  # of `branch` only
        self.best = 10.0
        everyone = list(range(self.world_size))
        self.first, self.second = dist.new_group(everyone), dist.new_group(everyone)

    def train_step(self, alone: bool = False) -> None:
        with self.model.no_sync() if alone else contextlib.nullcontext():
            self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def order(job: Job, step: int) -> None:
    job.train_step()
    found = [torch.zeros(4) for _ in range(job.world_size)]
    if step == 3 and job.rank == 1:
        dist.all_gather(found, torch.ones(4))
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
        dist.all_gather(found, torch.ones(4))


def shape(job: Job, step: int) -> None:
    job.train_step()
    dist.all_reduce(torch.ones(1004 if step == 3 and job.rank == 1 else 1000))


def dtype(job: Job, step: int) -> None:
    job.train_step()
    dist.all_reduce(torch.ones(1000, dtype=torch.float64 if step == 3 and job.rank == 1 else torch.float32))


def groups(job: Job, step: int) -> None:
    job.train_step()
    swapped = step == 3 and job.rank == 1
    for group in (job.second, job.first) if swapped else (job.first, job.second):
        dist.all_reduce(torch.ones(4), group=group)


def no_sync(job: Job, step: int) -> None:
    job.train_step(alone=step == 5 and job.rank == 1)


def uneven(job: Job, step: int) -> None:
    """Rank 1 has one batch less."""
    if step == 1:
        for _ in DataLoader(torch.zeros(STEPS - job.rank, 1)):
            job.train_step()


def barrier(job: Job, step: int) -> None:
    job.train_step()
    if step == 3 and job.rank == 0:
        dist.barrier()


def barrier_of_group(job: Job, step: int) -> None:
    """Rank 0 alone enters a barrier of another group, and rank 1 goes on to a collective of the default group."""
    if step == 3 and job.rank == 0:
        dist.barrier(group=job.first)
    dist.all_reduce(torch.ones(4))


def forgotten(job: Job, step: int) -> None:
    if step == 3 and job.rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    job.train_step()


def branch(job: Job, step: int) -> None:
    """FSDP gathers each layer below Python; rank 1 goes round one of them."""
    if step == 1:
        job.sharded = nn.Sequential(*[fully_shard(nn.Linear(8, 8)) for _ in range(3)])
        job.adam = torch.optim.Adam(job.sharded.parameters())
    value = torch.randn(4, 8)
    for number, layer in enumerate(job.sharded):
        if not (step == 3 and job.rank == 1 and number == 1):
            value = layer(value)
    value.square().mean().backward()
    job.adam.step()
    job.adam.zero_grad()


def share(value: float) -> None:
    dist.all_reduce(torch.tensor([value]))


def keep_best(job: Job, loss: float) -> None:
    if loss < job.best:
        job.best = loss
        share(loss)


def best(job: Job, step: int) -> None:
    """Both ranks share their first loss, and rank 0 alone shares two more, which match later calls of rank 1."""
    dist.all_reduce(torch.ones(1))
    keep_best(job, 10.0 - step if job.rank == 0 and step in (3, 6) else 9.0)


def skips(job: Job, step: int) -> None:
    """Rank 1 leaves out one of many equal calls, which shows only at the end of the loop."""
    for number in range(9 if step == 1 else 0):
        if number == 4 and job.rank == 1:
            continue
        dist.all_reduce(torch.ones(4))


def healthy(job: Job, step: int) -> None:
    """Everything above in its right form: the ranks call the same, and differ only where they may."""
    job.train_step(alone=step % 4 != 0)
    dist.all_reduce(torch.ones(4), group=job.first)
    dist.all_reduce(torch.ones(4), group=job.second)
    dist.all_gather_object([None] * job.world_size, "x" * (1 + 100 * job.rank))
    given = [job.rank + 1] * job.world_size
    taken = [rank + 1 for rank in range(job.world_size)]
    dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(sum(given)), taken, given)
    parts = [torch.ones(3)] * job.world_size if job.rank == 0 else None
    dist.scatter(torch.empty(3), parts, src=0)
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.barrier()


def main() -> None:
    kinds = (
        order,
        shape,
        dtype,
        groups,
        no_sync,
        uneven,
        barrier,
        barrier_of_group,
        forgotten,
        branch,
        best,
        skips,
        healthy,
    )
    kind = next(kind for kind in kinds if kind.__name__ == sys.argv[1])
    job = Job()
    for step in range(1, STEPS + 1):
        kind(job, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
