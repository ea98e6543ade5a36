"""Source as it stood when the run was judged: which of it is kept, and which branches lead to a line of it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from textwrap import dedent

from nsa_harness.core.evidence.evidence import Evidence, Frame, Source
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place

_MAX_LINES = 400  # of one function
_FOLDERS = 3  # above a file, in which it may find what it imports
_BEYOND = 3  # calls that lead from a function which holds a line of the evidence to one that holds none
_RANK = re.compile(r"rank|(?:is|main|on)_?(?:main|master|primary|leader|chief|coordinator)|(?:main|master)_?proc", re.I)

_Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
_Holder = ast.If | ast.ExceptHandler | _Loop | Function
_COUNTS = re.compile(r"(?:itertools\.)?(?:range|count|enumerate)\(")
_SETTING = re.compile(r"(?:^|\.)(?:args?|cfg|conf|config|opts?|options|hparams?|hp|settings|params)[.\[]")
_END_OF_HEAD = re.compile(r":\s*(?:#.*)?$")
_FILLED = (ast.List, ast.Dict, ast.Set)
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A condition, a handler or a jump that decides whether a line is reached."""

    file: str
    line: int
    function: str
    text: str  # "if rank == 0", "except ValueError", "continue"
    of_rank: bool  # the condition asks who it is
    leaves: bool  # it lies before the line, and what it holds leaves the loop or the function
    ends: bool  # it leaves the function, so that whoever stands behind it in the same call did not take it
    varies: bool  # it asks more than counters of loops and settings, which are the same on every rank
    catches: bool  # it is an `except`
    goes_on: int  # its own line; of an `except` that leaves, the one by which it does

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)


