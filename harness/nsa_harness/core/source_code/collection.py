"""Choose which source to store: the functions that hold the lines of the evidence, and the functions around them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from nsa_harness.core.evidence.evidence import Evidence, Frame, Source
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Excerpt, Function, calls_in, parsed
from nsa_harness.core.source_code.program_source import MAX_CALLS, STORE_SETTERS

_MAX_LINES = 400  # of one function
_FOLDERS = 3  # directories above a file that its imports are looked up in
# A key and its value. A set or a list takes one argument only.
_MAY_SET = re.compile(rf"\.(?:{'|'.join(sorted(STORE_SETTERS))})\(\s*(?:f?([\"']).*?\1\s*[,%+.]|[\w.\[\]]+\s*,)")


def program_sources(evidence: Evidence, text_of: Callable[[str], str]) -> Iterator[Source]:
    """Yield the functions that hold lines of the evidence, then what they call and what shares their attributes.

    `text_of` returns the text of a file of the program, and "" for any other file.
    """
    lines = places_of(evidence)
    texts = {file: text for file in lines if (text := text_of(file))}
    kept = [
        excerpt
        for file, text in texts.items()
        for excerpt in excerpts(file, text, lines[file] | lines_setting_keys(evidence, text))
    ]
    yield from kept
    for imported in [path for file, text in texts.items() for path in _imported(file, text)]:
        if imported not in texts and not is_library(imported) and (text := text_of(imported)):
            texts[imported] = text
    functions = [one for file, text in texts.items() for one in _functions(file, text)]
    known = {(one.file, one.first) for one in kept}
    for _ in range(MAX_CALLS):
        wanted = [_touched(one) for one in kept]
        calls, shared = (
            {name for one in wanted for name in one[0]},
            {(one.file, name) for one, names in zip(kept, wanted, strict=True) for name in names[1]},
        )
        kept = [
            function
            for function in functions
            if (function.file, function.first) not in known
            and (
                Excerpt.of(function).name in calls
                or any((function.file, name) in shared for name in _touched(function)[1])
            )
        ]
        known |= {(one.file, one.first) for one in kept}
        yield from kept


def places_of(evidence: Evidence) -> dict[str, set[int]]:
    """Return every line of the program that the evidence names, by file, without those of libraries."""
    lines: dict[str, set[int]] = {}
    for file, line in _places(evidence):
        if file.startswith("/") and not is_library(file):
            lines.setdefault(file, set()).add(line)
    return lines


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


def lines_setting_keys(evidence: Evidence, text: str) -> set[int]:
    """Return lines that may set a key of a store, if a rank waited for one; the store may have any name."""
    boards = (rank.board for rank in evidence.ranks if rank.board)
    gave_up = any(rank.raised and "DistStoreError" in rank.raised.type for rank in evidence.ranks)
    if not gave_up and not any(call.key for board in boards for call in board.calls):
        return set()
    return {number for number, line in enumerate(text.splitlines(), 1) if _MAY_SET.search(line)}


def excerpts(file: str, text: str, lines: set[int]) -> Iterator[Source]:
    """Yield for each line the function around it, else its outermost statement, and the functions that call it by name.

    Nothing is yielded for text that is not valid Python, or for a function of more than `_MAX_LINES` lines.
    """
    module = _module(text)
    whole = text.splitlines()
    functions = [node for node in ast.walk(module) if isinstance(node, Function)]
    held = {
        function.name
        for function in functions
        if any(_begin(function) <= line <= (function.end_lineno or 0) for line in lines)
    }
    called_at = {line for function in functions for line, name in calls_in(ast.walk(function)) if name in held}
    spans = {span for line in lines | called_at if (span := _span(module.body, line))}
    for first, last in sorted(spans):
        if last - first < _MAX_LINES:
            yield Source(file=file, first=first, text="\n".join(whole[first - 1 : last]))


def _functions(file: str, text: str) -> Iterator[Source]:
    whole = text.splitlines()
    for node in ast.walk(_module(text)):
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno < _MAX_LINES:
            yield Source(file=file, first=_begin(node), text="\n".join(whole[_begin(node) - 1 : node.end_lineno]))


def _imported(file: str, text: str) -> Iterator[str]:
    """Yield files that the file may import from its own directory or from one above."""
    folders = list(PurePosixPath(file).parents)[:_FOLDERS]
    for node in ast.walk(_module(text)):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            inside = [name.name for name in node.names]
            modules = [node.module, *(f"{node.module}.{name}" for name in inside)] if node.module else inside
        for module in modules:
            yield from (f"{folder / module.replace('.', '/')}.py" for folder in folders)


@lru_cache(maxsize=8)  # the whole files of one program, each read three times in a row
def _module(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


@lru_cache(maxsize=4096)
def _touched(kept: Source) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that the function calls, and the attributes of `self` that it reads, sets or locks."""
    tree = parsed(kept.text)
    own = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
    return frozenset(name for _, name in calls_in(ast.walk(tree))), frozenset(one.attr for one in own)


def _span(body: Sequence[ast.stmt], line: int) -> tuple[int, int] | None:
    """Return the innermost function around the line; outside of functions, the statement of the module."""
    span: tuple[int, int] | None = None
    while holder := next(
        (statement for statement in body if _begin(statement) <= line <= (statement.end_lineno or 0)), None
    ):
        if span is None or isinstance(holder, Function):
            span = _begin(holder), holder.end_lineno or holder.lineno
        if not isinstance(holder, Function | ast.ClassDef | ast.If | ast.With | ast.Try | ast.For | ast.While):
            break
        body = [node for node in ast.walk(holder) if isinstance(node, Function | ast.ClassDef) and node is not holder]
    return span


def _begin(one: ast.stmt) -> int:
    decorators = one.decorator_list if isinstance(one, Function | ast.ClassDef) else []
    return min([one.lineno, *(each.lineno for each in decorators)])
