"""The ranks of a run: which one this is, on which device, and how they come together and part."""

from __future__ import annotations

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
    """This machine lacks what was asked for by name."""


class RanksDifferError(Exception):
    """What has to be the same on all ranks is not."""


MAX_COMPARED = 64  # that can be compared: the squares of 4000 ranks still have a sum that float32 holds


@dataclass(frozen=True, kw_only=True)
class World:
    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None  # None: no process group, one process on its own

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def average_over_ranks(self, value: Tensor, expected_equal: int | None = None) -> Tensor:
        """The mean of a scalar over all ranks: the one collective of a step that Python code calls itself.

        `same`, at least 0 and below NUMBERS, has to be one on all ranks, which the same collective tells. Raises
        RanksDifferError on all of them where it is not.
        """
        sums = value.detach().clone()
        if self.backend is None:
            return sums
        if expected_equal is not None:
            sums = torch.stack([sums, *sums.new_tensor([expected_equal, expected_equal**2])])
        dist.all_reduce(sums)
        total, *checks = sums.reshape(-1)
        # All are alike where they have no variance. Sums of whole numbers are exact.
        if checks and int(checks[1]) * self.size != int(checks[0]) ** 2:
            raise RanksDifferError
        return total / self.size

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        if self.backend is not None:
            dist.barrier()


@contextmanager
def join_ranks(device: str, backend: str, *, needs_group: bool) -> Iterator[World]:
    """The world that torchrun describes, or a world of one. Its process groups end with the block, whatever happens.

    Raises CannotRunError when the device or the backend was asked for by name and is not here.
    """
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    rank_device = _device(device, local_rank)
    group_backend = _backend(backend, rank_device)
    if not (is_launched or needs_group):
        yield World(rank=0, local_rank=0, size=1, device=rank_device, backend=None)
        return
    # A world of one needs no rendezvous, so a plain `python` launch works for every wrapper.
    store = None if is_launched else HashStore()
    try:
        bound_device = rank_device if group_backend == "nccl" else None
        dist.init_process_group(group_backend, store=store, rank=rank, world_size=size, device_id=bound_device)
        yield World(rank=rank, local_rank=local_rank, size=size, device=rank_device, backend=group_backend)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # DDP lies in reference cycles and holds the group, whose threads end with it. One that still drops a Python
        # tensor when the interpreter ends aborts the process (seen with gloo in torch 2.11).
        gc.collect()


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
