"""Reads the attributes and items of objects without running any code of the program."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
from typing import Any

MISSING: Any = object()
KEYS_LIMIT = 256  # keys of a dict in which one is looked up; all of them are checked first
TYPES_LIMIT = 4096  # types that are remembered

bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__  # T.__mro__ would ask the metaclass
_namespace: Callable[[type], Any] = vars(type)["__dict__"].__get__
module_namespace: Callable[[Any], Any] = vars(types.ModuleType)["__dict__"].__get__
_FROM_C = (types.GetSetDescriptorType, types.MemberDescriptorType)
_FIELD = type(collections.namedtuple("_Field", "x").x)  # type: ignore[attr-defined]
_PLAIN_LOOKUPS = tuple(
    vars(kind)["__getattribute__"]
    for kind in (
        object,
        tuple,
        list,
        dict,
        set,
        int,
        float,
        str,
        BaseException,
        types.ModuleType,
        types.SimpleNamespace,
    )
    if "__getattribute__" in vars(kind)
)


def attribute(value: Any, name: str) -> Any:
    """Return an attribute of an object, or MISSING if it does not exist or reading it would run code."""
    kind = type(value)
    if issubclass(kind, type):
        return _class_attribute(value, name)
    shape = _shape(kind)
    if not shape.is_plain:
        return MISSING
    for base in bases_of(kind):
        inherited = _namespace(base).get(name, MISSING)
        if inherited is not MISSING:
            break
    else:
        inherited = MISSING
    if inherited is not MISSING:
        how = type(inherited)
        if how is types.MemberDescriptorType or how is _FIELD:
            try:
                return inherited.__get__(value, kind)
            except (AttributeError, TypeError):
                return MISSING
        if _defines(how, "__set__") or _defines(how, "__delete__"):
            return MISSING
    attributes = shape.attributes(value)
    found = _look_up(attributes, name)
    if found is not MISSING:
        return found
    if inherited is not MISSING:
        return MISSING if _defines(type(inherited), "__get__") else inherited
    if shape.is_torch_module:
        for part in ("_parameters", "_buffers", "_modules"):
            found = _look_up(_look_up(attributes, part), name)
            if found is not MISSING:
                return found
    return MISSING


def _class_attribute(value: Any, name: str) -> Any:
    if any(_namespace(base).get(name, MISSING) is not MISSING for base in bases_of(type(value))[:-2]):
        return MISSING
    for base in bases_of(value):
        found = _namespace(base).get(name, MISSING)
        if found is not MISSING:
            return MISSING if _defines(type(found), "__get__") else found
    return MISSING


def item(value: Any, key: Any) -> Any:
    """Return an item of a list, tuple or dict of Python, or MISSING."""
    kind, how = type(value), type(key)
    if (kind is list or kind is tuple) and how is int and -len(value) <= key < len(value):
        return value[key]
    if kind is dict or kind is collections.OrderedDict or kind is collections.defaultdict:
        return _look_up(value, key) if how is str or how is int else MISSING
    return MISSING


def _look_up(items: Any, key: Any) -> Any:
    """Return an item of a dict. A key of a type of the program might define how keys are compared."""
    kind = type(items)
    if kind is not dict and kind is not collections.OrderedDict and kind is not collections.defaultdict:
        return MISSING
    if len(items) > KEYS_LIMIT:
        return MISSING
    for other, found in dict.items(items):
        if other is key:
            return found
    if all(_is_plain_key(type(other)) for other in dict.keys(items)):
        return dict.get(items, key, MISSING)
    return MISSING


def _is_plain_key(kind: type) -> bool:
    return kind is str or kind is int or kind is float or kind is bytes or kind is bool or kind is type(None)


# Types.


class _Shape:
    """What is known about the instances of a type: where their attributes are."""

    __slots__ = ("attributes_getter", "is_plain", "is_torch_module", "kind")

    def __init__(self, kind: type) -> None:
        self.kind = kind  # the reference keeps the id of the type valid
        self.is_plain = any(_first(kind, "__getattribute__") is plain for plain in _PLAIN_LOOKUPS)
        getter = _first(kind, "__dict__")
        self.attributes_getter = getter if any(type(getter) is other for other in _FROM_C) else None
        module = sys.modules.get("torch.nn.modules.module")
        self.is_torch_module = (
            type(module) is types.ModuleType
            and _first(kind, "__getattr__") is vars(module_namespace(module)["Module"])["__getattr__"]
        )

    def attributes(self, value: Any) -> Any:
        if self.attributes_getter is None:
            return MISSING
        try:
            return self.attributes_getter.__get__(value, self.kind)
        except (AttributeError, TypeError):
            return MISSING


def _shape(kind: type) -> _Shape:
    shape = _shapes.get(id(kind))
    if shape is None:
        if len(_shapes) >= TYPES_LIMIT:
            _shapes.clear()
        shape = _shapes[id(kind)] = _Shape(kind)
    return shape


_shapes: dict[int, _Shape] = {}  # by the id of the type: the hash of a type is up to its metaclass


def _first(kind: type, name: str) -> Any:
    """Return what the first class of the method resolution order that has this name has under it."""
    for base in bases_of(kind):
        found = _namespace(base).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def _defines(kind: type, name: str) -> bool:
    return _first(kind, name) is not MISSING
