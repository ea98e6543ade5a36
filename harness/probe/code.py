"""Lines of a function that read, make or change something, told from its bytecode: no source file is opened."""

from __future__ import annotations

import dis

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_SHIFTS = ("COPY", "SWAP", "ROT_TWO", "ROT_THREE", "DUP_TOP_TWO", "CACHE")
_NO_TENSOR = frozenset({"requires_grad_"})  # ends as the in-place methods do, and changes no value


def line_that_loads(code: CodeType, attribute: str) -> int | None:
    """The first line that reads `.attribute`, in this function or one written inside it."""
    return next((line for line, one in _lines(code) if one.opname in _LOADS and one.argval == attribute), None)


def line_that_makes(code: CodeType, attribute: str) -> int | None:
    """The last line that sets `.attribute`: what stands there in the end."""
    found = [line for line, one in _lines(code) if one.opname == "STORE_ATTR" and one.argval == attribute]
    return found[-1] if found else None


def speaks_of_checkpoints(code: CodeType) -> bool:
    """It calls something by the name of a checkpoint: torch's own, however imported."""
    return any("checkpoint" in name for name in code.co_names)


def in_place_lines(code: CodeType, saved: str) -> Iterator[tuple[int, bool]]:
    """(line, whether it changes what the operation `saved` computed), in the order of the code.

    In place are methods that end in an underscore, `x += y`, and `x[i] = y`; a whole number added is a counter.
    """
    from_saved: set[str] = set()
    for line, statement in _statements(code):
        target, stored = _changed(statement), [str(one.argval) for one in statement if one.opname in _STORES]
        if target is not None:
            yield line, target in from_saved
        elif saved and any(_is_named(str(one.argval), saved) for one in statement if one.argval is not None):
            from_saved.update(stored)


def _changed(statement: list[dis.Instruction]) -> str | None:
    """The variable whose tensor the statement changes in place; "" where it is no plain variable."""
    for number, one in enumerate(statement):
        if one.opname in _LOADS and _is_in_place(str(one.argval)):
            return _loaded(statement[:number][-1:])
        if one.opname == "STORE_SUBSCR":
            return _loaded([it for it in statement[:number] if it.opname in _LOCALS][-2:][:1])
        if _is_augmented(one) and not any(isinstance(it.argval, int) for it in statement[:number][-1:]):
            after = [it for it in statement[number + 1 :] if it.opname not in _SHIFTS][:1]
            if after and after[0].opname in _STORES:
                return str(after[0].argval)
    return None


def _is_augmented(one: dis.Instruction) -> bool:
    return one.opname.startswith("INPLACE_") or (one.opname == "BINARY_OP" and one.argrepr.endswith("="))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and name not in _NO_TENSOR


def _is_named(name: str, saved: str) -> bool:
    return name.lower().replace("_", "") == saved


def _loaded(instructions: list[dis.Instruction]) -> str:
    return str(instructions[0].argval) if instructions and instructions[0].opname in _LOCALS else ""


def _lines(code: CodeType) -> Iterator[tuple[int, dis.Instruction]]:
    starts = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        line = starts.get(one.offset) or line
        yield line, one
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _lines(constant)


def _statements(code: CodeType) -> Iterator[tuple[int, list[dis.Instruction]]]:
    """Instructions in a row that belong to one line."""
    line, statement = 0, list[dis.Instruction]()
    for number, one in _lines(code):
        if number != line and statement:
            yield line, statement
            statement = []
        line = number
        statement.append(one)
    if statement:
        yield line, statement
