"""Find collectives whose result nothing uses, and conditions that skipped a collective on all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from nsa_harness.core.recording.recording import Execution
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace

_IN_PLACE = ("all_reduce", "broadcast")  # collectives that write their result into their first argument
_EQUALIZE = frozenset({
    *_IN_PLACE, "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce_coalesced",
    "broadcast_object_list", "reduce_scatter_tensor",
})  # fmt: skip
# Reading these attributes of a tensor does not use its values.
_SIZES = ("shape", "dtype", "device", "ndim", "numel", "element_size", "size", "dim", "nbytes", "itemsize")
_COPIES = ("clone", "deepcopy", "cat", "stack", "parameters_to_vector")
# These return their own tensor if it already has the requested type and layout.
_MAY_COPY = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
_EXECUTIONS = 50  # executions of a statement that are inspected


def discarded_results(trace: Trace, statements: Statements) -> Iterator[tuple[int, str]]:
    """Yield the first execution of each collective on a copy that nothing uses afterwards, and the name of the copy."""
    executed = {_line(trace, execution) for execution in range(len(trace.executions))}
    lines = set()
    for made, owner in zip(trace.communications, trace.owners, strict=True):
        place = trace.place(owner)
        if made.operation not in _IN_PLACE or (place.file, place.line) in lines:
            continue
        lines.add((place.file, place.line))
        statement, function = statements.at(place), statements.function_around(place)
        name = _argument(statement)
        if statement is None or function is None or not name:
            continue
        assigned = _assignment_before(function, statement, name)
        if assigned is None:
            continue
        reading = [line for line in _lines_reading(function, name) if not assigned.lineno <= line <= _end(statement)]
        if any((place.file, line) in executed for line in reading):
            continue
        if _always_copies(assigned.value) or _has_copied(trace, owner, assigned, name):
            yield owner, name


def skipped_collectives(trace: Trace, statements: Statements, executions: Sequence[int]) -> Iterator[int]:
    """Yield each condition that skipped a collective in all its executions, in the functions of these executions."""
    headers = statements.headers_around(_EQUALIZE)
    executed = {_line(trace, execution) for execution in range(len(trace.executions))}
    activations = dict.fromkeys(trace.activation_of[execution] for execution in executions)
    lines = set()
    for activation in activations:
        for member in trace.members[activation]:
            line = _line(trace, member)
            if line not in headers or line in lines or not isinstance(statements.at(trace.place(member)), ast.If):
                continue
            lines.add(line)
            first, last = headers[line]
            if not any((line[0], inside) in executed for inside in range(first, last + 1)):
                yield member


def _line(trace: Trace, execution: int) -> tuple[str, int]:
    return trace.activations[trace.activation_of[execution]].file, trace.executions[execution].line


def _argument(statement: ast.AST | None) -> str:
    """Return the variable that a statement passes to the collective it consists of, or ""."""
    match statement:
        case ast.Expr(value=ast.Call(args=[ast.Name(id=name), *_])):
            return name
    return ""


def _assignment_before(function: ast.AST, statement: ast.AST, name: str) -> ast.Assign | None:
    """Return the assignment of a variable that precedes the statement in the same block, or None."""
    for node in ast.walk(function):
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and statement in block:
                before = [each for each in block[: block.index(statement)] if _assigns(each, name)]
                return before[-1] if before and isinstance(before[-1], ast.Assign) else None
    return None


def _assigns(statement: ast.AST, name: str) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)]):
            return target == name
    return False


def _end(statement: ast.AST) -> int:
    return getattr(statement, "end_lineno", None) or 0


def _lines_reading(function: ast.AST, name: str) -> set[int]:
    """Return the first lines of the statements of a function that read the values of a variable."""
    sizes = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr in _SIZES}
    statement_of: dict[int, int] = {}  # by node: the first line of the innermost statement around it
    for statement in ast.walk(function):
        if isinstance(statement, ast.stmt):
            statement_of |= {id(node): statement.lineno for node in ast.walk(statement)}
    return {
        statement_of[id(node)]
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and id(node) not in sizes
        and id(node) in statement_of
    }


def _always_copies(value: ast.AST) -> bool:
    return isinstance(value, ast.BinOp) or _function(value) in _COPIES


def _function(value: ast.AST) -> str:
    match value:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
    return ""


def _has_copied(trace: Trace, owner: int, assigned: ast.Assign, name: str) -> bool:
    """Return whether an assignment by a conversion gave a tensor of another type than the one that it read."""
    if _function(assigned.value) not in _MAY_COPY:
        return False
    members = trace.members[trace.activation_of[owner]]
    made = [trace.executions[at] for at in members if trace.executions[at].line == assigned.lineno][:_EXECUTIONS]
    return any(_changes_type(execution, name) for execution in made)


def _changes_type(execution: Execution, name: str) -> bool:
    written = {_dtype(value.text) for target, value in execution.writes if target == name}
    read = {_dtype(value.text) for _, value in execution.reads if value.type in ("Tensor", "Parameter")}
    return "" not in written and bool(written) and bool(read - {""}) and written.isdisjoint(read)


def _dtype(text: str) -> str:
    """Return the dtype with which the text of a tensor begins, such as "float32", or "" for a single number."""
    first, _, rest = text.partition(" ")
    return first if rest.startswith("[") else ""
