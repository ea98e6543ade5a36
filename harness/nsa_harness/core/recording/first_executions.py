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
from nsa_harness.core.source_code.program_source import MAX_CALLS, ProgramSource

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
    branch: Place | None  # the statement that all ranks reached and that led here; None = unknown
    before: Place | None  # the statement that the thread executed for the first time before these

    @property
    def entry(self) -> Place:
        return self.statements[0]


def own_runs(
    coverages: Mapping[int, Coverage], program: ProgramSource, shared_s: Mapping[int, Sequence[float]]
) -> tuple[OwnRun, ...]:
    """Return the runs of statements that only some ranks executed, in the order in which they began.

    `coverages`: the coverage of each rank. `shared_s`: for each rank, the times at which it finished a collective; a
    run ends there, because ranks that communicate are together again.
    """
    if len(coverages) < 2:
        return ()
    reader = _Reader(program)
    keyed = {
        rank: [(line, reader.key(line)) for line in coverage.lines()] for rank, coverage in sorted(coverages.items())
    }
    ranks_of: dict[_Key, set[int]] = {}
    for rank, lines in keyed.items():
        for _, key in lines:
            ranks_of.setdefault(key, set()).add(rank)
    runs = [
        _run(rank, lines, before, ranks_of, reader, main_thread=coverages[rank].threads[lines[0][0].thread])
        for rank, keyed_lines in keyed.items()
        for lines, before in _sequences(keyed_lines, ranks_of, len(coverages), shared_s.get(rank, ()))
    ]
    return tuple(sorted(runs, key=lambda run: run.at_s))


_KeyedLine = tuple[CoveredLine, _Key]


def _sequences(
    lines: Sequence[_KeyedLine], ranks_of: Mapping[_Key, set[int]], rank_count: int, shared_s: Sequence[float]
) -> Iterator[tuple[list[_KeyedLine], CoveredLine | None]]:
    """Yield each sequence of lines that only some ranks executed, and the line of its thread before it."""
    for thread in dict.fromkeys(line.thread for line, _ in lines):
        sequence: list[_KeyedLine] = []
        before: CoveredLine | None = None
        last: _KeyedLine | None = None
        for line, key in ((line, key) for line, key in lines if line.thread == thread):
            is_own = len(ranks_of[key]) < rank_count
            continues = (
                is_own
                and sequence
                and last is not None
                and ranks_of[sequence[-1][1]] == ranks_of[key]
                and not any(last[0].at_s < at_s < line.at_s for at_s in shared_s)
            )
            if sequence and not continues:
                yield sequence, before
                sequence = []
            if is_own:
                if not sequence:
                    before = last[0] if last else None
                sequence.append((line, key))
            last = line, key
        if sequence:
            yield sequence, before


def _run(
    rank: int,
    lines: Sequence[_KeyedLine],
    before: CoveredLine | None,
    ranks_of: Mapping[_Key, set[int]],
    reader: _Reader,
    *,
    main_thread: str,
) -> OwnRun:
    keys = tuple(dict.fromkeys(key for _, key in lines))
    before_key = reader.key(before) if before else None
    return OwnRun(
        rank=rank,
        ranks=tuple(sorted(ranks_of[keys[0]])),
        at_s=lines[0][0].at_s,
        is_main_thread=main_thread == "MainThread",
        statements=tuple(reader.place(key) for key in keys),
        branch=reader.branch(keys[0], ranks_of),
        before=reader.place(before_key) if before_key else None,
    )


class _Reader:
    """Maps lines to statements, and statements to the branches that lead to them."""

    def __init__(self, program: ProgramSource) -> None:
        self._program = program
        self._functions: dict[int, _Statements] = {}

    def _statements(self, file: str, line: int) -> _Statements | None:
        excerpt = self._program.excerpt_at(file, line)
        if excerpt is None:
            return None
        return self._functions.setdefault(id(excerpt), _Statements(excerpt))

    def key(self, line: CoveredLine) -> _Key:
        statements = self._statements(line.file, line.line)
        node = statements.innermost(line.line) if statements else None
        return (line.file, statements.line_of(node)) if statements and node else (line.file, line.line)

    def place(self, key: _Key) -> Place:
        excerpt = self._program.excerpt_at(*key)
        return Place(file=key[0], line=key[1], function=excerpt.name if excerpt else None)

    def branch(self, key: _Key, ranks_of: Mapping[_Key, set[int]]) -> Place | None:
        """Return the statement that all ranks reached and that decides whether the statement `key` runs.

        Return None if there is none: the other ranks may only have stopped before the statement.
        """
        everyone = set().union(*ranks_of.values())
        for _ in range(MAX_CALLS):
            statements = self._statements(*key)
            node = statements.innermost(key[1]) if statements else None
            if statements is None or node is None:
                return None
            runners = {other: ranks_of.get((key[0], statements.line_of(other)), set()) for other in statements.nodes}
            deciding, is_first = statements.deciding(node, runners, everyone)
            if deciding is not None or not is_first:
                return self.place((key[0], statements.line_of(deciding))) if deciding else None
            callers = self._callers(statements.excerpt, ranks_of[key], ranks_of)
            if len(callers) != 1:
                return None
            (key,) = callers
            if ranks_of[key] == everyone:
                return self.place(key)
        return None

    def _callers(self, callee: Excerpt, ranks: set[int], ranks_of: Mapping[_Key, set[int]]) -> set[_Key]:
        """Return the statements of the program that call a function of this name and that `ranks` executed."""
        lines = (
            self.key(CoveredLine(file=excerpt.file, line=line, thread=0, at_s=0.0))
            for excerpt in self._program.excerpts
            for line, name in excerpt.calls
            if name == callee.name
        )
        return {key for key in lines if ranks <= ranks_of.get(key, set())}


_Node = ast.stmt | ast.ExceptHandler


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
            block = [node for node in getattr(holder, name, ()) if isinstance(node, ast.AST)]
            for node in block:
                if isinstance(node, ast.match_case):
                    self._add(node, parent)
                elif isinstance(node, _Node):
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
        while True:
            for sibling in reversed(self._before(node)):
                if runners[sibling] == everyone:
                    return self._left_through(sibling, runners, runners[node]), False
            parent = self._parents.get(node)
            if parent is None:
                return None, True
            if isinstance(parent, ast.ExceptHandler) or (
                isinstance(parent, ast.If | LoopNode | ast.Match) and runners[parent] == everyone
            ):
                return parent, False
            node = parent

    def _left_through(self, statement: _Node, runners: Mapping[_Node, set[int]], ranks: set[int]) -> _Node | None:
        """Return the branch in `statement` through which the other ranks left the block, or None if there is none."""
        jumps = [node for node in self.nodes if isinstance(node, _JUMPS) and self._is_in(node, statement)]
        taken = [jump for jump in jumps if runners[jump] - ranks]
        for jump in taken:
            parent = self._parents.get(jump)
            while parent is not None and not isinstance(parent, ast.If | ast.ExceptHandler | LoopNode | ast.Match):
                parent = self._parents.get(parent)
            return parent
        return statement if isinstance(statement, LoopNode) else None

    def _is_in(self, node: _Node, holder: _Node) -> bool:
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
