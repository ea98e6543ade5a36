"""Reads the values of the program without running any of its code.

A value is read with functions of Python and torch that no class of the program can replace: types are compared by
identity, attributes come from the dictionary of the object, and containers are read only if their type is exactly
Python's. Everything else is shown by its type alone.
"""

from __future__ import annotations

import ast
import collections
import ctypes
import enum
import functools
import itertools
import struct
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from .lengths import attribute_returned
from .safe_attributes import MISSING as MISSING
from .safe_attributes import TYPES_LIMIT, _first, bases_of, module_namespace
from .safe_attributes import attribute as attribute
from .safe_attributes import item as item

TEXT_LIMIT = 80  # characters of a text
ITEMS_SHOWN = 8
ITEMS_READ = 32  # items of one container that its checksum covers
ITEMS_READ_IN_ALL = 64  # items of a container and of the containers in it
TENSOR_COST = 4  # a tensor or an array in a container counts as so many items
DEPTH_LIMIT = 2  # containers in a container
BYTES_READ = 4096  # of a tensor, an array or a string
SCATTERED_READ = 512  # elements of a tensor or an array that is not contiguous
NUMBER_BITS = 512

Value = tuple[str, str, int]
Reader = Callable[[Any, "_Budget | None"], str]

_name: Callable[[type], str] = vars(type)["__name__"].__get__
_exception_arguments: Callable[[BaseException], tuple[Any, ...]] = vars(BaseException)["args"].__get__
_CODE_TYPES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType, functools.partial,
)  # fmt: skip


_READ_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError, MemoryError)


def read(value: Any) -> Value:
    """Return the type name, the text and the identity of a value.

    The text is "" if the value cannot be read. The identity is 0 for immutable values of Python's own types.
    """
    name, reader, is_mutable, _, _ = _known(type(value))
    text = ""
    if reader is not None:
        try:
            text = reader(value, None)
        except _READ_ERRORS:
            text = ""
    return name, text, id(value) if is_mutable else 0


def read_data(value: Any) -> Value | None:
    """Return the same as `read`, or None for a function, a class or a module."""
    kind = type(value)
    known = _known_types.get(id(kind))
    name, reader, is_mutable, is_program, _ = known if known is not None else _known(kind)
    if is_program:
        return None
    if reader is None:
        return name, "", id(value) if is_mutable else 0
    try:
        return name, reader(value, None), id(value) if is_mutable else 0
    except _READ_ERRORS:
        return name, "", id(value) if is_mutable else 0


def is_code(value: Any) -> bool:
    """Return whether a value is a function, a class or a module, which no training run changes."""
    return _known(type(value))[3]


def type_name(kind: type) -> str:
    return str.__str__(_name(kind))


def message(error: BaseException) -> str:
    """Return the message of an exception, from its arguments, without calling a `__str__` of the program."""
    arguments = _exception_arguments(error)
    texts = [item if type(item) is str else read(item)[1] for item in arguments[:ITEMS_SHOWN]]
    return ", ".join(text for text in texts if text)


# Names in a frame.


class Path:
    """An expression that can be read without running code, such as "stopper.bad", "state['step']" or "len(loader)"."""

    __slots__ = ("name", "root", "steps")

    def __init__(self, name: str, root: str, steps: tuple[tuple[str, Any], ...]) -> None:
        self.name = name
        self.root = root
        self.steps = steps

    def find(self, local: Any, shared: Any) -> Any:
        """Return the object that the expression names, or MISSING. `local` and `shared` are a frame's variables."""
        found = variable(self.root, local, shared)
        for operation, detail in self.steps:
            if found is MISSING:
                return found
            if operation == "attribute":
                found = attribute(found, detail)
            elif operation == "item":
                found = item(found, detail)
            elif operation == "item of":
                found = item(found, variable(detail, local, shared))
            else:
                found = length(found)
        return found


def variable(name: str, local: Any, shared: Any) -> Any:
    found = local.get(name, MISSING)
    return shared.get(name, MISSING) if found is MISSING else found


def path_of(node: ast.AST) -> Path | None:
    """Return the path for an expression, or None if it may run code."""
    if isinstance(node, ast.Name):
        return Path(node.id, node.id, ())
    if isinstance(node, ast.Attribute):
        base = path_of(node.value)
        return base and Path(f"{base.name}.{node.attr}", base.root, (*base.steps, ("attribute", node.attr)))
    if isinstance(node, ast.Subscript):
        base, key = path_of(node.value), node.slice
        if base is not None and isinstance(key, ast.Constant) and type(key.value) in (int, str):
            return Path(f"{base.name}[{key.value!r}]", base.root, (*base.steps, ("item", key.value)))
        if base is not None and isinstance(key, ast.Name):
            return Path(f"{base.name}[{key.id}]", base.root, (*base.steps, ("item of", key.id)))
    is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    if is_length and len(node.args) == 1 and (base := path_of(node.args[0])) is not None:  # type: ignore[attr-defined]
        return Path(f"len({base.name})", base.root, (*base.steps, ("length", None)))
    return None


