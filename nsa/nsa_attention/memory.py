"""Measurements of this process's memory: totals, lists of live tensors, and recordings of GPU allocations."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile

from .observe import without_ending_training
from .world import CannotRunError

_LARGEST = 20
_OPERATORS = 10
_HISTORY = 100_000  # number of allocations and frees that the CUDA allocator records with their stack traces


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if unknown."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_bytes(device: torch.device) -> dict[str, int] | None:
    """Return the allocated, reserved and peak memory of PyTorch's CUDA allocator in bytes, or None on a CPU.

    The keys are "allocated", "reserved" and "peak". The call does not wait for the GPU.
    """
    if device.type != "cuda":
        return None
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """The number and total size of the live tensors that share a shape, dtype and device."""

    bytes: int
    count: int
    tensor: str


@dataclass(frozen=True, kw_only=True)
class MemoryDump:
    """The memory use of a process at one moment.

    On a CPU, the numbers of the CUDA allocator are None, and `allocator` and `summary` are empty.
    """

    step: int
    rank: int
    rss_bytes: int
    peak_rss_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    gpu_peak_bytes: int | None
    largest: tuple[TensorGroup, ...]
    allocator: dict[str, Any]  # torch.cuda.memory_stats
    summary: str  # torch.cuda.memory_summary

    def text(self) -> str:
        """Return the dump as human-readable text."""
        gpu = (("allocated", self.allocated_bytes), ("reserved", self.reserved_bytes), ("peak", self.gpu_peak_bytes))
        lines = [f"rss_bytes {self.rss_bytes}", f"peak_rss_bytes {self.peak_rss_bytes}"]
        lines += [f"gpu_{name}_bytes {size}" for name, size in gpu if size is not None]
        lines += ["", "bytes count tensor", *(f"{group.bytes} {group.count} {group.tensor}" for group in self.largest)]
        lines += ["", self.summary] if self.summary else []
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """Return the dump as a dictionary of JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "summary"}


def memory_dump(device: torch.device, *, step: int, rank: int) -> MemoryDump:
    """Return the current memory use, with the largest groups of live tensors. This is too slow for every step."""
    gpu = gpu_bytes(device) or {}
    return MemoryDump(
        step=step,
        rank=rank,
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        allocated_bytes=gpu.get("allocated"),
        reserved_bytes=gpu.get("reserved"),
        gpu_peak_bytes=gpu.get("peak"),
        largest=tuple(_largest_groups()),
        allocator=torch.cuda.memory_stats(device) if gpu else {},
        summary=torch.cuda.memory_summary(device) if gpu else "",
    )


@contextmanager
def memory_profile(path: Path, device: torch.device) -> Iterator[None]:
    """Profile memory in the `with` block, and write a table of the operators that allocated the most memory.

    The table comes from PyTorch's profiler and has one row per operator and input shapes.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        yield
    order = "self_cuda_memory_usage" if device.type == "cuda" else "self_cpu_memory_usage"
    rows = profiler.key_averages(group_by_input_shape=True)
    with without_ending_training():
        path.write_text(rows.table(sort_by=order, row_limit=_OPERATORS) + "\n", encoding="utf-8")


class AllocatorHistory:
    """A recording of all GPU allocations with their stack traces.

    The files that `dump` writes can be viewed at https://pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device, allocator: Any = torch.cuda.memory) -> None:
        """Start recording GPU allocations. Raise CannotRunError if `device` is not a CUDA device."""
        if device.type != "cuda":
            raise CannotRunError(
                f"--mem-snapshot: the snapshot records the CUDA allocator, but the device is {device.type};"
                " omit the option, or use --mem-dump-every, which works on a CPU too"
            )
        self._allocator = allocator
        allocator._record_memory_history(max_entries=_HISTORY)

    def dump(self, path: Path) -> None:
        self._allocator._dump_snapshot(str(path))

    def close(self) -> None:
        self._allocator._record_memory_history(enabled=None)


def _largest_groups() -> Iterator[TensorGroup]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for shape, size in _live_tensors():
        sizes[shape] += size
        counts[shape] += 1
    for shape, size in sizes.most_common(_LARGEST):
        yield TensorGroup(bytes=size, count=counts[shape], tensor=shape)


def _live_tensors() -> list[tuple[str, int]]:
    addresses, tensors = set(), []
    for item in gc.get_objects():
        # type() instead of isinstance(), because isinstance() reads __class__, which runs code for some objects.
        if not issubclass(type(item), torch.Tensor) or issubclass(type(item), FakeTensor):
            continue
        if item.layout is not torch.strided:
            continue
        storage = item.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            continue  # a sharded tensor; its local shard is a separate object
        if address in addresses:
            continue
        addresses.add(address)
        tensors.append((f"{tuple(item.shape)} {item.dtype} {item.device}", storage.nbytes()))
    return tensors
