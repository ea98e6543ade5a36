"""Find the statements that only some ranks ran, and the branch that led those ranks there.

The coverage of a rank has each line once, when the rank executed it for the first time. If ranks part in a hang or a
failure, the last statements that only some of them executed are often the way that they took.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.coverage import Coverage, CoveredLine
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Excerpt, LoopNode
from nsa_harness.core.source_code.program_source import ProgramSource

_Key = tuple[str, int]  # file, and first line of a statement
_JUMPS = (ast.Break, ast.Continue, ast.Return, ast.Raise)


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """Statements that only some ranks executed, one after the other and for the first time, in one thread."""

    rank: int
    ranks: tuple[int, ...]  # the ranks that executed all of these statements, at any time
    at_s: float  # when `rank` executed the first of them
    is_main_thread: bool
    statements: tuple[Place, ...]
    branch: Place | None  # the statement that decided that this rank came here; None = unknown
    is_loop: bool  # `branch` is a loop, which this rank left and the others did not
    is_detour: bool  # it begins with an exception handler, or leaves `branch` by a jump: what comes next differs too

    @property
    def entry(self) -> Place:
        return self.statements[0]


def own_runs(
    coverages: Mapping[int, Coverage], program: ProgramSource, shared_s: Mapping[int, Sequence[float]]
) -> tuple[OwnRun, ...]:
    """Return the runs of statements that only some ranks executed, in the order in which they began.

    `coverages`: the coverage of each rank. `shared_s`: for each rank, the times at which it finished a collective. A
    run ends there, because the ranks are together again.
    """
    reader = _Reader(program, set(coverages))
    keyed = {
        rank: [(line, reader.key(line.file, line.line)) for line in coverage.lines()]
        for rank, coverage in sorted(coverages.items())
    }
    for rank, lines in keyed.items():
        for _, key in lines:
            reader.ranks_of.setdefault(key, set()).add(rank)
    ranks_of = reader.ranks_of
    runs = []
    for rank, lines in keyed.items():
        for sequence, before in _sequences(lines, ranks_of, shared_s.get(rank, ()), len(coverages)):
            first, entry = sequence[0]
            branch = reader.branch(entry) or (reader.jump_branch(before) if before else None)
            is_handler = isinstance(reader.node(entry), ast.ExceptHandler)
            runs.append(
                OwnRun(
                    rank=rank,
                    ranks=tuple(sorted(ranks_of[entry])),
                    at_s=first.at_s,
                    is_main_thread=coverages[rank].threads[first.thread] == "MainThread",
                    statements=tuple(reader.place(key) for key in dict.fromkeys(key for _, key in sequence)),
                    branch=reader.place(branch) if branch else None,
                    is_loop=branch is not None and isinstance(reader.node(branch), LoopNode),
                    is_detour=is_handler or any(reader.leaves(branch, key) for _, key in sequence),
                )
            )
    return tuple(sorted(runs, key=lambda run: run.at_s))


_KeyedLine = tuple[CoveredLine, _Key]


def _sequences(
    lines: Sequence[_KeyedLine], ranks_of: Mapping[_Key, set[int]], shared_s: Sequence[float], rank_count: int
) -> Iterator[tuple[list[_KeyedLine], _Key | None]]:
    """Yield each sequence of lines that only some ranks executed, and the statement that led there.

    This is the statement that the thread executed for the first time just before, or None if it finished a collective
    in between.
    """
    for thread in dict.fromkeys(line.thread for line, _ in lines):
        sequence: list[_KeyedLine] = []
        before: _Key | None = None
        last: _KeyedLine | None = None
        for line, key in (entry for entry in lines if entry[0].thread == thread):
            is_together = last is None or any(last[0].at_s < at_s < line.at_s for at_s in shared_s)
            if sequence and (is_together or ranks_of[sequence[-1][1]] != ranks_of[key]):
                yield sequence, before
                sequence = []
            if len(ranks_of[key]) < rank_count:
                if not sequence:
                    before = None if is_together or last is None else last[1]
                sequence.append((line, key))
            last = line, key
        if sequence:
            yield sequence, before


class _Reader:
    """Maps lines to statements, and statements to the branches that lead to them."""

    def __init__(self, program: ProgramSource, everyone: set[int]) -> None:
        self._program = program
        self._everyone = everyone
        self.ranks_of: dict[_Key, set[int]] = {}  # the ranks that executed a statement
        self._functions: dict[int, _Statements] = {}
        self._keys: dict[_Key, _Key] = {}

    def _statements(self, file: str, line: int) -> _Statements | None:
        excerpt = self._program.excerpt_at(file, line)
        if excerpt is None:
            return None
        if id(excerpt) not in self._functions:
            self._functions[id(excerpt)] = _Statements(excerpt)
        return self._functions[id(excerpt)]

    def key(self, file: str, line: int) -> _Key:
        """Return the statement that contains the line, or the line itself if its source is not stored."""
        if (file, line) not in self._keys:
            statements = self._statements(file, line)
            node = statements.innermost(line) if statements else None
            self._keys[file, line] = (file, statements.line_of(node)) if statements and node else (file, line)
        return self._keys[file, line]

    def place(self, key: _Key) -> Place:
        excerpt = self._program.excerpt_at(*key)
        return Place(file=key[0], line=key[1], function=excerpt.name if excerpt else None)

    def node(self, key: _Key) -> _Node | None:
        """Return the statement `key`, or None if its source is not stored."""
        statements = self._statements(*key)
        return statements.innermost(key[1]) if statements else None

    def leaves(self, branch: _Key | None, key: _Key) -> bool:
        """Return whether the statement `key` is a jump in the block of `branch`."""
        statements = self._statements(*branch) if branch else None
        if branch is None or statements is None or statements is not self._statements(*key):
            return False
        node, holder = statements.innermost(key[1]), statements.innermost(branch[1])
        return isinstance(node, _JUMPS) and holder is not None and statements.is_in(node, holder)

    def branch(self, key: _Key) -> _Key | None:
        """Return the statement that all ranks reached and that decides whether the statement `key` runs.

        Return None if there is none, because the other ranks may only have stopped before the statement `key`.
        """
        statements = self._statements(*key)
        node = statements.innermost(key[1]) if statements else None
        if statements is None or node is None:
            return None
        runners = {other: self.ranks_of.get((key[0], statements.line_of(other)), set()) for other in statements.nodes}
        deciding, is_first = statements.deciding(node, runners, self._everyone)
        if deciding is not None:
            return key[0], statements.line_of(deciding)
        callers = self._callers(statements.excerpt, self.ranks_of[key]) if is_first else set()
        caller = callers.pop() if len(callers) == 1 else None
        return caller if caller and self.ranks_of[caller] == self._everyone else None

    def jump_branch(self, key: _Key) -> _Key | None:
        """Return the branch around the statement `key` if this statement leaves a loop or function, otherwise None."""
        statements = self._statements(*key)
        node = statements.innermost(key[1]) if statements else None
        branch = statements.branch_around(node) if statements and isinstance(node, _JUMPS) else None
        return (key[0], statements.line_of(branch)) if statements and branch else None

    def _callers(self, callee: Excerpt, ranks: set[int]) -> set[_Key]:
        """Return the statements of the program that call a function of this name and that `ranks` executed."""
        keys = (
            self.key(excerpt.file, line)
            for excerpt in self._program.excerpts
            for line, name in excerpt.calls
            if name == callee.name
        )
        return {key for key in keys if ranks <= self.ranks_of.get(key, set())}


_Node = ast.stmt | ast.ExceptHandler
_Branch = ast.If | ast.ExceptHandler | LoopNode | ast.Match


class _Statements:
    """The statements of one stored function."""

    def __init__(self, excerpt: Excerpt) -> None:
        self.excerpt = excerpt
        self.nodes: list[_Node] = []
        self._parents: dict[_Node, _Node] = {}
        self._blocks: dict[_Node, list[_Node]] = {}
        self._add(excerpt.body, None)

    def _add(self, holder: ast.AST, parent: _Node | None) -> None:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(holder, name, ())
            for case in (child for child in children if isinstance(child, ast.match_case)):
                self._add(case, parent)
            block = [child for child in children if isinstance(child, _Node)]
            for node in block:
                if parent is not None:
                    self._parents[node] = parent
                if name != "handlers":
                    self._blocks[node] = block
                self.nodes.append(node)
                self._add(node, node)

    def innermost(self, line: int) -> _Node | None:
        at = line + 1 - self.excerpt.first
        around = [node for node in self.nodes if node.lineno <= at <= (node.end_lineno or 0)]
        return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)

    def deciding(self, node: _Node, runners: Mapping[_Node, set[int]], everyone: set[int]) -> tuple[_Node | None, bool]:
        """Return the statement that decides whether `node` runs, or None, and whether the function begins with `node`.

        `runners` has the ranks that executed each statement of the function.
        """
        if isinstance(node, ast.ExceptHandler):
            return node, False
        while True:
            for sibling in reversed(self._before(node)):
                if runners[sibling] == everyone:
                    return self._left_through(sibling, runners, runners[node]), False
            parent = self._parents.get(node)
            if parent is None:
                return None, True
            if isinstance(parent, ast.ExceptHandler) or (isinstance(parent, _Branch) and runners[parent] == everyone):
                return parent, False
            node = parent

    def _left_through(self, statement: _Node, runners: Mapping[_Node, set[int]], ranks: set[int]) -> _Node | None:
        """Return the branch in `statement` through which the other ranks left the block, or None if there is none."""
        jumps = [node for node in self.nodes if isinstance(node, _JUMPS) and self.is_in(node, statement)]
        taken = [jump for jump in jumps if runners[jump] - ranks]
        if taken:
            return self.branch_around(taken[0])
        return statement if isinstance(statement, LoopNode) else None

    def branch_around(self, node: _Node) -> _Node | None:
        """Return the innermost branch, handler or loop that contains `node`, or None if there is none."""
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, _Branch):
            parent = self._parents.get(parent)
        return parent

    def is_in(self, node: _Node, holder: _Node) -> bool:
        parent = self._parents.get(node)
        while parent is not None and parent is not holder:
            parent = self._parents.get(parent)
        return parent is holder

    def _before(self, node: _Node) -> list[_Node]:
        """Return the statements before `node` in its block."""
        block = self._blocks.get(node, [node])
        return block[: block.index(node)]

    def line_of(self, node: _Node) -> int:
        return self.excerpt.line_of(node)
