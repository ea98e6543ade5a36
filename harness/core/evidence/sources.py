"""Source as it stood when the run was judged: which of it is kept, and which branches lead to a line of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from textwrap import dedent

from nsa_harness.core.evidence.evidence import Evidence, Frame, Source
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place

_MAX_LINES = 400  # of one function
_RANK = re.compile(r"rank|(?:is|main|on)_?(?:main|master|primary|leader|chief|coordinator)|(?:main|master)_?proc", re.I)

_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Holder = ast.If | ast.ExceptHandler | _Loop | _Function
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A condition, a handler or a jump that decides whether a line is reached."""

    file: str
    line: int
    function: str
    text: str  # "if rank == 0", "except ValueError", "continue"
    of_rank: bool  # the condition asks who it is


def places_of(evidence: Evidence) -> dict[str, set[int]]:
    """Every line of the program that the evidence names, by file; nothing of libraries."""
    found: dict[str, set[int]] = {}
    for file, line in _places(evidence):
        if file.startswith("/") and not is_library(file):
            found.setdefault(file, set()).add(line)
    return found


def _places(value: object) -> Iterator[tuple[str, int]]:
    if isinstance(value, (Frame, Place)):
        if value.file is not None and value.line is not None:
            yield value.file, value.line
    elif is_dataclass(value):
        for field in fields(value):
            yield from _places(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _places(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from _places(each)


def excerpts(file: str, text: str, lines: set[int]) -> Iterator[Source]:
    """Of each line the function that holds it, else the outermost statement; none of what is no Python, or too long."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    whole = text.splitlines()
    spans = {span for line in lines if (span := _span(module.body, line))}
    for first, last in sorted(spans):
        if last - first < _MAX_LINES:
            yield Source(file=file, first=first, text="\n".join(whole[first - 1 : last]))


def _span(body: Sequence[ast.stmt], line: int) -> tuple[int, int] | None:
    """The innermost function around the line; outside of functions the statement of the module."""
    found: tuple[int, int] | None = None
    while holder := next((one for one in body if _begin(one) <= line <= (one.end_lineno or 0)), None):
        if found is None or isinstance(holder, _Function):
            found = _begin(holder), holder.end_lineno or holder.lineno
        if not isinstance(holder, _Function | ast.ClassDef | ast.If | ast.With | ast.Try | ast.For | ast.While):
            break
        body = [one for one in ast.walk(holder) if isinstance(one, ast.stmt) and one is not holder]
        body = [one for one in body if isinstance(one, _Function | ast.ClassDef)]
    return found


def _begin(one: ast.stmt) -> int:
    decorators = one.decorator_list if isinstance(one, _Function | ast.ClassDef) else []
    return min([one.lineno, *(each.lineno for each in decorators)])


def statement(sources: Sequence[Source], place: Place) -> str | None:
    """The line itself."""
    kept = _excerpt(sources, place.file, place.line)
    return None if kept is None or place.line is None else kept.text.splitlines()[place.line - kept.first].strip()[:200]


def leaves_loop(sources: Sequence[Source], inside: Place | Frame, outside: Place | Frame) -> bool:
    """In one function: a loop runs around the one line, and the other one lies behind it."""
    kept = _excerpt(sources, inside.file, inside.line)
    if kept is None or kept is not _excerpt(sources, outside.file, outside.line):
        return False
    loop = next((one for one in _around(kept, inside.line or 0) if isinstance(one, _Loop)), None)
    return loop is not None and (outside.line or 0) + 1 - kept.first > (loop.end_lineno or 0)


def loop_around(sources: Sequence[Source], frame: Frame) -> int | None:
    """The line of the innermost `for` or `while` around a line of its function."""
    kept = _excerpt(sources, frame.file, frame.line)
    loop = next((one for one in _around(kept, frame.line) if isinstance(one, _Loop)), None) if kept else None
    return None if loop is None or kept is None else loop.lineno + kept.first - 1


def branches(sources: Sequence[Source], place: Place | Frame) -> tuple[Branch, ...]:
    """What decides whether the line is reached: conditions around it, nearest first; then jumps before it in a loop."""
    kept = _excerpt(sources, place.file, place.line)
    if kept is None or place.line is None:
        return ()
    around = _around(kept, place.line)
    tests = [_branch(kept, one, one.test) for one in around if isinstance(one, ast.If | ast.While)]
    handlers = [_branch(kept, one, one.type) for one in around if isinstance(one, ast.ExceptHandler)]
    loop = next((one for one in around if isinstance(one, _Loop)), None)
    block = loop or next((one for one in around if isinstance(one, _Function)), None)
    return (*tests, *handlers, *(_jumps(kept, block, place.line + 1 - kept.first) if block is not None else ()))


def _jumps(kept: Source, block: ast.AST, line: int) -> Iterator[Branch]:
    """Conditions and handlers in front of the line that end with `continue`, `break`, `return` or `raise`."""
    for one in ast.walk(block):
        if isinstance(one, ast.If | ast.ExceptHandler) and (one.end_lineno or 0) < line:
            jump = next((each for each in one.body if isinstance(each, _JUMPS)), None)
            if jump is not None:
                yield _branch(kept, one, one.test if isinstance(one, ast.If) else one.type)


def _branch(kept: Source, one: ast.stmt | ast.ExceptHandler, test: ast.expr | None) -> Branch:
    lines = kept.text.splitlines()
    return Branch(
        file=kept.file,
        line=one.lineno + kept.first - 1,
        function=next((each.name for each in ast.walk(_tree(kept.text)) if isinstance(each, _Function)), "<module>"),
        text=lines[one.lineno - 1].strip().rstrip(":")[:120],
        of_rank=test is not None and _asks_rank(_tree(kept.text), test),
    )


def _asks_rank(tree: ast.AST, test: ast.expr) -> bool:
    """By the words of the condition, or of what its variables were given in the same function."""
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    given = [
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and any(isinstance(each, ast.Name) and each.id in names for each in one.targets)
    ]
    return any(_RANK.search(ast.unparse(one)) for one in (test, *given))


def _around(kept: Source, line: int) -> list[_Holder]:
    """What holds a line of the file, the innermost first."""
    at = line + 1 - kept.first
    found = [one for one in ast.walk(_tree(kept.text)) if isinstance(one, _Holder)]
    return sorted((one for one in found if one.lineno <= at <= (one.end_lineno or 0)), key=lambda one: -one.lineno)


@cache
def _tree(text: str) -> ast.AST:
    """Of an excerpt, whose lines are indented as they were."""
    try:
        return ast.parse(dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _excerpt(sources: Sequence[Source], file: str | None, line: int | None) -> Source | None:
    """The one that holds the line; of several the smallest."""
    if file is None or line is None:
        return None
    held = [one for one in sources if one.file == file and one.first <= line < one.first + one.text.count("\n") + 1]
    return min(held, key=lambda one: len(one.text), default=None)
