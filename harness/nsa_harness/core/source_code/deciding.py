"""Find the names that decide what a rank does at a line: those of conditions, loops and calls."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from nsa_harness.core.source_code.excerpt import Excerpt, Function
from nsa_harness.core.source_code.program_source import Line, ProgramSource
from nsa_harness.core.source_code.value_origin import assignments

T = TypeVar("T")

_MAX_DEPTH = 2  # calls of the program's methods that are followed from an expression
_MAX_DEFINITIONS = 8
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """An expression of the program that decides what a rank does, with the names in it."""

    file: str
    line: int
    function: str
    names: tuple[str, ...]  # "bad", "stopper.bad", "len(loader)"
    owners: tuple[str, ...] = ()  # objects of which any attribute may decide, because their methods are not stored
    is_call: bool = False  # a call on the line, of which the arguments are named
    is_around: bool = False  # a loop around the line, or a condition that ends this loop
    is_loop: bool = False  # a loop iterates over it, so the contents and their order decide

    def choose(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return the values of the names in the expression, then those of attributes of its objects."""
        named = {name: values[name] for name in self.names if name in values}
        attributes = {
            name: value for name, value in values.items() if any(name.startswith(f"{each}.") for each in self.owners)
        }
        return {**named, **attributes}


def deciding_expressions(program: ProgramSource, place: Line) -> Iterator[Deciding]:
    """Yield the expressions that decide whether the line runs, and with which arguments.

    The statement on the line comes first, then the conditions that determine whether the line is reached, then the
    loops around it and the conditions that end these loops.
    """
    excerpt = program.excerpt(place)
    if excerpt is None or place.line is None:
        return
    branches = [branch.line for branch in excerpt.branches(place.line)]
    loops = excerpt.loops_around(place.line)
    around = [line for loop in loops for line in (loop.line, *(branch.line for branch in loop.exits))]
    for line in dict.fromkeys((place.line, *branches, *around)):
        names = _Names(program=program)
        parts = list(_expressions(excerpt, line, with_calls=line == place.line))
        for expression, part in parts:
            names.read(expression, is_iterated=part is _Part.ITERABLE)
        if names.names or names.owners:
            yield Deciding(
                file=excerpt.file,
                line=line,
                function=excerpt.name,
                names=tuple(names.names),
                owners=tuple(names.owners),
                is_call=all(part is _Part.CALL for _, part in parts),
                is_around=line != place.line and line not in branches,
                is_loop=any(part is _Part.ITERABLE for _, part in parts),
            )


def definitions(program: ProgramSource, file: str, line: int, name: str) -> tuple[int, ...]:
    """Return the lines of the function around `line` that assign `name`, or a variable that these lines read.

    The latest line comes first. Lines after `line` count only in a loop around it.
    """
    excerpt = program.excerpt_at(file, line)
    if excerpt is None:
        return ()
    loops = excerpt.loops_around(line)
    before = [
        one for one in assignments(excerpt) if one[1] < line or any(loop.line <= one[1] <= loop.last for loop in loops)
    ]
    lines: set[int] = set()
    wanted = {name.removeprefix("len(").rstrip(")")}
    while wanted:
        dotted = wanted.pop()
        found = [one for one in before if one[0] in (dotted, dotted.partition(".")[0]) and one[1] not in lines]
        lines |= {at for _, at, _ in found}
        wanted |= {text for _, _, value in found for node in ast.walk(value) if (text := _dotted(node))}
    return tuple(sorted(lines, reverse=True))[:_MAX_DEFINITIONS]


class _Part(Enum):
    CONDITION = auto()
    ITERABLE = auto()
    CALL = auto()


def _expressions(excerpt: Excerpt, line: int, *, with_calls: bool) -> Iterator[tuple[ast.expr, _Part]]:
    """Yield the condition, iterable or calls of the statement on a line.

    `with_calls`: the calls of a simple statement and the contexts of a `with` statement count as well.
    """
    at = line + 1 - excerpt.first
    statements = [
        node for node in excerpt.nodes if isinstance(node, ast.stmt) and node.lineno <= at <= (node.end_lineno or at)
    ]
    for node in sorted(statements, key=lambda node: -node.lineno)[:1]:
        if isinstance(node, ast.If | ast.While | ast.Assert):
            yield node.test, _Part.CONDITION
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield node.iter, _Part.ITERABLE
        elif isinstance(node, ast.With | ast.AsyncWith):
            yield from ((item.context_expr, _Part.CALL) for item in node.items if with_calls)
        elif with_calls and not isinstance(node, Function | ast.ClassDef | ast.Try):
            yield from ((call, _Part.CALL) for call in ast.walk(node) if isinstance(call, ast.Call))


@dataclass(kw_only=True)
class _Names:
    """A collector of the names in expressions, in the order in which they occur."""

    program: ProgramSource
    names: dict[str, None] = field(default_factory=dict)
    owners: dict[str, None] = field(default_factory=dict)

    def read(self, expression: ast.expr, *, is_iterated: bool = False) -> None:
        known = set(self.names)
        self._visit(expression, _Scope())
        if is_iterated:
            for name in [name for name in self.names if name not in known and not name.startswith("len(")]:
                self.names[f"len({name})"] = None
                self.owners[name] = None

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.Call):
            self._visit_call(node, scope)
        elif (dotted := _dotted(node)) is not None:
            if name := scope.name(dotted):
                self.names[name] = None
        elif not isinstance(node, ast.Lambda):
            for child in ast.iter_child_nodes(node):
                self._visit(child, scope)

    def _visit_call(self, call: ast.Call, scope: _Scope) -> None:
        function = _dotted(call.func)
        if function is None:
            self._visit(call.func, scope)
        elif name := scope.name(function):
            owner, _, method = name.rpartition(".")
            self._follow(owner or name, method if owner else "__call__", scope)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            self._visit(argument, scope)
            if function == "len" and (name := scope.name(_dotted(argument) or "")):
                self.names[f"len({name})"] = None

    def _follow(self, owner: str, method: str, scope: _Scope) -> None:
        """Add the attributes of `owner` that its method reads in what it returns and in its conditions.

        If the method is not stored, any attribute of `owner` may decide.
        """
        excerpt = self.program.only_function(method)
        arguments = excerpt.function.args.args if excerpt is not None and excerpt.function is not None else []
        if excerpt is None or not arguments:
            self.owners[owner] = None
        elif scope.depth < _MAX_DEPTH:
            inner = _Scope(this=arguments[0].arg, owner=owner, depth=scope.depth + 1)
            results = [node.value for node in excerpt.nodes if isinstance(node, ast.Return) and node.value is not None]
            for expression in (
                *results,
                *(node.test for node in excerpt.nodes if isinstance(node, ast.If | ast.While)),
            ):
                self._visit(expression, inner)


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """The function of an expression. In a method, only attributes of its object `this` are known outside."""

    this: str = ""  # "self"
    owner: str = ""  # the name of the object outside: "stopper"
    depth: int = 0

    def name(self, dotted: str) -> str:
        """Return the name as the outermost function would write it, or "" if there is none."""
        first, _, rest = dotted.partition(".")
        if not self.this:
            return "" if dotted in _BUILTINS else dotted
        return f"{self.owner}.{rest}" if first == self.this and rest else ""


def _dotted(node: ast.AST) -> str | None:
    """Return a name or an attribute of a name as text, such as "self.stopper.bad", or None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
