"""Pickled plain values, read without running anything: what torch writes to a file is data, whoever wrote it.

pickle.loads calls what the bytes name, and its C machine reserves memory for any memo index. This machine knows dicts,
lists, tuples, texts, numbers, truth and None; the first other instruction ends it.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any

_MAX_INSTRUCTIONS = 4_000_000  # a full recorder of 2000 entries with frames has about 500 000
_VALUES = frozenset({
    "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
})  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SILENT = frozenset({"PROTO", "FRAME"})


def plain_value(data: bytes) -> Any:
    """The one value in `data`. Raises ValueError with the byte at which it is no plain value; never calls anything."""
    machine = _Machine()
    at: int | None = 0
    try:
        for count, (instruction, argument, position) in enumerate(pickletools.genops(io.BytesIO(data))):
            at = position
            if count >= _MAX_INSTRUCTIONS:
                raise ValueError(f"more than {_MAX_INSTRUCTIONS} instructions")
            if instruction.name == "STOP":
                return machine.result()
            machine.step(instruction.name, argument)
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"byte {at} of {len(data)}: {error}") from error
    raise ValueError(f"byte {len(data)} of {len(data)}: the value does not end")


class _Machine:
    """The stack of an unpickler. `_marks` are the depths at which collections under construction begin."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[], None]] = {
            "MARK": self._mark,
            "SETITEM": lambda: self._set_items(self._pop(2)),
            "SETITEMS": lambda: self._set_items(self._to_mark()),
            "APPEND": lambda: self._append(self._pop(1)),
            "APPENDS": lambda: self._append(self._to_mark()),
            "TUPLE": lambda: self._stack.append(tuple(self._to_mark())),
            "TUPLE1": lambda: self._stack.append(tuple(self._pop(1))),
            "TUPLE2": lambda: self._stack.append(tuple(self._pop(2))),
            "TUPLE3": lambda: self._stack.append(tuple(self._pop(3))),
            "EMPTY_DICT": lambda: self._stack.append({}),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "MEMOIZE": lambda: self._remember(len(self._memo)),
        }

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._remember(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name in self._steps:
            self._steps[name]()
        elif name not in _SILENT:
            raise ValueError(f"{name} is no instruction for plain values")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise ValueError(f"{len(self._stack)} values where one is expected")
        return self._stack[0]

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError(f"{count} values are needed, {len(self._stack)} are there")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        depth = self._marks.pop()
        items = self._stack[depth:]
        del self._stack[depth:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items are set on what is no dict")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError("values are appended to what is no list")
        target.extend(items)