def program_sources(evidence: Evidence, text_of: Callable[[str], str]) -> Iterator[Source]:
    """What holds the lines that the evidence names, then what these functions call, and what their attributes and locks
    are shared with. `text_of`: of a file of the program; empty for any other.
    """
    lines = places_of(evidence)
    texts = {file: text for file in lines if (text := text_of(file))}
    kept = [
        one
        for file, text in texts.items()
        for one in excerpts(file, text, lines[file] | lines_setting_keys(evidence, text))
    ]
    yield from kept
    for imported in [one for file, text in texts.items() for one in _imported(file, text)]:
        if imported not in texts and not is_library(imported) and (text := text_of(imported)):
            texts[imported] = text
    functions = [one for file, text in texts.items() for one in _functions(file, text)]
    known = {(one.file, one.first) for one in kept}
    for _ in range(_BEYOND):
        wanted = [_touched(one) for one in kept]
        calls, shared = (
            {name for one in wanted for name in one[0]},
            {(one.file, name) for one, names in zip(kept, wanted, strict=True) for name in names[1]},
        )
        kept = [
            one
            for one in functions
            if (one.file, one.first) not in known
            and (function_name(one) in calls or any((one.file, name) in shared for name in _touched(one)[1]))
        ]
        known |= {(one.file, one.first) for one in kept}
        yield from kept


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
    """Of each line the function that holds it, else the outermost statement, and the functions that call it by name.

    None of what is no Python, or too long.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    whole = text.splitlines()
    functions = [one for one in ast.walk(module) if isinstance(one, Function)]
    held = {one.name for one in functions if any(_begin(one) <= line <= (one.end_lineno or 0) for line in lines)}
    called_at = {line for one in functions for line, name in _calls(one) if name in held}
    spans = {span for line in lines | called_at if (span := _span(module.body, line))}
    for first, last in sorted(spans):
        if last - first < _MAX_LINES:
            yield Source(file=file, first=first, text="\n".join(whole[first - 1 : last]))


def _functions(file: str, text: str) -> Iterator[Source]:
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    whole = text.splitlines()
    for one in ast.walk(module):
        if isinstance(one, Function) and (one.end_lineno or 0) - one.lineno < _MAX_LINES:
            yield Source(file=file, first=_begin(one), text="\n".join(whole[_begin(one) - 1 : one.end_lineno]))


def _imported(file: str, text: str) -> Iterator[str]:
    """Files that it may import beside itself, or beside a package that it lies in."""
    folders = list(PurePosixPath(file).parents)[:_FOLDERS]
    for one in ast.walk(parsed(text)):
        modules = [each.name for each in one.names] if isinstance(one, ast.Import) else []
        if isinstance(one, ast.ImportFrom):
            inside = [each.name for each in one.names]
            modules = [one.module, *(f"{one.module}.{name}" for name in inside)] if one.module else inside
        for module in modules:
            yield from (f"{folder / module.replace('.', '/')}.py" for folder in folders)


@cache
def _touched(kept: Source) -> tuple[frozenset[str], frozenset[str]]:
    """The names of what it calls; the attributes of its object that it reads, sets or locks."""
    tree = parsed(kept.text)
    own = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self")
    return frozenset(name for _, name in _calls(tree)), frozenset(one.attr for one in own)


def _span(body: Sequence[ast.stmt], line: int) -> tuple[int, int] | None:
    """The innermost function around the line; outside of functions the statement of the module."""
    found: tuple[int, int] | None = None
    while holder := next((one for one in body if _begin(one) <= line <= (one.end_lineno or 0)), None):
        if found is None or isinstance(holder, Function):
            found = _begin(holder), holder.end_lineno or holder.lineno
        if not isinstance(holder, Function | ast.ClassDef | ast.If | ast.With | ast.Try | ast.For | ast.While):
            break
        body = [one for one in ast.walk(holder) if isinstance(one, ast.stmt) and one is not holder]
        body = [one for one in body if isinstance(one, Function | ast.ClassDef)]
    return found


def _begin(one: ast.stmt) -> int:
    decorators = one.decorator_list if isinstance(one, Function | ast.ClassDef) else []
    return min([one.lineno, *(each.lineno for each in decorators)])


def statement(sources: Sequence[Source], place: Place) -> str | None:
    """The line itself."""
    kept = excerpt(sources, place.file, place.line)
    return None if kept is None or place.line is None else kept.text.splitlines()[place.line - kept.first].strip()[:200]


@dataclass(frozen=True, kw_only=True)
class Loop:
    file: str
    line: int
    last: int
    function: str
    of_items: bool  # it goes through something, and does not merely count
    exits: tuple[Branch, ...]  # conditions and handlers that end it before its time
    stops: tuple[Branch, ...]  # of these, by an exception that by its name is no error: somebody catches it
    skips: tuple[Branch, ...]  # handlers that go on to its next round, around the line inside that was asked for

    def holds(self, line: Frame) -> bool:
        return line.file == self.file and self.line <= line.line <= self.last


def same_function(sources: Sequence[Source], one: Place | Frame, other: Place | Frame) -> bool:
    """Both lines lie in one stored function."""
    kept = excerpt(sources, one.file, one.line)
    return kept is not None and kept is excerpt(sources, other.file, other.line)


def loops_around(sources: Sequence[Source], place: Place | Frame) -> tuple[Loop, ...]:
    """Innermost first."""
    kept = excerpt(sources, place.file, place.line)
    held_by = holders(kept, place.line or 0) if kept is not None else []
    line = place.line or 0
    return tuple(_loop(kept, one, line) for one in held_by if kept is not None and isinstance(one, _Loop))


def loops_left(sources: Sequence[Source], inside: Place | Frame, outside: Place | Frame) -> tuple[Loop, ...]:
    """In one function: the loops that run around the one line and that the other one lies behind, innermost first."""
    if not same_function(sources, inside, outside):
        return ()
    return tuple(one for one in loops_around(sources, inside) if (outside.line or 0) > one.last)


def _loop(kept: Source, one: _Loop, line: int) -> Loop:
    counts = None if isinstance(one, ast.While) else _COUNTS.match(ast.unparse(one.iter))
    items = not isinstance(one, ast.While) and (counts is None or counts[0].startswith("enumerate"))
    return Loop(
        file=kept.file,
        line=one.lineno + kept.first - 1,
        last=(one.end_lineno or one.lineno) + kept.first - 1,
        function=function_name(kept),
        of_items=items,
        exits=tuple(_jumps(kept, one, one.end_lineno or 0, (ast.Break, ast.Return))),
        stops=tuple(_jumps(kept, one, one.end_lineno or 0, (ast.Raise,), errors=False)),
        skips=tuple(_skips(kept, one, line + 1 - kept.first)),
    )


def _skips(kept: Source, loop: _Loop, line: int) -> Iterator[Branch]:
    """Of a `try` around the line, or before it in a round that the handler ends."""
    tries = [one for one in ast.walk(loop) if isinstance(one, ast.Try)]
    bodies = {id(each): one.body for one in tries for each in one.handlers}
    for one, nested in _guards(loop, nested=False):
        if not isinstance(one, ast.ExceptHandler) or id(one) not in bodies or nested:
            continue
        body = bodies[id(one)]
        jump = next((each for each in one.body if isinstance(each, _JUMPS)), None)
        inside = body[0].lineno <= line <= (body[-1].end_lineno or 0) and not isinstance(jump, ast.Raise)
        if inside or (isinstance(jump, ast.Continue) and (one.end_lineno or 0) < line):
            yield replace(_branch(kept, one, one.type), line=(jump or one).lineno + kept.first - 1)


def passed_over(sources: Sequence[Source], place: Place | Frame) -> Branch | None:
    """The nearest `except` that catches what is raised in the line, and goes on in its function."""
    kept = excerpt(sources, place.file, place.line)
    at = (place.line or 0) + 1 - kept.first if kept else 0
    tries = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.Try)] if kept else []
    around = [one for one in tries if one.body[0].lineno <= at <= (one.body[-1].end_lineno or 0)]
    caught = (each for one in sorted(around, key=lambda one: -one.lineno) for each in one.handlers)
    goes_on = (one for one in caught if not any(isinstance(each, ast.Raise) for each in ast.walk(one)))
    return next((_branch(kept, one, one.type) for one in goes_on if kept), None)


def enters(sources: Sequence[Source], one: Place | Frame | None, other: Place | Frame | None) -> bool:
    """The first line begins a `with` that holds the other one, in one function."""
    if one is None or other is None or not same_function(sources, one, other):
        return False
    kept = excerpt(sources, one.file, one.line)
    begins, inside = ((each.line or 0) + 1 - kept.first if kept else 0 for each in (one, other))
    blocks = [each for each in ast.walk(parsed(kept.text)) if isinstance(each, ast.With)] if kept else []
    return any(each.lineno == begins < inside <= (each.end_lineno or 0) for each in blocks)


def holds_more(sources: Sequence[Source], branch: Branch, line: Place | Frame) -> bool:
    """The condition is one for several statements, of which the line is a later one."""
    kept = excerpt(sources, line.file, line.line)
    same = kept is not None and kept is excerpt(sources, branch.file, branch.line)
    at = (line.line or 0) + 1 - kept.first if kept else 0
    tests = [one for one in holders(kept, line.line or 0) if isinstance(one, ast.If)] if kept and same else []
    held = [one for one in tests if kept and one.lineno + kept.first - 1 == branch.line]
    return any((one.body[0].end_lineno or 0) < at <= (one.body[-1].end_lineno or 0) for one in held)


def loop_around(sources: Sequence[Source], frame: Frame) -> int | None:
    """The line of the innermost `for` or `while` around a line of its function."""
    kept = excerpt(sources, frame.file, frame.line)
    loop = next((one for one in holders(kept, frame.line) if isinstance(one, _Loop)), None) if kept else None
    return None if loop is None or kept is None else loop.lineno + kept.first - 1


def branches(sources: Sequence[Source], place: Place | Frame) -> tuple[Branch, ...]:
    """What decides whether the line is reached: conditions around it, nearest first; then jumps before it in a loop."""
    kept = excerpt(sources, place.file, place.line)
    if kept is None or place.line is None:
        return ()
    around = holders(kept, place.line)
    asked = (one for one in around if isinstance(one, ast.If | ast.While))
    tests = [_branch(kept, one, one.test) for one in asked if not _asks_for_main(one.test)]
    handlers = [_branch(kept, one, one.type) for one in around if isinstance(one, ast.ExceptHandler)]
    loop = next((one for one in around if isinstance(one, _Loop)), None)
    block = loop or next((one for one in around if isinstance(one, Function)), None)
    return (*tests, *handlers, *(_jumps(kept, block, place.line - kept.first) if block is not None else ()))


def _asks_for_main(test: ast.expr) -> bool:
    """`if __name__ == "__main__"` is the same on every rank."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def deciding(
    sources: Sequence[Source], reached: Place | Frame, other: Place | Frame | None, *, same_rank: bool = False
) -> Branch | None:
    """Why one line was reached, and gone around by whoever stands on another line of the function, or is out of it: the
    branch that the other stands in and that leaves before the line, the nearest condition around the line that is not
    around both, else the last one before it that may leave its loop. Of one rank, which reached the line before, no
    condition on the rank decides.
    """
    if other is not None and not same_function(sources, reached, other):
        return None
    beside = branches(sources, other) if other is not None else ()
    shared, stands_in = {one.line for one in beside}, {one.line for one in beside if not one.leaves}
    own = [one for one in branches(sources, reached) if not (same_rank and one.of_rank)]
    own = [one for one in own if one.line not in shared or (one.leaves and (one.line in stands_in or not one.ends))]
    own = [one for one in own if one.varies] or own
    around = [one for one in own if not one.leaves]
    inside = [one for one in own if one.leaves and one.line in stands_in]
    return next(iter([*inside, *around, *reversed(own)]), None)


