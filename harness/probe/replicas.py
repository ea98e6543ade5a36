"""DDP's replicas: what their parameters are after construction, as a step begins, and as it ends.

DDP keeps replicas equal by making equal gradients. It never compares the parameters again, so ranks that differ once
differ for ever. Who looks at all ranks' files sees when, and which rank changed outside of its optimizer.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .fingerprint import Unreadable, checksum, numbers, sample, size_and_sum
from .groups import ranges

DDP_MODULE = "torch.nn.parallel.distributed"
INSTANCES_LIMIT = 4
PARAMETERS_LIMIT = 512
PARTS_LIMIT = 24  # of a model; each has its own checksum
BYTES_LIMIT = 128 << 10  # of a look at all parameters
VALUES_LIMIT = 4096
# Hooks that reduce gradients, so that replicas stay equal; with any other one they may differ on purpose.
REDUCING = "torch.distributed.algorithms.ddp_comm_hooks."
LOCAL = "post_localSGD"


class LiveReplica:
    """One DistributedDataParallel of this process."""

    def __init__(self, number: int, model: Any) -> None:
        self.number = number
        self.model = weakref.ref(model)
        self.begins = True  # the next forward is to be looked at

    def header(self) -> dict[str, Any]:
        """Whose replica it is, and which parameters stand in each part of a look."""
        model: Any = self.model()
        distributed = sys.modules["torch.distributed"]
        members = sorted(distributed.get_process_group_ranks(model.process_group))
        parts = [[names[0], names[-1]] for names, _ in _parts(_replicated(model))]
        return {"at": "made", "ddp": self.number, "ranks": ranges(members), "parts": parts, **self.look()}

    def look(self) -> dict[str, Any]:
        """Checksum, size and sum of each part. About 3 us a parameter, and what its bytes cost."""
        model: Any = self.model()
        parts = list(_parts(_replicated(model)))
        count = max(1, sum(len(parameters) for _, parameters in parts))
        seen = [_seen(parameters, BYTES_LIMIT // count, VALUES_LIMIT // count) for _, parameters in parts]
        whole = 0
        for part in seen:
            whole = checksum(part[0].encode(), whole)
        return {"sum": f"{whole:08x}", "seen": seen, "hook": _own_hook(model)}


def watch(told: Callable[[Any], object]) -> None:
    """Hear of every DistributedDataParallel as its constructor has made the replicas equal."""
    kind = sys.modules[DDP_MODULE].DistributedDataParallel
    original = kind.__init__

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        told(self)

    kind.__init__ = construct


def _replicated(model: Any) -> list[tuple[str, Any]]:
    """What DDP reduces: it wants a gradient, is not left out by name, and is no sharded tensor."""
    ignored = getattr(model, "parameters_to_ignore", ())
    every = [
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored and not hasattr(parameter, "_local_tensor")
    ]
    stride = -(-len(every) // PARAMETERS_LIMIT) or 1
    return every[::stride]


def _parts(every: list[tuple[str, Any]]) -> Iterator[tuple[list[str], list[Any]]]:
    length = -(-len(every) // PARTS_LIMIT) or 1
    for begin in range(0, len(every), length):
        names, parameters = zip(*every[begin : begin + length], strict=True)
        yield list(names), list(parameters)


def _seen(parameters: list[Any], limit_bytes: int, limit_values: int) -> list[Any]:
    crc = 0
    values: list[float] = []
    for parameter in parameters:
        data = _memory(parameter, max(256, limit_bytes))
        dtype = str(parameter.dtype)
        crc = checksum(data, crc)
        values += numbers(data[: 8 * max(4, limit_values)], dtype)[: max(4, limit_values)]
    size, total = size_and_sum(values)
    return [f"{crc:08x}", f"{size:.6g}", f"{total:.6g}"]


def _memory(parameter: Any, limit_bytes: int) -> bytes:
    try:
        return sample(parameter, limit_bytes)
    except Unreadable:
        return b""


def _own_hook(model: Any) -> str:
    """A communication hook that may leave replicas unequal on purpose; "" where there is none."""
    for hook, _ in getattr(model, "_comm_hooks", ()):
        module, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__qualname__", hook))
        if not module.startswith(REDUCING) or LOCAL in name:
            return name[:80]
    return ""
