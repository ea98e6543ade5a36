"""Finds the length of an object of the program whose `__len__` only reads an attribute, without running that code."""

from __future__ import annotations

import dis
from types import CodeType, FunctionType
from typing import Any

from .values import MISSING, _first, attribute, length

_PLAIN = frozenset({"RESUME", "PRECALL", "CACHE", "PUSH_NULL", "NOP", "NOT_TAKEN", "COPY_FREE_VARS"})
_LOADS = frozenset({
    "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_ATTR", "LOAD_GLOBAL", "CALL", "CALL_FUNCTION", "RETURN_VALUE",
})  # fmt: skip
_INSTRUCTIONS = 8


def own_length(value: Any) -> Any:
    """Return what the `__len__` of an object returns, or MISSING.

    Its code is not run, so it must be as simple as `return self.n` or `return len(self.items)`.
    """
    method = _first(type(value), "__len__")
    if type(method) is not FunctionType:
        return MISSING
    takes_length, names = _attribute_returned(method.__code__)
    if not names or (takes_length and "len" in method.__globals__):
        return MISSING
    for name in names:
        value = attribute(value, name)
    if takes_length:
        return MISSING if value is MISSING else length(value)
    return value if type(value) is int else MISSING


def _attribute_returned(code: CodeType) -> tuple[bool, list[str]]:
    """Return whether the code returns the length of an attribute of `self`, and the names that lead to it.

    There are no names if the code does anything else than return an attribute or its length.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PLAIN]
    if len(instructions) > _INSTRUCTIONS or any(each.opname not in _LOADS for each in instructions):
        return False, []
    loaded = [str(each.argval) for each in instructions if each.opname.startswith("LOAD_")]
    takes_length = loaded[:1] == ["len"]
    names = loaded[takes_length:]
    calls = sum(each.opname.startswith("CALL") for each in instructions)
    is_plain = names[:1] == list(code.co_varnames[:1]) and "len" not in names and calls == takes_length
    return takes_length, names[1:] if is_plain else []
