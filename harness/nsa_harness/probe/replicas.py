"""Samples checksums of model replicas, to detect ranks whose parameters diverge.

DDP keeps replicas equal by giving them equal gradients. A program that reduces gradients itself does the same. No code
compares the parameters afterwards, so replicas that differ once differ from then on. The samples of all ranks together
show when replicas diverged, which rank changed outside of its optimizer, and whether models without DDP were meant to
be equal.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .fingerprint import Unreadable, checksum, sample_bytes, size_and_sum, values_of
from .groups import ranges
from .patches import TroubleLog, patch

DDP_MODULE = "torch.nn.parallel.distributed"
INSTANCES_LIMIT = 4
PARAMETERS_LIMIT = 512
PARTS_LIMIT = 24  # parts of a model; each part has its own checksum
BYTES_LIMIT = 128 << 10  # per sample of all parameters
VALUES_LIMIT = 4096
BROADCAST_LIMIT = 1 << 14
# Communication hooks of this package keep replicas equal. With any other hook replicas may differ on purpose.
REDUCING = "torch.distributed.algorithms.ddp_comm_hooks."
LOCAL = "post_localSGD"


class LiveReplica:
    """A model in this process whose parameters are compared between ranks."""

    def __init__(self, number: int, model: Any, *, wrapped: bool = True) -> None:
        self.number = number
        self.model = weakref.ref(model)
        self.wrapped = wrapped  # whether DDP wraps the model
        self.needs_sample = wrapped  # sample the parameters before the next forward

    def header(self) -> dict[str, Any]:
        """Return a record that describes this replica, including its first checksums.

        The record lists the ranks that have this replica, whether the parameters were broadcast, and the parts of the
        model. Each part is given by the names of its first and last parameter.
        """
        model: Any = self.model()
        dist: Any = sys.modules["torch.distributed"]
        group = model.process_group if self.wrapped else None
        members = sorted(dist.get_process_group_ranks(group))
        every = _ddp_parameters(model)
        parts = [[names[0], names[-1]] for names, _ in _parts(every)]
        was_broadcast = bool(every) and all(parameter.data_ptr() in _broadcast_addresses for _, parameter in every)
        facts: dict[str, Any] = {
            "wrapped": self.wrapped,
            "broadcast": was_broadcast,
            "ranks": ranges(members),
            "parts": parts,
        }
        facts |= _name_checksums([names for names, _ in _parts(every)])
        if not self.wrapped:
            facts["reduced"] = _all_reduced(every)
        return {"at": "made", "ddp": self.number, **facts, **self.sample()}

    def parameters(self) -> set[int]:
        """Return the ids of the model's parameters."""
        model: Any = self.model()
        return set() if model is None else {id(parameter) for parameter in model.parameters()}

    def sample(self) -> dict[str, Any]:
        """Return checksums of the model, and a checksum, norm and sum per part, in about 3 us per parameter."""
        model: Any = self.model()
        parts = list(_parts(_ddp_parameters(model)))
        count = max(1, sum(len(parameters) for _, parameters in parts))
        samples = [_part_sample(parameters, BYTES_LIMIT // count, VALUES_LIMIT // count) for _, parameters in parts]
        whole = 0
        for part in samples:
            whole = checksum(part[0].encode(), whole)
        return {"sum": f"{whole:08x}", "seen": samples, "hook": _custom_hook(model)}


_broadcast_addresses: set[int] = set()  # addresses of tensors that were broadcast
_reduced_sizes: dict[
    int, int
] = {}  # tensors summed since the latest backward pass began: address -> number of elements


def note_broadcast(tensor: Any) -> None:
    """Record that a rank has broadcast `tensor`, which means that it should be equal on all ranks."""
    if len(_broadcast_addresses) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _broadcast_addresses.add(tensor.data_ptr())


def note_reduced(tensor: Any) -> None:
    """Record that the gradient `tensor` was summed over all ranks."""
    if len(_reduced_sizes) < BROADCAST_LIMIT and hasattr(tensor, "data_ptr"):
        _reduced_sizes[tensor.data_ptr()] = tensor.numel()


def forget_reduced() -> None:
    """Forget all summed tensors when a backward pass begins, because new gradients may reuse their addresses."""
    _reduced_sizes.clear()


def _all_reduced(named_parameters: list[tuple[str, Any]]) -> bool:
    """Return whether every gradient of a model was summed over all ranks."""
    gradients = [parameter.grad for _, parameter in named_parameters if parameter.grad is not None]
    return bool(gradients) and all(
        _reduced_sizes.get(gradient.data_ptr()) == gradient.numel() for gradient in gradients
    )


def models_without_ddp(models: Iterable[Any], replicas: Iterable[LiveReplica]) -> Iterator[Any]:
    """Yield the trainable models that share no parameter with `replicas`, or nothing if there is only one rank."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() < 2:
        return
    replica_parameters = {parameter for replica in replicas for parameter in replica.parameters()}
    for model in models:
        if _ddp_parameters(model) and replica_parameters.isdisjoint(id(parameter) for parameter in model.parameters()):
            yield model


def watch(note_model: Callable[[Any], object], trouble: TroubleLog) -> None:
    """Call `note_model` with each new DistributedDataParallel model."""

    def after_init(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            note_model(arguments[0])

    kind = sys.modules[DDP_MODULE].DistributedDataParallel
    patch(kind, "__init__", "replica samples", trouble, after=after_init)


def _ddp_parameters(model: Any) -> list[tuple[str, Any]]:
    """Return the named parameters whose gradients DDP reduces and that are not sharded, or a sample of many."""
    ignored_names = getattr(model, "parameters_to_ignore", ())
    inner = model.module if hasattr(model, "parameters_to_ignore") else model
    every = [
        (name, parameter)
        for name, parameter in inner.named_parameters()
        if parameter.requires_grad and name not in ignored_names and not hasattr(parameter, "_local_tensor")
    ]
    stride = -(-len(every) // PARAMETERS_LIMIT) or 1
    return every[::stride]


def _parts(named_parameters: list[tuple[str, Any]]) -> Iterator[tuple[list[str], list[Any]]]:
    """Divide named parameters into parts of similar length. Yield (names, parameters) for each part."""
    length = -(-len(named_parameters) // PARTS_LIMIT) or 1
    for begin in range(0, len(named_parameters), length):
        names, parameters = zip(*named_parameters[begin : begin + length])
        yield list(names), list(parameters)


_COMPILED = "_orig_mod."  # torch.compile adds it to the names of parameters


def _name_checksums(parts: list[list[str]]) -> dict[str, Any]:
    """Return checksums of the parameters' names: for each part in order, and for all names in any order."""
    encoded = [[name.replace(_COMPILED, "").encode() for name in names] for names in parts]
    ordered = [f"{checksum(b' '.join(names)):08x}" for names in encoded]
    unordered = sum(checksum(name) for names in encoded for name in names) & 0xFFFFFFFF
    return {"order": ordered, "names": f"{unordered:08x}"}


def _part_sample(parameters: list[Any], limit_bytes: int, limit_values: int) -> list[Any]:
    """Return the checksum, norm and sum of `parameters` as strings."""
    crc = 0
    values: list[float] = []
    for parameter in parameters:
        data = _memory(parameter, max(256, limit_bytes))
        dtype = str(parameter.dtype)
        crc = checksum(data, crc)
        values += values_of(data[: 8 * max(4, limit_values)], dtype)[: max(4, limit_values)]
    size, total = size_and_sum(values)
    return [f"{crc:08x}", f"{size:.6g}", f"{total:.6g}"]


def _memory(parameter: Any, limit_bytes: int) -> bytes:
    try:
        return sample_bytes(parameter, limit_bytes)
    except Unreadable:
        return b""


def _custom_hook(model: Any) -> str:
    """Return the name of a DDP communication hook that can leave replicas unequal, or "" if there is none."""
    for hook, _ in getattr(model, "_comm_hooks", ()):
        module, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__qualname__", hook))
        if not module.startswith(REDUCING) or LOCAL in name:
            return name[:80]
    return ""