def around_alone(sources: Sequence[Source], one: Place | Frame | None, other: Place | Frame) -> Branch | None:
    """The nearest condition around a line that is not around the other one of its function."""
    if one is None or not same_function(sources, one, other):
        return None
    shared = {each.line for each in branches(sources, other)}
    own = (each for each in branches(sources, one) if not each.leaves and each.varies and each.line not in shared)
    return next(own, None)


def guard(sources: Sequence[Source], place: Place | Frame) -> Branch | None:
    """The condition around a line, else around the only line of its file that calls its function."""
    kept, seen = excerpt(sources, place.file, place.line), set[str]()
    while kept is not None and kept.text not in seen:
        seen.add(kept.text)
        found = next((one for one in branches(sources, place) if not one.leaves and one.varies), None)
        calls = [] if found is not None else list(_callers(sources, kept))
        if len(calls) != 1:
            return found
        place = calls[0]
        kept = excerpt(sources, place.file, place.line)
    return None


def only_way(sources: Sequence[Source], place: Place) -> Iterator[Place]:
    """The line, and outwards the only line of its file each that calls the function."""
    for _ in range(_BEYOND):
        yield place
        kept = excerpt(sources, place.file, place.line)
        calls = list(_callers(sources, kept)) if kept else []
        if len(calls) != 1:
            return
        place = calls[0]