def _locals_type() -> type:
    return type(sys._getframe().f_locals)


_LOCALS = _locals_type()  # from Python 3.13 on, not a dict


def frame_variables(frame: Any) -> tuple[Any, Any]:
    """Return the local and global variables of a frame. What is no dictionary of Python is returned as empty."""
    local, shared = frame.f_locals, frame.f_globals
    is_plain = type(local) is dict or type(local) is _LOCALS
    return local if is_plain else {}, shared if type(shared) is dict else {}


# Lengths.


def length(value: Any) -> Any:
    """Return len() of a container of Python, or of a dataset, sampler or loader of torch. Otherwise MISSING."""
    kind = type(value)
    if any(kind is other for other in _SIZED):
        return kind.__len__(value)
    module = sys.modules.get("torch.utils.data")
    names = module_namespace(module) if type(module) is types.ModuleType else {}
    for name, rule in _LENGTHS.items():
        if kind is names.get(name):
            return rule(value)
    return own_length(value)


def own_length(value: Any) -> Any:
    """Return what the `__len__` of an object of the program returns if it only reads an attribute, or MISSING."""
    method = _first(type(value), "__len__")
    if type(method) is not types.FunctionType:
        return MISSING
    takes_length, names = attribute_returned(method.__code__)
    if not names or (takes_length and "len" in method.__globals__):
        return MISSING
    for name in names:
        value = attribute(value, name)
    if takes_length:
        return MISSING if value is MISSING else length(value)
    return value if type(value) is int else MISSING


_SIZED: tuple[Any, ...] = (
    list, tuple, dict, set, frozenset, str, bytes, bytearray, range, collections.deque, collections.OrderedDict,
    collections.defaultdict, collections.Counter,
)  # fmt: skip


def _batches(sampler: Any) -> Any:
    items, size = length(attribute(sampler, "sampler")), attribute(sampler, "batch_size")
    if type(items) is not int or type(size) is not int or size < 1:
        return MISSING
    return items // size if attribute(sampler, "drop_last") is True else -(-items // size)


def _loader_length(loader: Any) -> Any:
    return length(attribute(loader, "sampler" if attribute(loader, "batch_sampler") is None else "batch_sampler"))


def _random_length(sampler: Any) -> Any:
    chosen = attribute(sampler, "_num_samples")
    return chosen if type(chosen) is int else length(attribute(sampler, "data_source"))


def _tensors_length(dataset: Any) -> Any:
    first = item(attribute(dataset, "tensors"), 0)
    if _known(type(first))[1] is not _tensor:
        return MISSING
    with sys.modules["torch"]._C.DisableTorchFunction():
        return int(first.shape[0])


_LENGTHS: dict[str, Callable[[Any], Any]] = {
    "DataLoader": _loader_length,
    "BatchSampler": _batches,
    "RandomSampler": _random_length,
    "SequentialSampler": lambda sampler: length(attribute(sampler, "data_source")),
    "DistributedSampler": lambda sampler: attribute(sampler, "num_samples"),
    "SubsetRandomSampler": lambda sampler: length(attribute(sampler, "indices")),
    "Subset": lambda dataset: length(attribute(dataset, "indices")),
    "TensorDataset": _tensors_length,
    "ConcatDataset": lambda dataset: item(attribute(dataset, "cumulative_sizes"), -1),
}


# Texts.


class _Budget:
    """The number of items that may still be read."""

    __slots__ = ("depth", "items")

    def __init__(self) -> None:
        self.items = ITEMS_READ_IN_ALL
        self.depth = 0


def _integer(value: int, _: _Budget | None) -> str:
    bits = value.bit_length()
    return str(value) if bits <= NUMBER_BITS else f"{bits} bits crc {zlib.crc32(hex(value).encode()):08x}"


def _string(value: Any, _: _Budget | None) -> str:
    if len(value) <= TEXT_LIMIT:
        return repr(value)
    part = value[:BYTES_READ]
    data = part.encode("utf-8", "surrogatepass") if type(part) is str else bytes(part)
    return f"{value[: TEXT_LIMIT // 2]!r}... of {len(value)} crc {zlib.crc32(data):08x}"


def _sequence(value: Any, budget: _Budget | None) -> str:
    return _contents(value, iter(value), len(value), budget or _Budget())


