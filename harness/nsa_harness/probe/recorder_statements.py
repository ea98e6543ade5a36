"""Divides a source file into statements, with the names that each of them uses and assigns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from .values import Path, path_of

NAMES_LIMIT = 24  # names that one statement reads or assigns
SOURCE_LIMIT = 4 << 20  # bytes of a source file
# Parts of the names of functions that draw from a random generator or seed one.
_DRAWING = (
    "rand", "seed", "shuffle", "sample", "choice", "normal", "uniform", "permutation", "multinomial", "bernoulli",
    "dropout", "rng", "generator", "init_", "gauss", "beta", "exponential", "poisson",
)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPOUND = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor, ast.While, ast.If, ast.With,
    ast.AsyncWith, ast.Try, *((vars(ast)["TryStar"],) if hasattr(ast, "TryStar") else ()),
    *((vars(ast)["Match"],) if hasattr(ast, "Match") else ()),
)  # fmt: skip


class Statement:
    """A statement of the program, with what is known of its executions. A compound statement is only its header."""

    __slots__ = (
        "calls", "can_draw", "count", "draws", "in_handler", "is_capped", "is_cleanup", "line", "reads",
        "shows_locals", "writes",
    )  # fmt: skip

    def __init__(self, line: int) -> None:
        self.line = line
        self.reads: list[Path] = []
        self.writes: list[Path] = []
        self.count = 0  # executions so far
        self.calls = False  # it contains a call, or it is the header of a loop
        self.can_draw = False  # it contains a name that says that it draws random numbers
        self.draws = False  # an execution changed a generator
        self.in_handler = False  # it is in the body of an `except` block
        self.shows_locals = False  # it calls locals() or vars()
        self.is_capped = False  # it ran so often that its executions are no longer recorded
        self.is_cleanup = False  # an exception that nothing has handled may pass it


def statements_of(source: bytes) -> dict[int, Statement]:
    """Return the statement at each line of a source file. Raise SyntaxError or ValueError if it cannot be parsed."""
    if len(source) > SOURCE_LIMIT:
        raise ValueError("the file is too large")
    table: dict[int, Statement] = {}
    _add(ast.parse(source).body, table, in_handler=False, is_cleanup=False)
    return table


def _add(body: list[Any], table: dict[int, Statement], *, in_handler: bool, is_cleanup: bool) -> None:
    for node in body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        last = node.end_lineno
        if isinstance(node, _COMPOUND):
            inner = [part for part in _bodies(node) if part[0]]
            last = max(first, min([last + 1, *(_first_line(part[0][0]) for part in inner)]) - 1)
        statement = _statement(node, first, last, table)
        statement.in_handler |= in_handler
        statement.is_cleanup |= is_cleanup or isinstance(node, (ast.With, ast.AsyncWith, ast.Try))
        if isinstance(node, _COMPOUND):
            scope = isinstance(node, _SCOPES)
            for part, kind in inner:
                head = part[0]
                if isinstance(head, ast.ExceptHandler) or type(head).__name__ == "match_case":
                    for case in part:
                        _add_case(case, table, in_handler=in_handler, is_cleanup=is_cleanup)
                else:
                    _add(
                        part,
                        table,
                        in_handler=in_handler and not scope,
                        is_cleanup=(is_cleanup and not scope) or kind == "finalbody",
                    )


def _bodies(node: Any) -> Iterator[tuple[list[Any], str]]:
    for kind in ("body", "handlers", "cases", "orelse", "finalbody"):
        yield getattr(node, kind, []), kind


def _add_case(case: Any, table: dict[int, Statement], *, in_handler: bool, is_cleanup: bool) -> None:
    """Add an `except` clause, or a case of a `match` statement, and its body."""
    is_handler = isinstance(case, ast.ExceptHandler)
    first = _first_line(case)
    statement = _statement(case, first, max(first, _first_line(case.body[0]) - 1), table)
    statement.in_handler |= in_handler
    statement.is_cleanup |= is_cleanup or is_handler
    _add(case.body, table, in_handler=in_handler or is_handler, is_cleanup=is_cleanup)


def _first_line(node: Any) -> int:
    if type(node).__name__ == "match_case":
        node = node.pattern
    return int(min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]))


def _statement(node: Any, first: int, last: int, table: dict[int, Statement]) -> Statement:
    """Return the statement for a node. Several statements in one line are one statement."""
    statement = table.get(first)
    if statement is None:
        statement = Statement(first)
    for line in range(first, last + 1):
        table.setdefault(line, statement)
    reads = {path.name: path for path in statement.reads}
    writes = {path.name: path for path in statement.writes}
    for part in _header(node):
        _collect(part, statement, reads, writes)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
        writes.setdefault(node.name, Path(node.name, node.name, ()))
    statement.reads, statement.writes = list(reads.values())[:NAMES_LIMIT], list(writes.values())[:NAMES_LIMIT]
    statement.calls |= isinstance(node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith))
    return statement


def _header(node: Any) -> Iterator[ast.AST]:
    """Yield the expressions of a statement that it evaluates itself."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from (*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one))
    elif isinstance(node, ast.ClassDef):
        yield from (*node.decorator_list, *node.bases, *node.keywords)
    elif isinstance(node, _COMPOUND) or type(node).__name__ in ("ExceptHandler", "match_case"):
        for name in ("target", "iter", "test", "subject", "type", "pattern", "guard"):
            if isinstance(part := getattr(node, name, None), ast.AST):
                yield part
        yield from getattr(node, "items", ())
    else:
        yield node


def _collect(node: ast.AST, statement: Statement, reads: dict[str, Path], writes: dict[str, Path]) -> None:
    """Add the names in an expression, a target or a simple statement. Lambdas have their own variables."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.AugAssign):
        _add_path(node.target, reads)
    if isinstance(node, ast.Call):
        statement.calls = True
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        statement.shows_locals |= name in ("locals", "vars") and not node.args
        statement.can_draw |= any(part in name.lower() for part in _DRAWING)
        _add_path(node, reads)
    elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        is_target = isinstance(node.ctx, ast.Store)
        _add_path(node, writes if is_target else reads)
        if is_target and isinstance(node, ast.Subscript):
            _add_path(node.value, writes)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        statement.calls = True
        for alias in node.names:
            name = (alias.asname or alias.name).partition(".")[0]
            writes.setdefault(name, Path(name, name, ()))
    for child in ast.iter_child_nodes(node):
        _collect(child, statement, reads, writes)


def _add_path(node: ast.AST, paths: dict[str, Path]) -> None:
    path = path_of(node)
    if path is not None:
        paths.setdefault(path.name, path)