def _callers(sources: Sequence[Source], called: Source) -> Iterator[Place]:
    name = function_name(called)
    for kept in sources:
        if kept.file == called.file:
            lines = (line for line, word in _calls(parsed(kept.text)) if word == name)
            name_of = function_name(kept)
            yield from (Place(file=kept.file, line=line + kept.first - 1, function=name_of) for line in lines)


def _calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each function or method that is called."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute | ast.Name):
            yield one.lineno, one.func.attr if isinstance(one.func, ast.Attribute) else one.func.id


def _jumps(
    kept: Source, block: ast.AST, line: int, kinds: tuple[type[ast.stmt], ...] = _JUMPS, *, errors: bool = True
) -> Iterator[Branch]:
    """Conditions and handlers that leave the block before the line, or begin it anew. `errors`: by one of these too."""
    for one, nested in _guards(block, nested=False):
        leaves = tuple(kind for kind in kinds if not nested or kind not in (ast.Continue, ast.Break))
        jumps = [each for each in one.body if isinstance(each, leaves) and (errors or not _fails(each))]
        if jumps and (one.end_lineno or 0) <= line:
            ends = not any(isinstance(each, ast.Continue | ast.Break) for each in one.body)
            found = _branch(kept, one, one.test if isinstance(one, ast.If) else one.type, leaves=True)
            yield replace(found, ends=ends, goes_on=jumps[0].lineno + kept.first - 1 if found.catches else found.line)


