"""Select the parts of the user's source code that are stored as evidence."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from nsa_harness.core.evidence.coverage import lines_of_some_ranks
from nsa_harness.core.evidence.evidence import Evidence, Frame, Source
from nsa_harness.core.evidence.frameworks import framework_frames
from nsa_harness.core.evidence.stacks import is_library, package_of
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Excerpt, Function, calls_in, parse_excerpt, parse_python
from nsa_harness.core.source_code.hooks import hooks
from nsa_harness.core.source_code.program_source import MAX_CALLS, STORE_SETTERS

_MAX_LINES = 400  # longest function that is stored
_module = lru_cache(maxsize=8)(parse_python)  # whole files, each read three times in a row
_FOLDERS = 3  # number of parent directories in which a file's imports are searched
# Two arguments, a key and its value. Methods of sets and lists with the same names take only one argument.
_MAY_SET = re.compile(rf"\.(?:{'|'.join(sorted(STORE_SETTERS))})\(\s*(?:f?([\"']).*?\1\s*[,%+.]|[\w.\[\]]+\s*,)")


def program_sources(evidence: Evidence, text_of: Callable[[str], str]) -> Iterator[Source]:
    """Yield the functions that the evidence mentions, followed by related functions from the user's program.

    Related functions are called by the first ones or use the same attributes. `text_of` returns the text of a file, or
    "" if the file does not belong to the program.
    """
    lines = program_lines(evidence)
    texts = {file: text for file in lines if (text := text_of(file))}
    excerpts_of_pass = [
        excerpt
        for file, text in texts.items()
        for excerpt in excerpts(file, text, lines[file] | _lines_setting_keys(evidence, text))
    ]
    yield from excerpts_of_pass
    for imported_path in [path for file, text in texts.items() for path in _imported_files(file, text)]:
        if imported_path not in texts and not is_library(imported_path) and (text := text_of(imported_path)):
            texts[imported_path] = text
    for package in frameworks(evidence):
        yield from hooks(texts, package)
    functions = [function for file, text in texts.items() for function in _functions(file, text)]
    yielded = {(excerpt.file, excerpt.first) for excerpt in excerpts_of_pass}
    for _ in range(MAX_CALLS):
        names_used = [_names_used(excerpt) for excerpt in excerpts_of_pass]
        calls, attributes = (
            {name for touch in names_used for name in touch[0]},
            {
                (excerpt.file, name)
                for excerpt, names in zip(excerpts_of_pass, names_used, strict=True)
                for name in names[1]
            },
        )
        excerpts_of_pass = [
            function
            for function in functions
            if (function.file, function.first) not in yielded
            and (
                Excerpt.from_source(function).name in calls
                or any((function.file, name) in attributes for name in _names_used(function)[1])
            )
        ]
        yielded |= {(excerpt.file, excerpt.first) for excerpt in excerpts_of_pass}
        yield from excerpts_of_pass


def frameworks(evidence: Evidence) -> set[str]:
    """Return the installed packages, other than torch, that the program called and that ranks were last seen in."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    stacks = (stack for rank in last for stack in rank.stacks)
    return {package_of(frame.file) for stack in stacks for frame in framework_frames(stack.frames)}


def program_lines(evidence: Evidence) -> dict[str, set[int]]:
    """Return, for each file of the user's program, the line numbers that the evidence mentions."""
    lines: dict[str, set[int]] = {}
    coverages = [rank.coverage for rank in evidence.ranks if rank.coverage is not None]
    for file, line in (*_places(evidence), *sorted(lines_of_some_ranks(coverages))):
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


def _lines_setting_keys(evidence: Evidence, text: str) -> set[int]:
    """Return the numbers of the lines in `text` that could set a key of the distributed store."""
    status_files = (rank.status_file for rank in evidence.ranks if rank.status_file)
    gave_up = any(rank.exception and "DistStoreError" in rank.exception.type for rank in evidence.ranks)
    if not gave_up and not any(call.key for status_file in status_files for call in status_file.calls):
        return set()
    return {number for number, line in enumerate(text.splitlines(), 1) if _MAY_SET.search(line)}


def excerpts(file: str, text: str, lines: set[int]) -> Iterator[Source]:
    """Yield the functions that contain the given lines, and the functions that call them.

    A line outside of functions gives its statement. Functions of more than `_MAX_LINES` lines are skipped.
    """
    module = _module(text)
    all_lines = text.splitlines()
    functions = [node for node in ast.walk(module) if isinstance(node, Function)]
    function_names = {
        function.name
        for function in functions
        if any(_begin(function) <= line <= (function.end_lineno or 0) for line in lines)
    }
    called_at = {
        line for function in functions for line, name in calls_in(ast.walk(function)) if name in function_names
    }
    spans = {span for line in lines | called_at if (span := _span(module.body, line))}
    for first, last in sorted(spans):
        if last - first < _MAX_LINES:
            yield Source(file=file, first=first, text="\n".join(all_lines[first - 1 : last]))


def _functions(file: str, text: str) -> Iterator[Source]:
    all_lines = text.splitlines()
    for node in ast.walk(_module(text)):
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno < _MAX_LINES:
            yield Source(file=file, first=_begin(node), text="\n".join(all_lines[_begin(node) - 1 : node.end_lineno]))


def _imported_files(file: str, text: str) -> Iterator[str]:
    """Yield the possible paths of the modules that this file imports."""
    folders = list(PurePosixPath(file).parents)[:_FOLDERS]
    for node in ast.walk(_module(text)):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            inside = [name.name for name in node.names]
            modules = [node.module, *(f"{node.module}.{name}" for name in inside)] if node.module else inside
        for module in modules:
            yield from (f"{folder / module.replace('.', '/')}.py" for folder in folders)


@lru_cache(maxsize=4096)
def _names_used(function: Source) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that the function calls, and the attributes of `self` that it uses."""
    tree = parse_excerpt(function.text)
    own = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
    return frozenset(name for _, name in calls_in(ast.walk(tree))), frozenset(attribute.attr for attribute in own)


def _span(body: Sequence[ast.stmt], line: int) -> tuple[int, int] | None:
    """Return the first and last line of the function or statement that contains `line`, or None if there is none."""
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


def _begin(statement: ast.stmt) -> int:
    decorators = statement.decorator_list if isinstance(statement, Function | ast.ClassDef) else []
    return min([statement.lineno, *(each.lineno for each in decorators)])
