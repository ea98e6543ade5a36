"""Reads and replaces values of the program for an experiment, without running any of the program's code.

A value can be replaced only where Python stores it without calling anything: a local variable, a global variable, an
entry of an instance's own dictionary, a slot, a class attribute, and an item of a list or dict. Everything else is
refused, and the reason is recorded.
"""

from __future__ import annotations

import ctypes
import marshal
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .safe_attributes import MISSING, _defines, _first

MAX_BYTES = 65536  # of one value
_MAX_DEPTH = 6
_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_CONTAINERS = (list, tuple, dict)
_NUMPY_SCALARS = ("float64", "float32", "int64", "int32", "bool")
_PATHS = ("PosixPath", "PurePosixPath")
_OPTIMIZED = 1  # the flag of a code object whose locals are not stored in a dictionary
_DICTIONARIES = (types.GetSetDescriptorType, types.MemberDescriptorType)  # of instances: SimpleNamespace has the latter
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class Refusal(Exception):
    """An intervention cannot be carried out. The message is a code such as "property"."""


class Holder:
    """A name or an attribute whose value can be read and replaced."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], frame: Any = None) -> None:
        self.read = read
        self.write = write
        self.frame = frame  # the frame of a local variable; otherwise None


def find_holder(frame: types.FrameType, path: Sequence[Sequence[Any]]) -> Holder:
    """Return the holder that `path` names in this frame. Raise Refusal if its value cannot be replaced safely.

    A path such as [["name", "self"], ["attribute", "bad"], ["item", 0]] begins with a name. The key of
    ["item of", "step"] is the value of another variable.
    """
    holder = _variable(frame, path[0][1])
    for kind, key in path[1:]:
        base = holder.read()
        if base is MISSING:
            raise Refusal("unbound")
        if kind == "item of":
            key = _variable(frame, key).read()
        holder = _attribute(base, key) if kind == "attribute" else _item(base, key)
    return holder


def owner_frame(frame: types.FrameType, name: str) -> types.FrameType | None:
    """Return the frame among the callers of `frame` that owns its free variable `name`, or None."""
    caller = frame.f_back
    while caller is not None:
        if name in caller.f_code.co_cellvars:
            return caller
        caller = caller.f_back
    return None


def _variable(frame: types.FrameType, name: str) -> Holder:
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        if type(frame.f_locals) is dict and (name in frame.f_locals or frame.f_locals is frame.f_globals):
            return _entry(frame.f_locals, name)
    elif name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:

        def write(value: Any) -> None:
            # The assignment comes last: before Python 3.13, reading `f_locals` again would discard it.
            frame.f_locals[name] = value
            if sys.version_info < (3, 13):
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

        return Holder(lambda: frame.f_locals.get(name, MISSING), write, frame)
    if type(frame.f_globals) is dict and name in frame.f_globals:
        return _entry(frame.f_globals, name)
    raise Refusal("unbound")


def _entry(mapping: dict[Any, Any], key: Any) -> Holder:
    """Return the holder of one entry of a dict. A key whose comparison could run the program's code is refused."""
    if len(mapping) > 100_000 or not all(is_one_of(type(other), _PLAIN) for other in mapping):
        raise Refusal("keys")

    def write(value: Any) -> None:
        if value is MISSING:
            mapping.pop(key, None)
        else:
            mapping[key] = value

    return Holder(lambda: mapping.get(key, MISSING), write)


def _item(base: Any, key: Any) -> Holder:
    if type(base) is dict and is_one_of(type(key), (int, str)):
        return _entry(base, key)
    if type(base) is list and type(key) is int and -len(base) <= key < len(base):
        return Holder(lambda: base[key], lambda value: base.__setitem__(key, value))
    raise Refusal("container")


def _attribute(base: Any, name: str) -> Holder:
    if type(base) is type:
        if name in type.__getattribute__(base, "__dict__") and not name.startswith("__"):
            return Holder(
                lambda: type.__getattribute__(base, "__dict__")[name],
                lambda value: type.__setattr__(base, name, value),
            )
        raise Refusal("class")
    descriptor = _first(type(base), name)
    if type(descriptor) is types.MemberDescriptorType:
        member: Any = descriptor

        def read() -> Any:
            try:
                return member.__get__(base)
            except AttributeError:
                return MISSING

        return Holder(read, lambda value: member.__set__(base, value))
    if descriptor is not MISSING and _defines(type(descriptor), "__set__"):
        raise Refusal("property")
    attributes = plain_attributes(base)
    if attributes is None:
        raise Refusal("no plain attributes")
    return _entry(attributes, name)