def _fails(jump: ast.stmt) -> bool:
    """It raises what its name calls an error, or what was raised before."""
    return isinstance(jump, ast.Raise) and (jump.exc is None or "Error" in ast.unparse(jump.exc))


def _guards(block: ast.AST, *, nested: bool) -> Iterator[tuple[ast.If | ast.ExceptHandler, bool]]:
    """In the order of the lines, without those of functions inside; and whether they lie in a loop of their own."""
    for one in ast.iter_child_nodes(block):
        if isinstance(one, ast.If | ast.ExceptHandler):
            yield one, nested
        if not isinstance(one, Function | ast.Lambda):
            yield from _guards(one, nested=nested or isinstance(one, _Loop))


def _branch(kept: Source, one: ast.stmt | ast.ExceptHandler, test: ast.expr | None, *, leaves: bool = False) -> Branch:
    lines = kept.text.splitlines()
    return Branch(
        file=kept.file,
        line=one.lineno + kept.first - 1,
        function=function_name(kept),
        text=_END_OF_HEAD.sub("", lines[one.lineno - 1].strip())[:120],
        of_rank=test is not None and asks_rank(parsed(kept.text), test),
        leaves=leaves,
        ends=False,
        varies=test is None or _varies(parsed(kept.text), test),
        catches=isinstance(one, ast.ExceptHandler),
        goes_on=one.lineno + kept.first - 1,
    )


def function_name(kept: Source) -> str:
    return next((one.name for one in ast.walk(parsed(kept.text)) if isinstance(one, Function)), "<module>")


def is_setting(text: str) -> bool:
    """An attribute of what the program was started with."""
    return _SETTING.search(text) is not None


def _varies(tree: ast.AST, test: ast.expr) -> bool:
    counters = {
        each.id
        for one in ast.walk(tree)
        if isinstance(one, ast.For) and isinstance(one.iter, ast.Call) and _COUNTS.match(ast.unparse(one.iter))
        for each in _first_names(one.target)
    }
    alike = counters | {name for name, value in _given_once(tree) if not _unlike(value, counters)}
    return any(name not in alike for name in _unlike(test, counters))


def _unlike(value: ast.expr, counters: Collection[str]) -> set[str]:
    """Names in it that are no counters, settings or constants; what a call returns is named by its function."""
    settings = {id(each) for one in ast.walk(value) if isinstance(one, ast.Attribute | ast.Subscript)
                for each in ast.walk(one.value) if is_setting(ast.unparse(one))}  # fmt: skip
    periods = (one.right for one in ast.walk(value) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod))
    settings |= {id(each) for one in periods for each in ast.walk(one)}
    names = [one.id for one in ast.walk(value) if isinstance(one, ast.Name) and id(one) not in settings]
    return {name for name in names if name not in counters and not name.isupper()}


