"""Checksums of replicas' parameters: when a model is met, when a step begins, and when it ends.

DDP keeps replicas equal through equal gradients, and so does a program that reduces gradients itself. No code compares
the parameters again, so ranks that differ once differ from then on. The files of all ranks together show when replicas
diverged, which rank changed outside of its optimizer, and whether models without DDP were meant to be equal at all.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .fingerprint import Unreadable, checksum, numbers, sample, size_and_sum
from .groups import ranges
from .patches import TroubleLog, patch

DDP_MODULE = "torch.nn.parallel.distributed"
INSTANCES_LIMIT = 4
PARAMETERS_LIMIT = 512
PARTS_LIMIT = 24  # of a model; each has its own checksum
BYTES_LIMIT = 128 << 10  # per sample of all parameters
VALUES_LIMIT = 4096
BROADCAST_LIMIT = 1 << 14
# Communication hooks that keep replicas equal; with any other hook they may differ on purpose.
REDUCING = "torch.distributed.algorithms.ddp_comm_hooks."
LOCAL = "post_localSGD"


class LiveReplica:
    """A DistributedDataParallel of this process, or a model without one."""

    def __init__(self, number: int, model: Any, *, wrapped: bool = True) -> None:
        self.number = number
        self.model = weakref.ref(model)
        self.wrapped = wrapped  # by DDP
        self.begins = wrapped  # the parameters are sampled before the next forward

    def header(self) -> dict[str, Any]:
        """Return the first record: the ranks with this replica, whether it was broadcast, and the parts of a sample."""
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
        return {"at": "made", "ddp": self.number, **known, **self.sample()}

    def parameters(self) -> set[int]:
        """Return the identities of the parameters."""
        model: Any = self.model()
        return set() if model is None else {id(parameter) for parameter in model.parameters()}

    def sample(self) -> dict[str, Any]:
        """Return checksum, size and sum per part. Costs about 3 us per parameter, and the reading of its bytes."""
        model: Any = self.model()
        parts = list(_parts(_replicated(model)))
        count = max(1, sum(len(parameters) for _, parameters in parts))
        samples = [_sample(parameters, BYTES_LIMIT // count, VALUES_LIMIT // count) for _, parameters in parts]
        whole = 0
        for part in samples:
            whole = checksum(part[0].encode(), whole)
        return {"sum": f"{whole:08x}", "seen": samples, "hook": _own_hook(model)}


_broadcast: set[int] = set()  # addresses
_reduced: dict[int, int] = {}  # address: elements; since the newest backward pass began


def note_broadcast(tensor: Any) -> None:
    """Note that one rank sent this tensor to all ranks: it is meant to be equal on them."""
    if len(_broadcast) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _broadcast.add(tensor.data_ptr())


def note_reduced(tensor: Any) -> None:
    """Note that all ranks of the job have summed this tensor."""
    if len(_reduced) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _reduced[tensor.data_ptr()] = tensor.numel()


def forget_reduced() -> None:
    """A backward pass begins. Tensors that were summed before are not its gradients, even at the same address."""
    _reduced.clear()


def _all_reduced(every: list[tuple[str, Any]]) -> bool:
    """Whether each existing gradient was summed over the whole job, so that all ranks train one model."""
    gradients = [parameter.grad for _, parameter in every if parameter.grad is not None]
    return bool(gradients) and all(_reduced.get(gradient.data_ptr()) == gradient.numel() for gradient in gradients)


def alone(models: Iterable[Any], known: Iterable[LiveReplica]) -> Iterator[Any]:
    """Yield the trainable models that share no parameter with a model in DDP; none in a job of one rank."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    taken = {parameter for replica in known for parameter in replica.parameters()}
    for model in models:
        if _replicated(model) and taken.isdisjoint(id(parameter) for parameter in model.parameters()):
            yield model


def watch(made: Callable[[Any], object], trouble: TroubleLog) -> None:
    """Call `made` with every DistributedDataParallel, after its constructor has made the replicas equal."""

    def constructed(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            made(arguments[0])

    kind = sys.modules[DDP_MODULE].DistributedDataParallel
    patch(kind, "__init__", "looks at replicas", trouble, after=constructed)


def _replicated(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that DDP reduces: with gradients, not excluded by name, not sharded."""
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


def _sample(parameters: list[Any], limit_bytes: int, limit_values: int) -> list[Any]:
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
    """Return the name of a communication hook that may leave replicas unequal on purpose, or ""."""
    for hook, _ in getattr(model, "_comm_hooks", ()):
        module, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__qualname__", hook))
        if not module.startswith(REDUCING) or LOCAL in name:
            return name[:80]
    return ""
