"""Analyse one function of the user's program through its syntax tree."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from textwrap import dedent

from nsa_harness.core.evidence.evidence import Frame, Source
from nsa_harness.core.report import Place

_RANK = re.compile(
    r"rank|(?:is|main|on)_?(?:main|master|primary|leader|chief|coordinator)|(?:main|master)_?proc|process_zero", re.I
)
_COUNTS = re.compile(r"(?:itertools\.)?(?:range|count|enumerate)\(")
_SETTING = re.compile(r"(?:^|\.)(?:args?|cfg|conf|config|opts?|options|hparams?|hp|settings|params)[.\[]")
_END_OF_HEAD = re.compile(r":\s*(?:#.*)?$")
_FILLED = (ast.List, ast.Dict, ast.Set)
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)

LoopNode = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
_Holder = ast.If | ast.ExceptHandler | LoopNode | Function


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A condition, exception handler or jump that determines whether a line is reached."""

    file: str
    line: int
    function: str
    text: str  # "if rank == 0", "if rank == 0 … else", "except ValueError", "continue"
    reads_rank: bool  # the condition reads the rank
    leaves_block: bool  # the branch is before the line, and its block leaves the loop or the function
    leaves_function: (
        bool  # its block leaves the function, so a thread that is further down in this call did not take it
    )
    may_differ: bool  # the condition reads more than loop counters and settings, which are the same on every rank
    is_handler: bool  # the branch is an `except`
    continues_at: int  # line of the branch; for an `except` that leaves, line of its jump
    is_else: bool = False  # the line is reached if the condition is false

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A `for` or `while` loop of the user's program."""

    file: str
    line: int
    last: int
    function: str
    iterates_items: bool  # the loop iterates over items, such as batches, and does not only count
    exits: tuple[Branch, ...]  # conditions and handlers that end the loop early
    exits_by_exception: tuple[Branch, ...]  # exits by an exception that is not named an error, which a caller catches
    skips: tuple[Branch, ...]  # handlers around the requested line that continue with the next iteration

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)

    def contains(self, line: Frame) -> bool:
        return line.file == self.file and self.line <= line.line <= self.last


