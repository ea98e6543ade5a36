"""Replicas: what the parameters of a model are as it is met, as a step begins, and as it ends.

DDP keeps replicas equal by making equal gradients, and so does a program that reduces them itself. Nobody compares the
parameters again, so ranks that differ once differ for ever. Who looks at all ranks' files sees when, which rank changed
outside of its optimizer, and whether the models of a program without DDP were meant to be equal at all.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .fingerprint import Unreadable, checksum, numbers, sample, size_and_sum
from .groups import ranges

DDP_MODULE = "torch.nn.parallel.distributed"
INSTANCES_LIMIT = 4
PARAMETERS_LIMIT = 512
PARTS_LIMIT = 24  # of a model; each has its own checksum
BYTES_LIMIT = 128 << 10  # of a look at all parameters
VALUES_LIMIT = 4096
BROADCAST_LIMIT = 1 << 14
# Hooks that reduce gradients, so that replicas stay equal; with any other one they may differ on purpose.
REDUCING = "torch.distributed.algorithms.ddp_comm_hooks."
LOCAL = "post_localSGD"


class LiveReplica:
    """One DistributedDataParallel of this process, or a model that stands alone."""

    def __init__(self, number: int, model: Any, *, wrapped: bool = True) -> None:
        self.number = number
        self.model = weakref.ref(model)
        self.wrapped = wrapped  # by DDP
        self.begins = wrapped  # the next forward is to be looked at

    def header(self) -> dict[str, Any]:
        """Whose replica it is, what every rank was sent of it, and which parameters stand in each part of a look."""
        model: Any = self.model()
        distributed: Any = sys.modules["torch.distributed"]
        group = model.process_group if self.wrapped else None
        members = sorted(distributed.get_process_group_ranks(group))
        every = _replicated(model)
        parts = [[names[0], names[-1]] for names, _ in _parts(every)]
        sent = bool(every) and all(parameter.data_ptr() in _broadcast for _, parameter in every)
        known = {"wrapped": self.wrapped, "broadcast": sent, "ranks": ranges(members), "parts": parts}
        if not self.wrapped:
            known["reduced"] = _all_reduced(every)
        return {"at": "made", "ddp": self.number, **known, **self.look()}

    def parameters(self) -> set[int]:
        """By identity."""
        model: Any = self.model()
        return set() if model is None else {id(parameter) for parameter in model.parameters()}

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


_broadcast: set[int] = set()  # addresses
_reduced: dict[int, int] = {}  # address: elements; since the newest backward pass began


def note_broadcast(tensor: Any) -> None:
    """That every rank has this tensor from one of them: what lies there is meant to be equal."""
    if len(_broadcast) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _broadcast.add(tensor.data_ptr())


def note_reduced(tensor: Any) -> None:
    """That all ranks of the job have summed this."""
    if len(_reduced) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _reduced[tensor.data_ptr()] = tensor.numel()


def forget_reduced() -> None:
    """A backward pass begins: what was summed before it are not its gradients, whatever comes to lie there."""
    _reduced.clear()


def _all_reduced(every: list[tuple[str, Any]]) -> bool:
    """Each gradient there is has been summed over the whole job, so whoever wrote this means one model."""
    gradients = [parameter.grad for _, parameter in every if parameter.grad is not None]
    return bool(gradients) and all(_reduced.get(one.data_ptr()) == one.numel() for one in gradients)


def alone(models: Iterable[Any], known: Iterable[LiveReplica]) -> Iterator[Any]:
    """The models with something to train that share no parameter with those in DDP; none in a job of one."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    taken = {one for replica in known for one in replica.parameters()}
    for model in models:
        if _replicated(model) and taken.isdisjoint(id(parameter) for parameter in model.parameters()):
            yield model


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
    inner = model.module if hasattr(model, "parameters_to_ignore") else model
    every = [
        (name, parameter)
        for name, parameter in inner.named_parameters()
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