def _given_once(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that nothing but one assignment gives a value, and that value, if it is nothing that is filled later."""
    given = Counter(one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    given.update(one.arg for one in ast.walk(tree) if isinstance(one, ast.arg))
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            name = one.targets[0].id
            if given[name] == 1 and not any(isinstance(each, _FILLED) for each in ast.walk(one.value)):
                yield name, one.value


def _first_names(target: ast.expr) -> Iterator[ast.Name]:
    """Of what enumerate gives the number alone."""
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    return (one for one in ast.walk(first) if isinstance(one, ast.Name))


def handlers(sources: Sequence[Source], place: Place | Frame) -> tuple[Branch, ...]:
    """Around the line, or beside it in its innermost loop: where an exception may have been caught before it, at the
    statement by which the handler goes on, if it has one."""
    kept = excerpt(sources, place.file, place.line)
    if kept is None:
        return ()
    around = holders(kept, place.line or 0)
    block = next((one for one in around if isinstance(one, _Loop)), next(iter(around[-1:]), None))
    return tuple(_handlers(kept, block)) if block else ()


def _handlers(kept: Source, block: ast.AST) -> Iterator[Branch]:
    for one, nested in _guards(block, nested=False):
        if isinstance(one, ast.ExceptHandler) and not nested:
            jump = next((each for each in one.body if isinstance(each, _JUMPS)), one)
            yield replace(_branch(kept, one, one.type), line=jump.lineno + kept.first - 1)


def asks_rank(tree: ast.AST, test: ast.expr) -> bool:
    """By the words of the condition, or of what its variables were given in the same function."""
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    given = [
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and any(isinstance(each, ast.Name) and each.id in names for each in one.targets)
    ]
    return any(names_rank(ast.unparse(one)) for one in (test, *given))


def names_rank(text: str) -> bool:
    return _RANK.search(text) is not None


def holders(kept: Source, line: int) -> list[_Holder]:
    """What holds a line of the file, the innermost first."""
    at = line + 1 - kept.first
    found = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, _Holder)]
    return sorted((one for one in found if one.lineno <= at <= (one.end_lineno or 0)), key=lambda one: -one.lineno)


@cache
def parsed(text: str) -> ast.AST:
    """Of an excerpt, whose lines are indented as they were."""
    try:
        return ast.parse(dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def excerpt(sources: Sequence[Source], file: str | None, line: int | None) -> Source | None:
    """The one that holds the line; of several the smallest."""
    if file is None or line is None:
        return None
    held = [one for one in sources if one.file == file and one.first <= line < one.first + one.text.count("\n") + 1]
    return min(held, key=lambda one: len(one.text), default=None)


_SETS = frozenset({"set", "add", "append", "compare_set", "queue_push"})
# A key and what it is set to: of a set or a list that something is put into there is but one.
_MAY_SET = re.compile(rf"\.(?:{'|'.join(sorted(_SETS))})\(\s*(?:f?([\"']).*?\1\s*[,%+.]|[\w.\[\]]+\s*,)")


def way_to(sources: Sequence[Source], frames: Sequence[Frame], functions: Collection[str]) -> tuple[Frame, ...]:
    """Of frames from the outside in, to the first line of their functions that calls one of these; else empty."""
    names = {one.rpartition(".")[2] for one in functions}
    for at, frame in enumerate(frames):
        kept = excerpt(sources, frame.file, frame.line)
        lines = [line + kept.first - 1 for line, name in _calls(parsed(kept.text)) if name in names] if kept else []
        if lines:
            return (*frames[:at], replace(frame, line=lines[0]))
    return ()


def gone_around(sources: Sequence[Source], path: str) -> Branch | None:
    """What decides whether the one line is reached that calls the innermost part of a model which a line calls by name:
    self.proj(...) of y_embed.proj.0."""
    for name in reversed(path.split(".")):
        called = [
            Place(file=kept.file, line=one.lineno + kept.first - 1)
            for kept in sources
            for one in _methods(kept, (name,))
            if ast.unparse(one.func) == f"self.{name}"
        ]
        if called:
            return deciding(sources, called[0], None) if len(called) == 1 else None
    return None


def reentrant_at(sources: Sequence[Source]) -> Place | None:
    """The one line that checkpoints, where it asks for the way that runs a backward pass within the other."""
    calls = [
        Place(file=kept.file, line=one.lineno + kept.first - 1, function=function_name(kept))
        for kept in sources
        for one in ast.walk(parsed(kept.text))
        if isinstance(one, ast.Call)
        and any(word.arg == "use_reentrant" and ast.unparse(word.value) == "True" for word in one.keywords)
    ]
    return calls[0] if len(calls) == 1 else None


def lines_setting_keys(evidence: Evidence, text: str) -> set[int]:
    """Where a program of which a rank waited for a key of a store may set one, whatever it calls the store."""
    boards = (rank.board for rank in evidence.ranks if rank.board)
    gave_up = any(rank.raised and "DistStoreError" in rank.raised.type for rank in evidence.ranks)
    if not gave_up and not any(call.key for board in boards for call in board.calls):
        return set()
    return {number for number, line in enumerate(text.splitlines(), 1) if _MAY_SET.search(line)}


def key_setters(sources: Sequence[Source], key: str) -> Iterator[tuple[Place, re.Match[str]]]:
    """Lines that set a key of a store which may be this one as it is written there; and what stands in its gaps."""
    for kept in sources:
        calls = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.Call) and one.args]
        for one in calls:
            named = isinstance(one.func, ast.Attribute) and one.func.attr in _SETS
            if named and (found := re.fullmatch(f"(?:.*/)?{_pattern(one.args[0])}", key)):
                yield Place(file=kept.file, line=one.lineno + kept.first - 1), found


def _pattern(name: ast.expr) -> str:
    """Of a name without any word written out nothing is known."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    words = [re.escape(str(one.value)) if isinstance(one, ast.Constant) else "(.+)" for one in parts]
    return "".join(words) if set(words) != {"(.+)"} else "(?!)"


def taken_at(sources: Sequence[Source], wanted: Place | Frame, frames: Sequence[Frame]) -> Place | None:
    """Where a thread that stands in these frames took the lock that the wanted line takes: in a `with` around them."""
    locks = locks_wanted(sources, wanted)
    for frame in frames if locks else ():
        held = excerpt(sources, frame.file, frame.line)
        for lock, one in _locks(held) if held else ():
            if held and lock in locks and one.lineno < frame.line + 1 - held.first <= (one.end_lineno or 0):
                return Place(file=frame.file, line=one.lineno + held.first - 1, function=frame.function)
    return None


def _locks(kept: Source) -> Iterator[tuple[str, ast.With | ast.Call]]:
    """What is taken where: by a `with`, which holds it to its end, or a call that holds it for longer than is seen."""
    for one in ast.walk(parsed(kept.text)):
        if isinstance(one, ast.With):
            yield from ((ast.unparse(each.context_expr), one) for each in one.items)
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "acquire":
            yield ast.unparse(one.func.value), one


# What a thread waits in, by the library's file and function, and what another one does that ends it. One that waits for
# an event or a condition may have been at fault itself: it came too late for it, or asks for nothing.
_ENDS = {
    ("queue.py", "get"): ("put", "put_nowait"),
    ("queue.py", "put"): ("get", "get_nowait"),
    ("queue.py", "join"): ("task_done",),
}


def served_at(sources: Sequence[Source], frames: Sequence[Frame]) -> Place | None:
    """Where the function that another thread begins in would end the wait of these frames, innermost first.

    The handler by which that function leaves before its time, if it has one.
    """
    at = next((at for at, one in enumerate(frames) if not is_library(one.file)), 0)
    inside = PurePosixPath(frames[at - 1].file).name, frames[at - 1].function.rpartition(".")[2]
    kept = excerpt(sources, frames[at].file, frames[at].line) if at and inside in _ENDS else None
    if kept is None:
        return None
    asked = {_object(one) for one in _methods(kept, (inside[1],)) if one.lineno == frames[at].line + 1 - kept.first}
    standing = {one for frame in frames if (one := excerpt(sources, frame.file, frame.line))}
    sources = [one for one in sources if parsed(one.text) is not _body(one)]  # functions; a class tells them again
    calls = [
        (one, call.lineno, _object(call) in asked)
        for one in sources
        if one not in standing
        for call in _methods(one, _ENDS[inside])
    ]
    calls.sort(key=lambda one: not one[2])  # of an object of the same name first: it may have been handed on
    entries = (entry for one, line, _ in calls if (entry := _entry(sources, one, line)))
    return next((_left_at(*entry) for entry in entries if entry[0] not in standing), None)


def _methods(kept: Source, names: Sequence[str]) -> Iterator[ast.Call]:
    for one in ast.walk(parsed(kept.text)):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in names:
            yield one


def _object(call: ast.Call) -> str:
    """The last name of what the method is called of: "ready" of self.ready.get() and of ready[k].get()."""
    held = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    while isinstance(held, ast.Subscript):
        held = held.value
    return held.attr if isinstance(held, ast.Attribute) else getattr(held, "id", "")


def _entry(sources: Sequence[Source], kept: Source, line: int) -> tuple[Source, int] | None:
    """The function that a thread begins in, since it is handed to somebody or named so, and its line that leads to this
    one of a function that it alone calls."""
    for _ in range(_BEYOND):
        name = function_name(kept)
        if name == "run" or any(name in _handed_on(one) for one in sources):
            return kept, line
        callers = [
            (one, at) for one in sources if one is not kept for at, word in _calls(parsed(one.text)) if word == name
        ]
        if len({id(one) for one, _ in callers}) != 1:
            return None
        kept, line = callers[0]
    return None


@cache
def _handed_on(kept: Source) -> frozenset[str]:
    """Names and attributes that are given to a call."""
    calls = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.Call)]
    given = [each for one in calls for each in (*one.args, *(word.value for word in one.keywords))]
    names = (one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in given)
    return frozenset(names)


