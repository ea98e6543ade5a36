"""How much memory this process uses, and what for: figures of a step, dumps, and the allocator's own snapshots."""

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

from .world import CannotRunError

_LARGEST = 20
_OPERATORS = 10
_HISTORY = 100_000  # allocations and frees that the allocator remembers with their lines


def rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Highest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_bytes(device: torch.device) -> dict[str, int] | None:
    """Allocated, reserved and peak memory on the GPU; None on a CPU. Asks the allocator, not the device."""
    if device.type != "cuda":
        return None
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Live tensors of equal shape, dtype and device, each storage once."""

    bytes: int
    count: int
    tensor: str


@dataclass(frozen=True, kw_only=True)
class MemoryDump:
    """What a process holds at one moment. On a CPU the allocator's figures are None and `allocator` is empty."""

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
        """Totals, then the largest groups of live tensors of equal shape."""
        gpu = (("allocated", self.allocated_bytes), ("reserved", self.reserved_bytes), ("peak", self.gpu_peak_bytes))
        lines = [f"rss_bytes {self.rss_bytes}", f"peak_rss_bytes {self.peak_rss_bytes}"]
        lines += [f"gpu_{name}_bytes {size}" for name, size in gpu if size is not None]
        lines += ["", "bytes count tensor", *(f"{one.bytes} {one.count} {one.tensor}" for one in self.largest)]
        lines += ["", self.summary] if self.summary else []
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """The same as numbers; the summary is for people."""
        return {name: value for name, value in asdict(self).items() if name != "summary"}


def memory_dump(device: torch.device, *, step: int, rank: int) -> MemoryDump:
    """Walks all objects: for dumps, not for steps."""
    gpu = gpu_bytes(device) or {}
    return MemoryDump(
        step=step,
        rank=rank,
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
        allocated_bytes=gpu.get("allocated"),
        reserved_bytes=gpu.get("reserved"),
        gpu_peak_bytes=gpu.get("peak"),
        largest=tuple(_largest()),
        allocator=torch.cuda.memory_stats(device) if gpu else {},
        summary=torch.cuda.memory_summary(device) if gpu else "",
    )


@contextmanager
def memory_profile(path: Path, device: torch.device) -> Iterator[None]:
    """Writes the operators that took most memory in here, each shape of its inputs a row, by torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        yield
    order = "self_cuda_memory_usage" if device.type == "cuda" else "self_cpu_memory_usage"
    rows = profiler.key_averages(group_by_input_shape=True)
    path.write_text(rows.table(sort_by=order, row_limit=_OPERATORS) + "\n", encoding="utf-8")


class AllocatorHistory:
    """Every allocation on the GPU with the lines that made it, as torch's allocator keeps them.

    What `dump` writes is read by https://pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device, allocator: Any = torch.cuda.memory) -> None:
        """Raises CannotRunError on a device whose allocator is not torch's own on CUDA."""
        if device.type != "cuda":
            raise CannotRunError(
                f"--mem-snapshot: the snapshot is of the CUDA allocator and the device is {device.type};"
                " leave it out, or use --mem-dump-every, which a CPU has too"
            )
        self._allocator = allocator
        allocator._record_memory_history(max_entries=_HISTORY)

    def dump(self, path: Path) -> None:
        self._allocator._dump_snapshot(str(path))

    def close(self) -> None:
        self._allocator._record_memory_history(enabled=None)


def _largest() -> Iterator[TensorGroup]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for shape, size in _live_tensors():
        sizes[shape] += size
        counts[shape] += 1
    for shape, size in sizes.most_common(_LARGEST):
        yield TensorGroup(bytes=size, count=counts[shape], tensor=shape)


def _live_tensors() -> list[tuple[str, int]]:
    seen, found = set(), []
    for thing in gc.get_objects():
        # type() and not isinstance(): some objects run code when asked for their class.
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), FakeTensor):
            continue
        if thing.layout is not torch.strided:
            continue
        storage = thing.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            continue  # a sharded tensor: its part is in the list by itself
        if address in seen:
            continue
        seen.add(address)
        found.append((f"{tuple(thing.shape)} {thing.dtype} {thing.device}", storage.nbytes()))
    return found