def _mapping(value: Any, budget: _Budget | None) -> str:
    return _contents(
        value, itertools.chain.from_iterable(dict.items(value)), 2 * dict.__len__(value), budget or _Budget()
    )


def _contents(value: Any, items: Iterator[Any], count: int, budget: _Budget) -> str:
    """Return the items of a container, or its length and a checksum of its first items."""
    is_mapping = issubclass(type(value), dict)
    texts: list[str] = []
    is_simple = True
    if not is_mapping and (text := _numbers_text(value, count)):
        return text
    budget.depth += 1
    try:
        for one in itertools.islice(items, ITEMS_READ):
            budget.items -= 1
            if budget.items < 0:
                break
            text, is_scalar = _item_text(one, budget)
            is_simple = is_simple and is_scalar
            texts.append(text)
    finally:
        budget.depth -= 1
    if is_mapping:
        texts = [f"{key}: {one}" for key, one in zip(texts[::2], texts[1::2])]
        count //= 2
    if is_simple and count == len(texts) <= ITEMS_SHOWN:
        kind = type(value)
        is_list = kind is list or kind is collections.deque
        opening, closing = "()" if issubclass(kind, tuple) else "[]" if is_list else "{}"
        text = f"{opening}{', '.join(texts)}{closing}"
        if len(text) <= TEXT_LIMIT:
            return text
    return f"{count} items crc {zlib.crc32(','.join(texts).encode('utf-8', 'surrogatepass')):08x}"


def _numbers_text(value: Any, count: int) -> str:
    """Return the text of a list or tuple of numbers, which are read much faster than other items. Otherwise ""."""
    kind = type(value)
    if kind is not list and kind is not tuple:
        return ""
    items = value[:ITEMS_READ]
    for one in items:
        other = type(one)
        if other is not int and other is not float and other is not bool and one is not None:
            return ""
        if other is int and not -(2**64) < one < 2**64:
            return ""
    text = repr(items)
    if count <= ITEMS_SHOWN and len(text) <= TEXT_LIMIT:
        return text
    return f"{count} items crc {zlib.crc32(text.encode()):08x}"


def _item_text(value: Any, budget: _Budget) -> tuple[str, bool]:
    kind = type(value)
    _, reader, is_mutable, _, _ = _known(kind)
    is_container = reader is _sequence or reader is _mapping
    if reader is None or (is_container and budget.depth >= DEPTH_LIMIT):
        return type_name(kind), False
    if reader is _tensor or reader is _array:
        budget.items -= TENSOR_COST - 1
    return reader(value, budget), not is_mutable and not is_container


def _plain(value: Any, _: _Budget | None) -> str:
    return repr(value)


def _path(value: Any, budget: _Budget | None) -> str:
    return _string(str(value), budget)


def _generator_state(value: Any, _: _Budget | None) -> str:
    with sys.modules["torch"]._C.DisableTorchFunction():
        if value.device.type != "cpu":
            return ""
        state = value.get_state()
        return f"state {zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel())):08x}"


def _random_state(value: Any, _: _Budget | None) -> str:
    return f"state {zlib.crc32(repr(value.getstate()).encode()):08x}"


def _numpy_generator(value: Any, _: _Budget | None) -> str:
    return f"state {zlib.crc32(repr(value.bit_generator.state).encode()):08x}"


def _numpy_scalar(value: Any, _: _Budget | None) -> str:
    return repr(value.item())


def _array(value: Any, _: _Budget | None) -> str:
    kind = value.dtype
    about = f"{kind.name} {list(value.shape)}"
    if kind.hasobject:
        return about
    if value.size == 1:
        return repr(value.item())
    if not value.flags.c_contiguous:
        return f"{about} crc {zlib.crc32(value.flat[:SCATTERED_READ].tobytes()):08x}"
    size = min(int(value.nbytes), BYTES_READ)
    return f"{about} crc {zlib.crc32(ctypes.string_at(value.__array_interface__['data'][0], size)):08x}"


def _tensor(value: Any, _: _Budget | None) -> str:
    torch = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        kind = repr(value.dtype).replace("torch.", "")
        shape, device = list(value.shape), value.device.type
        about = f"{kind} {shape}" if device == "cpu" else f"{kind} {shape} {device}"
        if device != "cpu" or value.layout is not torch.strided:
            return about
        width = value.element_size()
        size = value.numel() * width
        start, storage = value.data_ptr(), value.untyped_storage()
        end = value.storage_offset() * width + size
        offsets = [] if value.is_contiguous() else _offsets(shape, value.stride())
        if offsets:
            end = value.storage_offset() * width + (max(offsets) + 1) * width
        if not start or not size or end > storage.nbytes() or value.is_conj() or value.is_neg():
            return about
    if offsets:
        data = b"".join(ctypes.string_at(start + offset * width, width) for offset in offsets)
    else:
        data = ctypes.string_at(start, min(size, BYTES_READ))
    if len(data) == size and (size == _NUMBERS.get(kind, _NO_NUMBER).size):
        return repr(_NUMBERS[kind].unpack(data)[0])
    if kind == "bfloat16" and size == 2:
        return repr(struct.unpack("<f", b"\0\0" + data)[0])
    return f"{about} crc {zlib.crc32(data):08x}"


