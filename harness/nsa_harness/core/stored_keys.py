"""Store the fields of dataclasses under JSON keys that differ from the field names.

Stored files stay readable for years: a field may be renamed, but its key stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict

T = TypeVar("T")


def stored_as(**keys: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that stores dataclass fields under other JSON keys, given as `field="key"`."""

    def decorate(dataclass_type: type[T]) -> type[T]:
        config = ConfigDict(alias_generator=lambda name: keys.get(name, name))
        setattr(dataclass_type, "__pydantic_config__", config)  # noqa: B010  (mypy does not know the attribute)
        setattr(dataclass_type, "__stored_keys__", keys)  # noqa: B010
        return dataclass_type

    return decorate


def stored_in_form(**forms: Callable[[Any], Any]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that stores dataclass fields in another form, given as `field=function`."""

    def decorate(dataclass_type: type[T]) -> type[T]:
        setattr(dataclass_type, "__stored_forms__", forms)  # noqa: B010
        return dataclass_type

    return decorate


def stored_keys(dataclass_type: type) -> Mapping[str, str]:
    """Map the name of each field of a dataclass to its JSON key."""
    keys: Mapping[str, str] = getattr(dataclass_type, "__stored_keys__", {})
    return {field.name: keys.get(field.name, field.name) for field in fields(dataclass_type)}


def to_stored(value: Any) -> Any:
    """Return a copy of `value` in which each dataclass is replaced by a dict with its JSON keys."""
    if is_dataclass(value) and not isinstance(value, type):
        forms: Mapping[str, Callable[[Any], Any]] = getattr(type(value), "__stored_forms__", {})
        return {
            key: to_stored(forms[name](getattr(value, name)) if name in forms else getattr(value, name))
            for name, key in stored_keys(type(value)).items()
        }
    if isinstance(value, dict):
        return {key: to_stored(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_stored, value))
    if isinstance(value, list | tuple):
        return type(value)(map(to_stored, value))
    return value
