"""Find the statements of a program's source by line, to see what an experiment or a patch can change there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nsa_harness.core.report import Place

LOOPS = (ast.For, ast.AsyncFor, ast.While)
Path = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, and the statements that contain it, outermost first."""

    node: ast.stmt
    parents: tuple[ast.AST, ...]

    @property
    def header_end(self) -> int:
        """The last line of the statement, or of its header if it contains other statements."""
        body = getattr(self.node, "body", None)
        if isinstance(body, list) and body:
            return max(self.node.lineno, min(first_line(body[0]) - 1, self.node.end_lineno or 0))
        return self.node.end_lineno or self.node.lineno

    @property
    def loop(self) -> ast.For | ast.AsyncFor | ast.While | None:
        """The innermost loop around the statement, within the same function."""
        for parent in reversed(self.parents):
            if isinstance(parent, LOOPS):
                return parent
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                return None
        return None

    def assigns(self, name: str) -> bool:
        """Return whether the statement itself gives this name or attribute a value."""
        return any(target == name for target in _targets(self.node))


def statement_at(place: Place | None, sources: Mapping[str, str]) -> Statement | None:
    """Return the statement that contains this line, or None if it is unknown."""
    if place is None or place.file is None or place.line is None or place.file not in sources:
        return None
    return _statements(sources[place.file]).get(place.line)


def except_clause(place: Place, sources: Mapping[str, str]) -> ast.ExceptHandler | None:
    """Return the innermost `except` clause around a line, or None if there is none."""
    line, text = place.line or 0, sources.get(place.file or "", "")
    tries = {parent for statement in _statements(text).values() for parent in (*statement.parents, statement.node)}
    clauses = [clause for node in tries if isinstance(node, ast.Try) for clause in node.handlers]
    around = [clause for clause in clauses if clause.lineno <= line <= (clause.end_lineno or 0)]
    return max(around, key=lambda clause: clause.lineno, default=None)


def called_names(statement: Statement | None) -> Iterator[str]:
    """Yield the names of the functions and methods that a statement itself calls, in lower case."""
    for node in ast.walk(statement.node) if statement is not None else ():
        if isinstance(node, ast.Call) and node.lineno <= (statement.header_end if statement else 0):
            yield ast.unparse(node.func).rpartition(".")[2].lower()


def first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def path_of(name: str) -> Path:
    """Return the steps of a name such as "self.bad" or "state['step']", or () if its value cannot be replaced."""
    try:
        return _path(ast.parse(name, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _path(node: ast.expr) -> Path:
    match node:
        case ast.Name(id=name):
            return (("name", name),)
        case ast.Attribute(value=value, attr=name) if base := _path(value):
            return (*base, ("attribute", name))
        case ast.Subscript(value=value, slice=ast.Constant(value=int() | str() as key)) if base := _path(value):
            return (*base, ("item", key))
        case ast.Subscript(value=value, slice=ast.Name(id=key)) if base := _path(value):
            return (*base, ("item of", key))
    return ()


@lru_cache(maxsize=64)
def _statements(text: str) -> dict[int, Statement]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[int, Statement] = {}
    for statement in _all_statements(tree, ()):
        for line in range(first_line(statement.node), statement.header_end + 1):
            found.setdefault(line, statement)  # the outer one of several in one line
    return found


def _all_statements(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Statement]:
    """Yield every statement, an outer statement before the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield Statement(child, parents)
            yield from _all_statements(child, (*parents, child))
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _all_statements(child, (*parents, child))


def _targets(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Assign(targets=targets):
            pass
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
            targets = [target]
        case _:
            return
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                yield ast.unparse(part)