def _offsets(shape: list[int], strides: tuple[int, ...]) -> list[int]:
    """Return the offsets of the first elements of a tensor in its memory, in elements, in the order of the indices."""
    offsets = [0]
    for count, stride in zip(reversed(shape), reversed(strides)):
        outer = (index * stride + inner for index in range(count) for inner in offsets)
        offsets = list(itertools.islice(outer, SCATTERED_READ))
    return offsets


_NO_NUMBER = struct.Struct("")
_NUMBERS = {
    "float32": struct.Struct("<f"), "float64": struct.Struct("<d"), "float16": struct.Struct("<e"),
    "int64": struct.Struct("<q"), "int32": struct.Struct("<i"), "int16": struct.Struct("<h"),
    "int8": struct.Struct("<b"), "uint8": struct.Struct("<B"), "bool": struct.Struct("<?"),
}  # fmt: skip


def is_tensor(value: Any) -> bool:
    """Return whether a value is exactly a Tensor or Parameter of torch."""
    return _known(type(value))[1] is _tensor


def tensor_shape(value: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype of a tensor."""
    with sys.modules["torch"]._C.DisableTorchFunction():
        return tuple(value.shape), repr(value.dtype).replace("torch.", "")


def _member(value: Any, _: _Budget | None) -> str:
    """Return the name of a member of an enumeration."""
    name = attribute(value, "_name_")
    return name if type(name) is str else ""


_Known = tuple[str, "Reader | None", bool, bool, type]  # name, reader, is mutable, is code, the type itself
_known_types: dict[int, _Known] = {}
_kind: Any
for _kind, _reader in (
    (int, _integer), (bool, _plain), (float, _plain), (complex, _plain), (type(None), _plain), (type(...), _plain),
    (range, _plain), (slice, _plain), (str, _string), (bytes, _string), (tuple, _sequence), (frozenset, _sequence),
):  # fmt: skip
    _known_types[id(_kind)] = (_kind.__name__, _reader, False, False, _kind)
for _kind, _reader in (
    (list, _sequence), (set, _sequence), (bytearray, _string), (collections.deque, _sequence), (dict, _mapping),
    (collections.OrderedDict, _mapping), (collections.defaultdict, _mapping), (collections.Counter, _mapping),
):  # fmt: skip
    _known_types[id(_kind)] = (_kind.__name__, _reader, True, False, _kind)

# Types of modules that may be imported later: module, name, reader, whether the value can change.
_LATER: tuple[tuple[str, str, Reader, bool], ...] = (
    ("torch", "Tensor", _tensor, True),
    ("torch.nn.parameter", "Parameter", _tensor, True),
    ("torch.nn.parameter", "Buffer", _tensor, True),
    ("torch", "Size", _sequence, False),
    ("torch", "dtype", _plain, False),
    ("torch", "device", _plain, False),
    ("torch", "Generator", _generator_state, True),
    ("random", "Random", _random_state, True),
    ("pathlib", "PosixPath", _path, False),
    ("numpy", "ndarray", _array, True),
    ("numpy.random", "Generator", _numpy_generator, True),
    *(
        ("numpy", name, _numpy_scalar, False)
        for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool_")
    ),
)


def _known(kind: type) -> _Known:
    known = _known_types.get(id(kind))
    if known is None:
        if len(_known_types) >= TYPES_LIMIT:
            for number in list(_known_types)[TYPES_LIMIT // 2 :]:
                _known_types.pop(number, None)
        reader, is_mutable = _reader_for(kind)
        is_program = any(kind is other for other in _CODE_TYPES) or issubclass(kind, type)
        known = _known_types[id(kind)] = (type_name(kind), reader, is_mutable, is_program, kind)
    return known


def _reader_for(kind: type) -> tuple[Reader | None, bool]:
    """Return the reader for a type, if it has one, and whether its instances can change."""
    for module_name, name, reader, is_mutable in _LATER:
        module = sys.modules.get(module_name)
        if type(module) is types.ModuleType and module_namespace(module).get(name) is kind:
            return reader, is_mutable
    if any(base is enum.Enum for base in bases_of(kind)):
        return _member, False
    return None, True