def _left_at(kept: Source, line: int) -> Place:
    block = next((one for one in ast.walk(parsed(kept.text)) if isinstance(one, _Loop)), _body(kept))
    last = kept.text.count("\n") + 1
    exits = (one.line for one in _jumps(kept, block, last, (ast.Break, ast.Return)) if one.catches)
    at = next(exits, line + kept.first - 1)
    return Place(file=kept.file, line=at, function=function_name(kept))


def also_taken_at(sources: Sequence[Source], wanted: Place | Frame) -> Place | None:
    """The only other function of the file that holds the lock which this line takes."""
    kept = excerpt(sources, wanted.file, wanted.line)
    locks = locks_wanted(sources, wanted)
    others = [one for one in sources if kept and one.file == kept.file and one is not kept]
    taken = [
        Place(file=one.file, line=by.lineno + one.first - 1, function=function_name(one))
        for one in others
        for lock, by in _locks(one)
        if lock in locks
    ]
    return taken[0] if len({one.function for one in taken}) == 1 else None


def locks_wanted(sources: Sequence[Source], wanted: Place | Frame) -> frozenset[str]:
    """Those that this line takes, as it names them."""
    kept = excerpt(sources, wanted.file, wanted.line)
    at = (wanted.line or 0) + 1 - kept.first if kept else 0
    return frozenset(lock for lock, one in _locks(kept) if one.lineno == at) if kept else frozenset()


