"""Samples checksums of model replicas, to detect ranks whose parameters diverge.

DDP keeps replicas equal by giving them equal gradients. A program that reduces gradients itself does the same. No code
compares the parameters afterwards, so replicas that differ once differ from then on. The samples of all ranks together
show when replicas diverged, which rank changed outside of its optimizer, and whether models without DDP were meant to
be equal. Buffers that DDP does not broadcast, and copies of a model such as a moving average, are sampled as well.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .fingerprint import Unreadable, checksum, sample_bytes, size_and_sum, values_of
from .groups import ranges
from .patches import TroubleLog, patch
from .places import frame_place, innermost_own, is_own

DDP_MODULE = "torch.nn.parallel.distributed"
INSTANCES_LIMIT = 4
PARAMETERS_LIMIT = 512
PARTS_LIMIT = 24  # parts of a model; each part has its own checksum
RATES_LIMIT = 8  # learning rates of a model
COPIES_LIMIT = 2  # copies of models that are compared
COPY_BYTES = 64 << 20  # a dict of tensors is only kept alive, until the next sample, if it has at most this size
BYTES_LIMIT = 128 << 10  # per sample of all parameters
VALUES_LIMIT = 4096
BROADCAST_LIMIT = 1 << 14
# Communication hooks of this package keep replicas equal. With any other hook replicas may differ on purpose.
REDUCING = "torch.distributed.algorithms.ddp_comm_hooks."
LOCAL = "post_localSGD"


class LiveReplica:
    """Tensors of this process that are compared between ranks."""

    def __init__(self, number: int, model: Any, kind: str = "ddp", original: LiveReplica | None = None) -> None:
        self.number = number
        # Only a dict has no weak references. It is released once nothing else refers to it.
        self.model: Callable[[], Any] = _Kept(model) if type(model) is dict else weakref.ref(model)
        if kind in _PARTS_OF_MODELS:
            self.model = lambda: model  # has weak references itself
        # "ddp": a model in DDP; "model": another one; "buffers" of a model; "copy" of a model; or a part of a model
        self.kind = kind
        self.original: LiveReplica = original or self  # the model that these buffers, or this copy, belong to
        self.needs_sample = kind == "ddp"  # take a sample before the next forward
        # Iterations and optimizer steps of this rank before this model, which do not count. Another rank may have
        # trained another model before, or none.
        self.earlier = 0, 0
        self.has_belongings = False  # its buffers and copies were searched
        self.bypass = ""  # line that called the model itself instead of DDP since the last sample

    def header(self) -> dict[str, Any]:
        """Return a record that describes this replica, including its first checksums.

        The record lists the ranks that have this replica, whether the parameters were broadcast, and the parts of the
        model. Each part is given by the names of its first and last parameter.
        """
        dist: Any = sys.modules["torch.distributed"]
        group = getattr(self.original.model(), "process_group", None) if self.original.kind == "ddp" else None
        members = sorted(dist.get_process_group_ranks(group))
        every = self._tensors()
        parts = [[names[0], names[-1]] for names, _ in _parts(every)]
        was_broadcast = bool(every) and all(parameter.data_ptr() in _broadcast_addresses for _, parameter in every)
        facts: dict[str, Any] = {
            "wrapped": self.kind == "ddp",
            "broadcast": was_broadcast,
            "ranks": ranges(members),
            "parts": parts,
        }
        facts |= _name_checksums([names for names, _ in _parts(every)])
        if self.kind in _PARTS_OF_MODELS:
            wrap_place = _wrap_places.get(self.original.model(), "") if self.original.kind == "ddp" else ""
            facts |= {"kind": self.kind, "of": self.model().name, "wrap": wrap_place}
        elif self.kind in ("buffers", "copy"):
            facts |= {"kind": self.kind, "of": type(_inner(self.model())).__name__}
        elif self.kind != "ddp":
            facts |= {"reduced": _all_reduced(every), "numel": sum(parameter.numel() for _, parameter in every)}
        return {"at": "made", "ddp": self.number, **facts, **self.sample()}

    def parameters(self) -> set[int]:
        """Return the ids of the model's parameters."""
        model: Any = self.model()
        if self.kind in _PARTS_OF_MODELS:
            return {id(parameter) for _, parameter in self._tensors()}
        return set() if model is None or self.kind == "copy" else {id(parameter) for parameter in model.parameters()}

    def sample(self) -> dict[str, Any]:
        """Return checksums of the model, and a checksum, norm and sum per part, in about 3 us per parameter."""
        parts = list(_parts(self._tensors()))
        count = max(1, sum(len(parameters) for _, parameters in parts))
        samples = [_part_sample(parameters, BYTES_LIMIT // count, VALUES_LIMIT // count) for _, parameters in parts]
        whole = 0
        for part in samples:
            whole = checksum(part[0].encode(), whole)
        return {"sum": f"{whole:08x}", "seen": samples, "hook": _custom_hook(self.original.model())}

    def _tensors(self) -> list[tuple[str, Any]]:
        model = self.model()
        if self.kind in _PARTS_OF_MODELS:
            return [(name, tensor) for name, ref in model.parameters if (tensor := ref()) is not None]
        if self.kind == "buffers":
            return _buffers(model)
        return _copied_tensors(model) if self.kind == "copy" else _ddp_parameters(model)


def optimizer_facts(optimizers: Iterable[Any], replica: LiveReplica) -> dict[str, Any]:
    """Return the learning rates of a model's parameters, and a checksum of the optimizers' state, "" if incomplete."""
    parameters = {id(parameter) for _, parameter in _ddp_parameters(replica.model())}
    rates, crc, covered = [], 0, set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [parameter for parameter in group["params"] if id(parameter) in parameters]
            rates += [float(group["lr"])] if members and type(group.get("lr")) in (int, float) else []
            for parameter in members:
                tensors = [value for value in optimizer.state.get(parameter, {}).values() if hasattr(value, "data_ptr")]
                covered |= {id(parameter)} if tensors else set()
                for tensor in tensors:
                    crc = checksum(_memory(tensor, max(256, BYTES_LIMIT // len(parameters))), crc)
    return {"rates": rates[:RATES_LIMIT], "state": f"{crc:08x}" if parameters and covered == parameters else ""}


class _Kept:
    """A reference to a dict, which ends once nothing else refers to this dict."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors: dict[str, Any] | None = tensors

    def __call__(self) -> dict[str, Any] | None:
        if sys.getrefcount(self._tensors) <= 2:  # the attribute, and the argument of this call
            self._tensors = None
        return self._tensors


# Kinds of trained parameters whose gradients DDP does not average. They were added to the model inside of DDP, or made
# trainable, after DDP wrapped it; or they are beside it, in the same outer model or in the same optimizer.
ADDED, BESIDE = "added", "beside"
# Trained parameters of a model without DDP whose gradients the program sums over all ranks, and all others.
SUMMED, LEFT_OUT = "summed", "left out"
_PARTS_OF_MODELS = (ADDED, BESIDE, SUMMED, LEFT_OUT)


class PartOfModel:
    """Trained parameters of a model, such as those that no DDP averages."""

    def __init__(self, name: str, parameters: Iterable[tuple[str, Any]]) -> None:
        self.name = name  # type of the module that has them
        self.parameters = [(name, weakref.ref(parameter)) for name, parameter in parameters]


_averaged: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # parameters of all DDP, by id
_known_unreduced: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_wrap_places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # DDP -> the line that created it


def _is_averaged(parameter: Any) -> bool:
    return _averaged.get(id(parameter)) is parameter


def unreduced_parameters(
    trained: Sequence[Any], models: Iterable[Any], ddps: Iterable[LiveReplica]
) -> Iterator[tuple[PartOfModel, str, LiveReplica]]:
    """Yield the parameters with a gradient that no DDP averages, with their kind and the DDP that they belong to.

    `trained` are the parameters of one optimizer. Skipped are sharded parameters, and those whose gradients the program
    sums itself. Each parameter is yielded once.
    """
    fresh = {
        id(parameter): parameter
        for parameter in trained
        if parameter.grad is not None
        and not _is_averaged(parameter)
        and id(parameter) not in _known_unreduced
        and not hasattr(parameter, "_local_tensor")
        and not hasattr(parameter, "_fsdp_flattened")
        and not _all_reduced([("", parameter)])
    }
    living = [(replica, model) for replica in ddps if replica.kind == "ddp" and (model := replica.model()) is not None]
    if not fresh or not living:
        return
    _known_unreduced.update(fresh)
    is_shared = any(_is_averaged(parameter) for parameter in trained)
    roots = [(ADDED, replica, _inner(model)) for replica, model in living]
    roots += [(BESIDE, living[0][0], model) for model in models]
    for kind, replica, root in roots:
        every = list(root.named_parameters())
        if kind == ADDED or is_shared or any(_is_averaged(parameter) for _, parameter in every):
            found = [(name, fresh.pop(id(parameter))) for name, parameter in every if id(parameter) in fresh]
            if found:
                yield PartOfModel(type(root).__name__, found), kind, replica
    if fresh and is_shared:
        loose = [(f"a parameter of shape {tuple(parameter.shape)}", parameter) for parameter in fresh.values()]
        yield PartOfModel("", loose), BESIDE, living[0][0]


def summed_and_left_out(replica: LiveReplica) -> Iterator[tuple[PartOfModel, str]]:
    """Yield the two parts of a model without DDP if the program sums only some of its gradients over all ranks.

    Yields nothing if the program sums all gradients, or none, or only copies of them.
    """
    model: Any = replica.model()
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and not hasattr(parameter, "_local_tensor")
        and not hasattr(parameter, "_fsdp_flattened")
    ]
    summed = [each for each in trained if _all_reduced([each])]
    left_out = [each for each in trained if not _all_reduced([each])]
    if summed and left_out:
        name = type(_inner(model)).__name__
        yield PartOfModel(name, summed[:PARAMETERS_LIMIT]), SUMMED
        yield PartOfModel(name, left_out[:PARAMETERS_LIMIT]), LEFT_OUT


def calling_place(frame: Any, model: Any, foreign: tuple[str, ...]) -> str:
    """Return the innermost line of the program that is not in a method of one of the modules of `model`, or ""."""
    inside = {id(module) for module in model.modules()}
    while frame is not None:
        code = frame.f_code
        # A function of the program can have the model as its first argument, too.
        is_method = code.co_varnames[:1] == ("self",) and id(frame.f_locals.get("self")) in inside
        if is_own(code.co_filename, foreign) and not is_method:
            return frame_place(frame)
        frame = frame.f_back
    return ""


def shares_parameters(module: Any, replica: LiveReplica) -> bool:
    """Return whether `module` is part of a model in DDP, or contains it, but is not the compiled DDP itself."""
    model: Any = replica.model()
    if replica.kind != "ddp" or model is None or type(module).__name__ == "OptimizedModule":
        return False
    # `replicate` calls DDP from hooks of the model.
    hooks = _inner(model)._forward_pre_hooks.values()
    if any("replicate" in str(getattr(hook, "__module__", "")) for hook in hooks):
        return False
    return not replica.parameters().isdisjoint(id(parameter) for parameter in module.parameters())


_broadcast_addresses: set[int] = set()  # addresses of tensors that were broadcast
_reduced_sizes: dict[
    int, int
] = {}  # tensors summed since the latest backward pass began: address -> number of elements


_collectives = [0, 0]  # number of collectives so far, and of the elements in them


def note_collective(elements: int) -> None:
    """Count a collective and its elements. All ranks of a program make the same collectives in the same order."""
    _collectives[0] += 1
    _collectives[1] += elements


def collectives() -> tuple[int, int]:
    """Return the number of collectives that this rank has begun so far, and the number of elements in them."""
    return _collectives[0], _collectives[1]


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


def belongings(originals: Sequence[LiveReplica]) -> Iterator[tuple[Any, str, LiveReplica]]:
    """Yield what else should be equal on all ranks that have these models, with its kind and its model.

    This is the buffers of a model, and copies of it: other modules, or dicts, with tensors of the same names and
    shapes. Costs about 50 ms, because all objects of the process are inspected.
    """
    models = [(replica, replica.model()) for replica in originals]
    yield from ((model, "buffers", replica) for replica, model in models if _buffers(model))
    known = {id(module) for _, model in models for module in model.modules()}
    storages = {parameter.data_ptr() for _, model in models for parameter in model.parameters()}
    shapes = [(replica, {name: tensor.shape for name, tensor in _ddp_parameters(model)}) for replica, model in models]
    copies = 0
    for candidate in _modules_and_dicts(sys.modules["torch"]):
        tensors = dict(_copied_tensors(candidate)) if id(candidate) not in known else {}
        for replica, shape_of in shapes:
            if (
                copies < COPIES_LIMIT
                and 1 < len(shape_of) <= len(tensors)
                and all(name in tensors and tensors[name].shape == shape for name, shape in shape_of.items())
                and storages.isdisjoint(tensor.data_ptr() for tensor in tensors.values())
                and (type(candidate) is not dict or _size(tensors.values()) <= COPY_BYTES)
            ):
                copies += 1
                storages |= {tensor.data_ptr() for tensor in tensors.values()}
                yield candidate, "copy", replica


def _modules_and_dicts(torch: Any) -> Iterator[Any]:
    """Yield the modules of this process, and its dicts of tensors."""
    is_module: dict[type, bool] = {}
    tensor_types = (torch.Tensor, torch.nn.Parameter)
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is dict:
            if thing and type(next(iter(thing.values()))) in tensor_types:
                items = list(thing.items())
                if all(type(name) is str and type(value) in tensor_types for name, value in items):
                    yield thing
            continue
        if kind not in is_module:
            is_module[kind] = torch.nn.Module in type.__dict__["__mro__"].__get__(kind)
        if is_module[kind]:
            yield thing


def _size(tensors: Iterable[Any]) -> int:
    return sum(
        tensor.numel() * tensor.element_size() if tensor.device.type == "cpu" else COPY_BYTES for tensor in tensors
    )


def _copied_tensors(model: Any) -> list[tuple[str, Any]]:
    """Return the named tensors of a copy of a model: all parameters of a module, or the values of a dict."""
    tensors = model.items() if type(model) is dict else model.named_parameters()
    every = [(name.removeprefix("module."), tensor) for name, tensor in list(tensors) if tensor.is_floating_point()]
    return every[: PARAMETERS_LIMIT * 2]


def _buffers(model: Any) -> list[tuple[str, Any]]:
    """Return the named buffers that should be equal on all ranks if they ever are.

    Skipped are buffers that DDP broadcasts, the statistics of torch's normalization layers, buffers that are not saved,
    which are caches, and everything that has no floating-point numbers, such as a counter or the state of a generator.
    """
    if getattr(model, "broadcast_buffers", False):
        return []
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, module in _inner(model).named_modules()
        if all(base.__name__ != "_NormBase" for base in type(module).__mro__)
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and buffer.is_floating_point()
        and not hasattr(buffer, "_local_tensor")
    ][:PARAMETERS_LIMIT]


def _inner(model: Any) -> Any:
    """Return the model inside of DDP, or the model itself."""
    return model.module if hasattr(model, "parameters_to_ignore") else model


def watch(note_model: Callable[[Any], object], trouble: TroubleLog, foreign: tuple[str, ...]) -> None:
    """Call `note_model` with each new DistributedDataParallel model. `foreign`: as in `innermost_own`."""

    def after_init(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            model = arguments[0]
            _wrap_places[model] = frame_place(innermost_own(sys._getframe(1), foreign))
            _averaged.update({id(each): each for each in model.module.parameters() if each.requires_grad})
            for parameter in model.module.parameters():
                note_broadcast(parameter)  # the model itself is compared if the program drops DDP
            note_model(model)

    kind = sys.modules[DDP_MODULE].DistributedDataParallel
    patch(kind, "__init__", "replica samples", trouble, after=after_init)


def _ddp_parameters(model: Any) -> list[tuple[str, Any]]:
    """Return the named parameters whose gradients DDP reduces and that are not sharded, or a sample of many."""
    ignored_names = getattr(model, "parameters_to_ignore", ())
    every = [
        (name, parameter)
        for name, parameter in _inner(model).named_parameters()
        if parameter.requires_grad
        and name not in ignored_names
        and not hasattr(parameter, "_local_tensor")
        and (not hasattr(model, "parameters_to_ignore") or _is_averaged(parameter))
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
