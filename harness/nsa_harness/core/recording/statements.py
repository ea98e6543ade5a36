"""Look up the statements of the recorded program in its source code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from functools import cache
from itertools import takewhile

from nsa_harness.core.recording.trace import Trace
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import parse_python

_NEAR = 2  # lines
_MAX_TEXT = 200  # longest source text of a statement


class Statements:
    """The statements of source files, by file and first line. `sources` has the text of each file by its path."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._by_line = cache(self._parse)

    def at(self, place: Place) -> ast.AST | None:
        """Return the statement, `except` clause or case that begins on the line, or None if the source is not known."""
        return self._by_line(place.file or "").get(place.line or 0)

    def function_around(self, place: Place) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the innermost function that contains the statement on the line, or None at the top of a module."""
        line = place.line or 0
        around = [
            node
            for node in self._by_line(place.file or "").values()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno < line <= (node.end_lineno or 0)
        ]
        return max(around, key=lambda node: node.lineno, default=None)

    def header(self, place: Place) -> str:
        """Return the source text of the statement. For a compound statement, it is the part that decides."""
        statement = self.at(place)
        match statement:
            case None:
                return ""
            case ast.If() | ast.While():
                part: ast.AST = statement.test
            case ast.For() | ast.AsyncFor():
                part = statement.iter
            case ast.Match():
                part = statement.subject
            case ast.With() | ast.AsyncWith():
                return ", ".join(ast.unparse(item) for item in statement.items)[:_MAX_TEXT]
            case ast.ExceptHandler():
                return "" if statement.type is None else ast.unparse(statement.type)
            case ast.match_case():
                part = statement.pattern
            case ast.Try() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return ""
            case _:
                part = statement
        return ast.unparse(part)[:_MAX_TEXT]

    def end_of_handler(self, trace: Trace, execution: int) -> tuple[int, ...]:
        """Return the last execution in the handler of the exception that left this execution, if it is known."""
        members = trace.members[trace.activation_of[execution]]
        following = members[trace.position[execution] + 1 :]
        handler = self.at(trace.place(following[0])) if following else None
        if not isinstance(handler, ast.ExceptHandler):
            return ()
        last = handler.end_lineno or 0
        inside = takewhile(lambda e: handler.lineno <= trace.executions[e].line <= last, following)
        return tuple(inside)[-1:]

    def near(self, place: Place, other: Place) -> bool:
        """Return whether two lines are near to each other, or in the same simple statement."""
        first, second = sorted((place, other), key=lambda one: one.line or 0)
        statement = self.at(first)
        end = (first.line or 0) + _NEAR
        if isinstance(statement, ast.stmt) and not hasattr(statement, "body"):
            end = max(end, statement.end_lineno or 0)
        return place.file == other.file and (second.line or 0) <= end

    def line_of_call(self, place: Place, function: str) -> int:
        """Return the line of the only call of a function in a statement, or the first line of the statement."""
        statement, name = self.at(place), function.rpartition(".")[2]
        calls = [node for node in ast.walk(statement) if _name(node) == name] if statement is not None else []
        lines = {node.func.end_lineno for node in calls if isinstance(node, ast.Call)}
        return (lines.pop() if len(lines) == 1 else None) or place.line or 0

    def leading_to(self, functions: Collection[str]) -> set[str]:
        """Return the names of these functions and of the program's functions that call them, directly or indirectly."""
        found = set(functions)
        called = [
            (node.name, {name for part in node.body for inner in ast.walk(part) if (name := _name(inner))})
            for file in self._sources
            for node in self._by_line(file).values()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        while more := {name for name, names in called if name not in found and names & found}:
            found |= more
        return found

    def headers_around(self, functions: Collection[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the loops and conditions around calls of these functions, with the lines of their body."""
        found = {}
        for file in self._sources:
            for line, node in self._by_line(file).items():
                if isinstance(node, ast.If | ast.For | ast.While) and any(
                    _name(inner) in functions for part in node.body for inner in ast.walk(part)
                ):
                    found[file, line] = node.body[0].lineno, node.body[-1].end_lineno or line
        return found

    def calls_of(self, functions: Collection[str]) -> dict[tuple[str, int], list[int]]:
        """Return the lines of the calls of these functions in the body of each function, by file and its first line."""
        found: dict[tuple[str, int], list[int]] = {}
        for file in self._sources:
            for node in self._by_line(file).values():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    statements = (
                        inner for inner in ast.walk(node) if isinstance(inner, ast.stmt) and inner is not node
                    )
                    lines = [inner.lineno for inner in statements if _calls_itself(inner, functions)]
                    if lines:
                        found[file, first] = sorted(lines)
        return found

    def _parse(self, file: str) -> dict[int, ast.AST]:
        found: dict[int, ast.AST] = {}
        for node in ast.walk(parse_python(self._sources.get(file, ""))):
            if isinstance(node, ast.stmt | ast.ExceptHandler):
                found.setdefault(node.lineno, node)
            elif isinstance(node, ast.match_case):
                found.setdefault(node.pattern.lineno, node)
        return found


def _calls_itself(statement: ast.stmt, functions: Collection[str]) -> bool:
    """Return whether a simple statement calls one of the functions, or names one in a string."""
    return not hasattr(statement, "body") and any(
        _name(node) in functions or (isinstance(node, ast.Constant) and node.value in functions)
        for node in ast.walk(statement)
    )


def _name(node: ast.AST) -> str:
    """Return the name of the function or method that the node calls, or "" if the node is no call of a name."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
        case _:
            return ""
