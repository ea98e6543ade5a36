"""How much memory this process uses, and which tensors hold it."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile

_LARGEST = 20
_OPERATORS = 10


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


def memory_text(device: torch.device) -> str:
    """Totals, then the largest groups of live tensors of equal shape. Walks all objects: for dumps, not for steps."""
    lines = [f"rss_bytes {rss_bytes()}", f"peak_rss_bytes {peak_rss_bytes()}"]
    lines += [f"gpu_{name}_bytes {size}" for name, size in (gpu_bytes(device) or {}).items()]
    lines += ["", "bytes count tensor"]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for shape, size in _live_tensors():
        sizes[shape] += size
        counts[shape] += 1
    lines += [f"{size} {counts[shape]} {shape}" for shape, size in sizes.most_common(_LARGEST)]
    if device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(device)]
    return "\n".join(lines) + "\n"


@contextmanager
def memory_profile(path: Path, device: torch.device) -> Iterator[None]:
    """Writes the operators that took most memory in here, each shape of its inputs a row, by torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        yield
    order = "self_cuda_memory_usage" if device.type == "cuda" else "self_cpu_memory_usage"
    rows = profiler.key_averages(group_by_input_shape=True)
    path.write_text(rows.table(sort_by=order, row_limit=_OPERATORS) + "\n", encoding="utf-8")


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
