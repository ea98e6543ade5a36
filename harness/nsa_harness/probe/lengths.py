"""Finds out whether a `__len__` of the program only returns an attribute, so that it need not be run."""

from __future__ import annotations

import dis
from types import CodeType

_PLAIN = frozenset({"RESUME", "PRECALL", "CACHE", "PUSH_NULL", "NOP", "NOT_TAKEN", "COPY_FREE_VARS"})
_LOADS = frozenset({
    "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_ATTR", "LOAD_GLOBAL", "CALL", "CALL_FUNCTION", "RETURN_VALUE",
})  # fmt: skip
_INSTRUCTIONS = 8


def attribute_returned(code: CodeType) -> tuple[bool, list[str]]:
    """Return whether code such as `return len(self.items)` returns a length, and the names that lead to it."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PLAIN]
    if len(instructions) > _INSTRUCTIONS or any(each.opname not in _LOADS for each in instructions):
        return False, []
    loaded = [str(each.argval) for each in instructions if each.opname.startswith("LOAD_")]
    takes_length = loaded[:1] == ["len"]
    names = loaded[takes_length:]
    calls = sum(each.opname.startswith("CALL") for each in instructions)
    is_plain = names[:1] == list(code.co_varnames[:1]) and "len" not in names and calls == takes_length
    return takes_length, names[1:] if is_plain else []