def plain_attributes(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an instance, or None if reading it could run the program's code."""
    descriptor = type(_first(type(value), "__dict__"))
    if type(value) is not types.ModuleType and not is_one_of(descriptor, _DICTIONARIES):
        return None
    attributes = object.__getattribute__(value, "__dict__")
    return attributes if type(attributes) is dict else None


def is_one_of(cls: type, classes: Sequence[type]) -> bool:
    """Return whether a class is one of these classes. Comparing with `==` or hashing could run a metaclass."""
    return any(cls is other for other in classes)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether the value consists of exact builtin types only."""
    if is_one_of(type(value), _PLAIN):
        return True
    if not is_one_of(type(value), _CONTAINERS) or depth == _MAX_DEPTH or len(value) > MAX_BYTES:
        return False
    parts = (*value, *value.values()) if type(value) is dict else value
    return all(is_plain(part, depth + 1) for part in parts)


def pack(value: Any, *, with_graph: bool = False) -> tuple[Any, ...]:
    """Return the value as builtin types that another process can unpack. Raise Refusal for other values.

    `with_graph`: allow a tensor that requires a gradient. The unpacked tensor has no graph.
    """
    if value is MISSING:
        raise Refusal("unbound")
    if is_plain(value):
        return _checked("plain", value)
    if is_one_of(type(value), _classes("numpy", _NUMPY_SCALARS)):
        return _checked("numpy", type(value).__name__, value.item())
    if is_one_of(type(value), _classes("pathlib", _PATHS)):
        return _checked("path", type(value).__name__, str(value))
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        raise Refusal("type")
    with TorchOnly():
        if value.device.type != "cpu" or value.layout is not torch.strided or not value.is_contiguous():
            raise Refusal("device")
        if value.requires_grad and not with_graph:
            raise Refusal("graph")
        size = value.numel() * value.element_size()
        if size > MAX_BYTES or (size and not value.data_ptr()):
            raise Refusal("size")
        return _checked("tensor", str(value.dtype), ctypes.string_at(value.data_ptr(), size), tuple(value.shape))


def first_items(value: Any, count: int | None = None) -> tuple[int, Any]:
    """Return the length of a sequence, and its first `count` items. Raise Refusal for any other value."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if is_one_of(type(value), (list, tuple, range)):
        return len(value), value[:count]
    if numpy is not None and type(value) is numpy.ndarray and value.ndim:
        return value.shape[0], value[:count]
    if torch is not None and type(value) is torch.Tensor:
        with TorchOnly():
            if value.dim():
                return value.shape[0], value[:count]
    raise Refusal("type")


def _checked(*packed: Any) -> tuple[Any, ...]:
    if len(marshal.dumps(packed)) > MAX_BYTES * 2:
        raise Refusal("size")
    return packed


def unpack(packed: tuple[Any, ...]) -> Any:
    """Return a new object with the value that `pack` has packed."""
    kind = packed[0]
    if kind == "plain":
        return packed[1]
    if kind == "numpy":
        return getattr(sys.modules["numpy"], packed[1])(packed[2])
    if kind == "path":
        return getattr(sys.modules["pathlib"], packed[1])(packed[2])
    torch: Any = sys.modules["torch"]
    with TorchOnly():
        dtype = getattr(torch, packed[1].partition(".")[2])
        if not packed[2]:
            return torch.empty(packed[3], dtype=dtype)
        return torch.frombuffer(bytearray(packed[2]), dtype=dtype).reshape(packed[3])


def kind_of(packed: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what must be equal on two ranks so that one rank's value can replace the other's."""
    if packed[0] == "tensor":
        return ("tensor", packed[1], packed[3])
    return (packed[0], type(packed[-1]).__name__)


class TorchOnly:
    """Keep torch from calling the program's function modes and dispatch modes within a `with` block."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        names = ("DisableTorchFunction", "_DisableTorchDispatch")
        self._guards = [getattr(torch._C, name)() for name in names if hasattr(torch._C, name)]

    def __enter__(self) -> None:
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


def save(value: Any) -> Callable[[Holder], object]:
    """Return a function that later restores this value in its holder. Raise Refusal if that is impossible.

    The content of a list, dict, set or tensor and the state of a random generator are copied, because the program may
    change them in place.
    """
    put_back = _saved_state(value)
    if put_back is not None:

        def restore_generator(holder: Holder) -> None:
            put_back()
            holder.write(value)

        return restore_generator
    if value is MISSING or is_one_of(type(value), (*_PLAIN, tuple, *_immutable_classes())):
        return lambda holder: holder.write(value)
    if is_one_of(type(value), (list, dict, set)):
        if type(value) is not list and not all(is_one_of(type(key), _PLAIN) for key in value):
            raise Refusal("keys")
        content = value.copy()

        def restore(holder: Holder) -> None:
            if type(value) is list:
                value[:] = content
            else:
                value.clear()
                value.update(content)
            holder.write(value)

        return restore
    packed = pack(value, with_graph=True)

    def restore_tensor(holder: Holder) -> None:
        with TorchOnly():
            value.data.copy_(unpack(packed))
        holder.write(value)

    return restore_tensor


def _saved_state(value: Any) -> Callable[[], object] | None:
    """Return a function that puts a random generator back into its present state, or None for any other value.

    Only generators of exactly the types of the libraries count, so that no method of the program runs.
    """
    random, numpy, torch = (sys.modules.get(name) for name in ("random", "numpy.random", "torch"))
    cls: Any = type(value)
    if random is not None and cls is random.Random:
        state = cls.getstate(value)
        return lambda: cls.setstate(value, state)
    if numpy is not None and cls is numpy.RandomState:
        state = value.get_state()
        return lambda: value.set_state(state)
    if numpy is not None and cls is numpy.Generator:
        bits = value.bit_generator
        if is_one_of(type(bits), [getattr(numpy, name) for name in _BIT_GENERATORS if hasattr(numpy, name)]):
            state = bits.state
            return lambda: setattr(bits, "state", state)
    if torch is not None and cls is torch.Generator and value.device.type == "cpu":
        state = value.get_state()
        return lambda: value.set_state(state)
    return None


def _immutable_classes() -> tuple[type, ...]:
    return (*_classes("numpy", _NUMPY_SCALARS), *_classes("pathlib", _PATHS))


def _classes(module_name: str, names: Sequence[str]) -> tuple[type, ...]:
    """Return the classes of a module by name, or no classes if the program has not imported the module."""
    module = sys.modules.get(module_name)
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def jump(frame: types.FrameType, line: int) -> None:
    """Continue the frame at another line. Raise Refusal if Python does not allow it, or if a loop would start again."""
    if line <= frame.f_lineno and line in _for_lines(frame.f_code):
        raise Refusal("restarts the loop")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about locals that the skipped lines would have assigned
            frame.f_lineno = line  # type: ignore[misc]  # it may be set in a trace function
    except ValueError as error:
        raise Refusal(f"jump: {error}") from None


def _for_lines(code: types.CodeType) -> Iterator[int | None]:
    import dis

    instruction = dis.opmap["FOR_ITER"]
    for begin, end, line in code.co_lines():
        if instruction in code.co_code[begin:end:2]:
            yield line


def generator_states() -> dict[str, Any]:
    """Return the state of the default generators of torch, `random` and numpy as builtin types."""
    states: dict[str, Any] = {}
    torch: Any = sys.modules.get("torch")
    numpy_random: Any = sys.modules.get("numpy.random")
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    if hasattr(torch, "get_rng_state"):
        with TorchOnly():
            states["torch"] = bytes(torch.default_generator.get_state().tolist())
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Set the state of each generator in `states`, which comes from `generator_states`."""
    if "random" in states:
        sys.modules["random"].setstate(states["random"])
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy: Any = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "torch" in states:
        torch: Any = sys.modules["torch"]
        with TorchOnly():
            torch.default_generator.set_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