def kept_at(sources: Sequence[Source], wanted: Place | Frame) -> Place | None:
    """Where a function of the file leaves with the lock that the line takes: taken by a call, and not given back."""
    locks = locks_wanted(sources, wanted)
    found = (
        Place(file=kept.file, line=line + kept.first - 1, function=function_name(kept))
        for kept in sources
        if kept.file == wanted.file
        for lock, taken in _locks(kept)
        if lock in locks and isinstance(taken, ast.Call)
        for line in _leaving(kept, lock, taken.lineno)
    )
    return next(found, None)


def _leaving(kept: Source, lock: str, taken: int) -> Iterator[int]:
    """Lines that return or raise before the lock is given back, if it is not in a `finally`."""
    gives = [one for one in _methods(kept, ("release",)) if ast.unparse(one.func).removesuffix(".release") == lock]
    finals = [each for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.Try) for each in one.finalbody]
    back = [] if any(one in ast.walk(each) for each in finals for one in gives) else [one.lineno for one in gives]
    for guard, _ in _guards(_body(kept), nested=False):
        jump = next((one for one in guard.body if isinstance(one, ast.Return | ast.Raise)), None)
        given = any(guard.lineno <= line <= (guard.end_lineno or 0) for line in back)
        if jump is not None and not given and taken < jump.lineno < max(back, default=0):
            yield jump.lineno


def _body(kept: Source) -> ast.AST:
    """The function that it is, else the whole."""
    tree = parsed(kept.text)
    return next((one for one in ast.iter_child_nodes(tree) if isinstance(one, Function)), tree)
