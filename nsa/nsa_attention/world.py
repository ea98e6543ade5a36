"""The rank and device of this process, and functions to join and leave the process group of a run."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore


class CannotRunError(Exception):
    """Raised if a requested feature is unavailable or unsuitable. The message says what to do."""


class RanksDifferError(Exception):
    """Raised if a value that must be equal on all ranks differs."""


# Limit of numbers that can be compared across ranks: float32 represents the sum of 4000 of their squares exactly.
MAX_COMPARED = 64


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank, device and backend of this process."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None  # None: no process group, one process on its own
    local_size: int = 1  # number of ranks on this node; 1 if the launcher does not set LOCAL_WORLD_SIZE

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def average_over_ranks(self, value: Tensor, expected_equal: int | None = None) -> Tensor:
        """Return the mean of a scalar over all ranks, and check that `expected_equal` is the same on all of them.

        Both use a single all_reduce. `expected_equal` is a number from 0 to MAX_COMPARED - 1, or None for no check. If
        it differs, every rank raises RanksDifferError. Without a process group, return a copy of `value`.
        """
        sums = value.detach().clone()
        if self.backend is None:
            return sums
        if expected_equal is not None:
            sums = torch.stack([sums, *sums.new_tensor([expected_equal, expected_equal**2])])
        dist.all_reduce(sums)
        total, *checks = sums.reshape(-1)
        # The numbers are equal if their variance is 0. Sums of whole numbers are exact.
        if checks and int(checks[1]) * self.size != int(checks[0]) ** 2:
            raise RanksDifferError
        return total / self.size

    def wait_for_all(self) -> None:
        """Wait until every rank has called this method."""
        if self.backend is not None:
            dist.barrier()


# The process group that was left last. DDP's reducer also holds it, and an exception keeps the model alive beyond
# `join_ranks`. If the reducer held the last reference, it would join the threads of gloo with the GIL held. A thread
# may need the GIL to release a Python object, and both would wait for ever (seen with torch 2.13). If the interpreter
# exits before the threads end, such a thread aborts the process (seen with torch 2.11).
_left_groups: list[dist.ProcessGroup] = []


@atexit.register
def _release_left_groups() -> None:
    """Free the models that used the last process group, then the group, which ends its threads without the GIL."""
    gc.collect()
    _left_groups.clear()


@contextmanager
def join_ranks(device: str, backend: str, *, needs_group: bool) -> Iterator[World]:
    """Join the process group described by torchrun's environment, and leave it at the end of the `with` block.

    Without torchrun, yield a world of one rank; it has a process group only if `needs_group`. Raises CannotRunError if
    `device` or `backend` ("auto" or a name) is not available.
    """
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    rank_device = _device(device, local_rank)
    group_backend = _backend(backend, rank_device)
    if not (is_launched or needs_group):
        yield World(rank=0, local_rank=0, size=1, device=rank_device, backend=None)
        return
    # One rank needs no rendezvous, so every wrapper also works without torchrun.
    store = None if is_launched else HashStore()
    try:
        bound_device = rank_device if group_backend == "nccl" else None
        dist.init_process_group(group_backend, store=store, rank=rank, world_size=size, device_id=bound_device)
        yield World(
            rank=rank,
            local_rank=local_rank,
            size=size,
            device=rank_device,
            backend=group_backend,
            local_size=_local_size(local_rank, size),
        )
    finally:
        if dist.is_initialized():
            _left_groups[:] = [dist.group.WORLD]
            dist.destroy_process_group()
        gc.collect()


def _local_size(local_rank: int, size: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_size = int(text) if text.isdecimal() else 1
    return local_size if local_rank < local_size <= size else 1


def _device(requested: str, local_rank: int) -> torch.device:
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= gpu_count:
        raise CannotRunError(
            f"--device {requested}: local rank {local_rank} needs its own GPU and this machine has {gpu_count}; "
            "start fewer ranks, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _backend(requested: str, device: torch.device) -> str:
    backend = requested if requested != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise CannotRunError("--backend nccl: nccl moves GPU memory only and the device is cpu; use --backend gloo")
    if not dist.is_backend_available(backend):
        raise CannotRunError(f"--backend {backend}: torch {torch.__version__} is built without it; use --backend auto")
    return backend