@dataclass(frozen=True, kw_only=True)
class Excerpt(Source):
    """A function or module-level statement of the user's program, with its syntax tree."""

    @classmethod
    def from_source(cls, source: Source) -> Excerpt:
        return cls(file=source.file, first=source.first, text=source.text)

    @cached_property
    def last(self) -> int:
        return self.first + self.text.count("\n")

    @property
    def tree(self) -> ast.Module:
        return parse_excerpt(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def function(self) -> Function | None:
        """The function in this excerpt, or None if it is a module-level statement."""
        return next((node for node in self.nodes if isinstance(node, Function)), None)

    @property
    def name(self) -> str:
        return self.function.name if self.function else "<module>"

    @cached_property
    def body(self) -> ast.AST:
        """The syntax node of the function, or the whole tree if there is no function."""
        return next((node for node in ast.iter_child_nodes(self.tree) if isinstance(node, Function)), self.tree)

    @cached_property
    def calls(self) -> tuple[tuple[int, str], ...]:
        """The line and name of each function or method that the excerpt calls."""
        return tuple((line + self.first - 1, name) for line, name in calls_in(self.nodes))

    @cached_property
    def names_passed_to_calls(self) -> frozenset[str]:
        """The names and attributes that occur as call arguments in the excerpt."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        values = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
        names = (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "") for value in values)
        return frozenset(names)

    def line_of(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> int:
        return node.lineno + self.first - 1

    def place(self, node: ast.stmt | ast.expr) -> Place:
        return Place(file=self.file, line=self.line_of(node), function=self.name)

    def method_calls(self, names: Sequence[str]) -> Iterator[ast.Call]:
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                yield node

    def blocks_around(self, line: int) -> list[_Holder]:
        """Return the conditions, handlers, loops and functions that contain a line, innermost first."""
        at = line + 1 - self.first
        blocks = [node for node in self.nodes if isinstance(node, _Holder)]
        return sorted(
            (block for block in blocks if block.lineno <= at <= (block.end_lineno or 0)),
            key=lambda block: -block.lineno,
        )

    def branches(self, line: int) -> tuple[Branch, ...]:
        """Return the branches that determine whether the line is reached.

        The conditions around the line come first, then the handlers around it, then earlier jumps in its loop.
        """
        around = self.blocks_around(line)
        blocks = (block for block in around if isinstance(block, ast.If | ast.While))
        tests = [self._test(block, line) for block in blocks if not _is_main_guard(block.test)]
        handlers = [self._branch(block, block.type) for block in around if isinstance(block, ast.ExceptHandler)]
        loop = next((block for block in around if isinstance(block, LoopNode)), None)
        block = loop or next((block for block in around if isinstance(block, Function)), None)
        return (*tests, *handlers, *(self._jumps(block, line - self.first) if block is not None else ()))

    def are_alternatives(self, line: int, other: int) -> bool:
        """Return whether a rank might execute only one of two lines, because of the conditions around them.

        That is the case in different branches of one `if`, `try` or `match`; if one line is in a branch that ends with
        a jump, and the other comes after it; and possibly if each line has a condition of its own.
        """
        first, second = sorted(each + 1 - self.first for each in (line, other))
        conditions: tuple[set[int], set[int]] = (set(), set())
        for node in self.nodes:
            branches = _branches_of(node)
            inside = [
                next((at for at, branch in enumerate(branches) if _contains(branch, each)), None)
                for each in (first, second)
            ]
            if isinstance(node, ast.If):
                for own, at in zip(conditions, inside, strict=True):
                    own.update([node.lineno] if at is not None else [])
            if inside[0] is None or inside[0] == inside[1]:
                continue
            if inside[1] is not None or isinstance(branches[inside[0]][-1], _JUMPS):
                return True
        return bool(conditions[0] - conditions[1]) and bool(conditions[1] - conditions[0])

    def tests_between(self, line: int, other: int) -> Iterator[ast.If]:
        """Yield the `if` statements that have one line in their body and the other in their `else` part."""
        first, second = sorted(each + 1 - self.first for each in (line, other))
        for node in self.nodes:
            if isinstance(node, ast.If) and _contains(node.body, first) and _contains(node.orelse, second):
                yield node

    def handlers(self, line: int) -> tuple[Branch, ...]:
        """Return the exception handlers in the innermost loop around the line, or else in the line's function.

        A handler that contains a jump, such as `break` or `return`, has the line of this jump.
        """
        around = self.blocks_around(line)
        block = next((block for block in around if isinstance(block, LoopNode)), next(iter(around[-1:]), None))
        return tuple(self._handlers(block)) if block else ()

    def _handlers(self, block: ast.AST) -> Iterator[Branch]:
        for guard, is_nested in _guards(block, nested=False):
            if isinstance(guard, ast.ExceptHandler) and not is_nested:
                jump = next((statement for statement in guard.body if isinstance(statement, _JUMPS)), guard)
                yield replace(self._branch(guard, guard.type), line=self.line_of(jump))

    def handler_that_continues(self, line: int) -> Branch | None:
        """Return the nearest handler that catches exceptions from the line and does not raise, or None if there is
        none.
        """
        at = line + 1 - self.first
        try_blocks = [node for node in self.nodes if isinstance(node, ast.Try)]
        around = [node for node in try_blocks if node.body[0].lineno <= at <= (node.body[-1].end_lineno or 0)]
        handlers = (handler for block in sorted(around, key=lambda block: -block.lineno) for handler in block.handlers)
        staying = (
            handler for handler in handlers if not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
        )
        return next((self._branch(handler, handler.type) for handler in staying), None)

    def loops_around(self, line: int) -> tuple[Loop, ...]:
        """Return the loops that contain the line, innermost first."""
        return tuple(self._loop(block, line) for block in self.blocks_around(line) if isinstance(block, LoopNode))

    def _loop(self, loop: LoopNode, line: int) -> Loop:
        counts = None if isinstance(loop, ast.While) else _COUNTS.match(ast.unparse(loop.iter))
        items = not isinstance(loop, ast.While) and (counts is None or counts[0].startswith("enumerate"))
        end = loop.end_lineno or 0
        return Loop(
            file=self.file,
            line=self.line_of(loop),
            last=(loop.end_lineno or loop.lineno) + self.first - 1,
            function=self.name,
            iterates_items=items,
            exits=tuple(self._jumps(loop, end, (ast.Break, ast.Return))),
            exits_by_exception=tuple(self._jumps(loop, end, (ast.Raise,), errors=False)),
            skips=tuple(self._skips(loop, line + 1 - self.first)),
        )

    def _skips(self, loop: LoopNode, line: int) -> Iterator[Branch]:
        """Yield the exception handlers that can make an iteration of the loop skip the line."""
        try_blocks = [node for node in ast.walk(loop) if isinstance(node, ast.Try)]
        bodies = {id(handler): node.body for node in try_blocks for handler in node.handlers}
        for guard, is_nested in _guards(loop, nested=False):
            if not isinstance(guard, ast.ExceptHandler) or id(guard) not in bodies or is_nested:
                continue
            body = bodies[id(guard)]
            jump = next((statement for statement in guard.body if isinstance(statement, _JUMPS)), None)
            inside = body[0].lineno <= line <= (body[-1].end_lineno or 0) and not isinstance(jump, ast.Raise)
            if inside or (isinstance(jump, ast.Continue) and (guard.end_lineno or 0) < line):
                yield replace(self._branch(guard, guard.type), line=self.line_of(jump or guard))

    def _jumps(
        self, block: ast.AST, line: int, kinds: tuple[type[ast.stmt], ...] = _JUMPS, *, errors: bool = True
    ) -> Iterator[Branch]:
        """Yield the branches before the line that contain a jump out of the block.

        With `errors` false, a `raise` of an error does not count.
        """
        for guard, is_nested in _guards(block, nested=False):
            leaves = tuple(kind for kind in kinds if not is_nested or kind not in (ast.Continue, ast.Break))
            jumps = [
                statement
                for statement in guard.body
                if isinstance(statement, leaves) and (errors or not _raises_error(statement))
            ]
            if jumps and (guard.end_lineno or 0) <= line:
                ends = not any(isinstance(statement, ast.Continue | ast.Break) for statement in guard.body)
                branch = self._branch(guard, guard.test if isinstance(guard, ast.If) else guard.type, leaves=True)
                yield replace(
                    branch,
                    leaves_function=ends,
                    continues_at=self.line_of(jumps[0]) if branch.is_handler else branch.line,
                )

    def _test(self, block: ast.If | ast.While, line: int) -> Branch:
        """Return the branch for a condition around the line, which may be in the `else` part of an `if`."""
        branch = self._branch(block, block.test)
        is_else = isinstance(block, ast.If) and _contains(block.orelse, line + 1 - self.first)
        return replace(branch, is_else=True, text=f"{branch.text} … else") if is_else else branch

    def _branch(self, node: ast.stmt | ast.ExceptHandler, test: ast.expr | None, *, leaves: bool = False) -> Branch:
        return Branch(
            file=self.file,
            line=self.line_of(node),
            function=self.name,
            text=_END_OF_HEAD.sub("", self.text.splitlines()[node.lineno - 1].strip())[:120],
            reads_rank=test is not None and self.reads_rank(test),
            leaves_block=leaves,
            leaves_function=False,
            may_differ=test is None or self._varies(test),
            is_handler=isinstance(node, ast.ExceptHandler),
            continues_at=self.line_of(node),
        )

    def reads_rank(self, test: ast.expr) -> bool:
        """Return whether the condition depends on the rank, directly or through a variable."""
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        assigned_values = [
            node.value
            for node in self.nodes
            if isinstance(node, ast.Assign)
            and any(isinstance(each, ast.Name) and each.id in names for each in node.targets)
        ]
        return any(names_rank(ast.unparse(expression)) for expression in (test, *assigned_values))

    def _varies(self, test: ast.expr) -> bool:
        constant = (name for name, value in self._assigned_once if not _varying_names(value, self._counters))
        return bool(_varying_names(test, self._counters) - self._counters.union(constant))

    @cached_property
    def _counters(self) -> set[str]:
        return {
            name.id
            for node in self.nodes
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _COUNTS.match(ast.unparse(node.iter))
            for name in _first_names(node.target)
        }

    @cached_property
    def _assigned_once(self) -> tuple[tuple[str, ast.expr], ...]:
        """The name and value of each variable that is assigned exactly once."""
        counts = Counter(
            node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        counts.update(node.arg for node in self.nodes if isinstance(node, ast.arg))
        assignments = (node for node in self.nodes if isinstance(node, ast.Assign) and len(node.targets) == 1)
        pairs = ((node.targets[0].id, node.value) for node in assignments if isinstance(node.targets[0], ast.Name))
        return tuple(
            (name, value)
            for name, value in pairs
            if counts[name] == 1 and not any(isinstance(node, _FILLED) for node in ast.walk(value))
        )

    def locks(self) -> Iterator[tuple[str, ast.With | ast.Call]]:
        """Yield (lock expression, syntax node) for each statement that takes a lock."""
        for node in self.nodes:
            if isinstance(node, ast.With):
                yield from ((ast.unparse(item.context_expr), node) for item in node.items)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "acquire":
                yield ast.unparse(node.func.value), node

    def exits_with_lock(self, lock: str, acquire_line: int) -> Iterator[int]:
        """Yield the lines that return or raise while the lock is held."""
        calls = [call for call in self.method_calls(("release",)) if ast.unparse(call.func) == f"{lock}.release"]
        finals = [statement for node in self.nodes if isinstance(node, ast.Try) for statement in node.finalbody]
        release_lines = (
            [] if any(call in ast.walk(each) for each in finals for call in calls) else [call.lineno for call in calls]
        )
        for guard, _ in _guards(self.body, nested=False):
            jump = next((statement for statement in guard.body if isinstance(statement, ast.Return | ast.Raise)), None)
            releases = any(guard.lineno <= line <= (guard.end_lineno or 0) for line in release_lines)
            if jump is not None and not releases and acquire_line < jump.lineno < max(release_lines, default=0):
                yield jump.lineno

    def early_exit(self, default: int) -> int:
        """Return the line at which an exception handler leaves its loop or function, or else `default`."""
        block = next((node for node in self.nodes if isinstance(node, LoopNode)), self.body)
        exits = self._jumps(block, self.text.count("\n") + 1, (ast.Break, ast.Return))
        return next((exit.line for exit in exits if exit.is_handler), default)


@lru_cache(maxsize=1024)
def parse_excerpt(text: str) -> ast.Module:
    """Return the syntax tree for a piece of source code, which can be indented."""
    return parse_python(dedent(text))


def parse_python(text: str) -> ast.Module:
    """Return the syntax tree for the text, or an empty tree if the text is not valid Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def calls_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function or method called in `nodes`."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.lineno, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id


def is_setting(text: str) -> bool:
    """Return whether the expression reads a setting, such as `args.batch_size`."""
    return _SETTING.search(text) is not None


def names_rank(text: str) -> bool:
    return _RANK.search(text) is not None


def _branches_of(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the statements in each branch of an `if`, `try` or `match`, or an empty list for other nodes."""
    if isinstance(node, ast.If):
        branches = [node.body, node.orelse]
    elif isinstance(node, ast.Try):
        branches = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
    elif isinstance(node, ast.Match):
        branches = [case.body for case in node.cases]
    else:
        return []
    return [branch for branch in branches if branch]


def _contains(branch: Sequence[ast.stmt], line: int) -> bool:
    return any(statement.lineno <= line <= (statement.end_lineno or 0) for statement in branch)


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _raises_error(jump: ast.stmt) -> bool:
    return isinstance(jump, ast.Raise) and (jump.exc is None or "Error" in ast.unparse(jump.exc))


def _guards(block: ast.AST, *, nested: bool) -> Iterator[tuple[ast.If | ast.ExceptHandler, bool]]:
    """Yield each `if` and exception handler in `block`, in source order, with whether it is inside a nested loop."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.If | ast.ExceptHandler):
            yield node, nested
        if not isinstance(node, Function | ast.Lambda):
            yield from _guards(node, nested=nested or isinstance(node, LoopNode))


def _varying_names(value: ast.expr, counters: Collection[str]) -> set[str]:
    """Return the names in `value` that can differ between ranks."""
    settings = {id(each) for node in ast.walk(value) if isinstance(node, ast.Attribute | ast.Subscript)
                for each in ast.walk(node.value) if is_setting(ast.unparse(node))}  # fmt: skip
    periods = (node.right for node in ast.walk(value) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))
    settings |= {id(node) for period in periods for node in ast.walk(period)}
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name) and id(node) not in settings]
    return {name for name in names if name not in counters and not name.isupper()}


def _first_names(target: ast.expr) -> Iterator[ast.Name]:
    """Yield the variable of a loop, or only the first of several, such as the counter of `enumerate`."""
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
    return (node for node in ast.walk(first) if isinstance(node, ast.Name))
