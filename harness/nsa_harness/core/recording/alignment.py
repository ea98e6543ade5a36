"""Align the executions of all ranks, and find where ranks took different ways.

Execution indexing (Xin, Sumner and Zhang, 2008): equal statements of aligned activations are aligned, and so are their
calls. Where the next statements differ, the statement before is a parting. The ranks are aligned again from the
statement that all ways pass, the immediate post-dominator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from nsa_harness.core.recording.trace import Ending, Function, Trace

_EXIT = 0  # no statement has this line

Row = dict[int, int]  # by number of the trace: its execution


@dataclass(frozen=True)
class Arm:
    """The executions of one rank between a parting and the point where the ranks meet again."""

    next_line: int | None  # None: its activation ended
    ending: Ending | None  # how the activation ended; None: it went on
    first: int  # range of executions, of which the second is not included
    end: int
    meets: bool  # the rank meets another way again


@dataclass(frozen=True, eq=False)
class Parting:
    """An execution after which ranks took different ways."""

    row: Row
    arms: dict[int, Arm]
    is_call: bool = False  # the ranks called different functions in this statement

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The traces that go each way, largest way first."""
        ways: defaultdict[tuple[int | None, Ending | None], list[int]] = defaultdict(list)
        for trace, arm in self.arms.items():
            ways[arm.next_line, arm.ending].append(trace)
        return tuple(sorted(map(tuple, ways.values()), key=lambda way: (-len(way), way)))


@dataclass
class Alignment:
    """Executions that correspond to each other."""

    traces: Sequence[Trace]
    rows: list[Row] = field(default_factory=list)
    row_of: list[list[int]] = field(default_factory=list)  # by trace and execution: the row, or -1
    partings: list[Parting] = field(default_factory=list)

    def counterpart(self, trace: int, execution: int, other: int) -> int | None:
        """Return the execution of the trace `other` that corresponds to this one, or None if there is none."""
        row = self.row_of[trace][execution]
        return self.rows[row].get(other) if row >= 0 else None


@dataclass
class _Segment:
    """Positions of activations of one function that are to be aligned."""

    activations: dict[int, int]  # by trace
    positions: dict[int, int]
    stops: dict[int, int]
    before: Row  # the row that led here


def align(traces: Sequence[Trace], flow: ControlFlow) -> Alignment:
    """Align the traces. Takes time about linear in the number of executions."""
    alignment = Alignment(traces, row_of=[[-1] * len(trace.executions) for trace in traces])
    aligner = _Aligner(alignment, flow)
    roots = [
        ((name, *trace.function(activation)), number, activation)
        for number, trace in enumerate(traces)
        for name, activations in trace.roots
        for activation in activations
    ]
    aligner.align_calls(roots, {})
    aligner.run()
    alignment.partings = [parting for parting in alignment.partings if len(parting.ways) > 1]
    alignment.partings.sort(key=lambda parting: parting.row[min(parting.row)])
    return alignment


@dataclass
class _Aligner:
    alignment: Alignment
    flow: ControlFlow
    waiting: list[_Segment] = field(default_factory=list)
    _positions: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)

    def run(self) -> None:
        while self.waiting:
            self._align(self.waiting.pop())

    def align_calls(self, calls: Sequence[tuple[tuple[object, ...], int, int]], before: Row) -> None:
        """Align the n-th call of a function on each rank. `calls`: function, trace and activation of each call."""
        counts: defaultdict[tuple[object, ...], int] = defaultdict(int)
        groups: defaultdict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
        for key, number, activation in calls:
            counts[key, number] += 1
            groups[key, counts[key, number]][number] = activation
        for members in reversed(groups.values()):
            if len(members) > 1:
                self.waiting.append(
                    _Segment(
                        members,
                        dict.fromkeys(members, 0),
                        {number: len(self._members(number, activation)) for number, activation in members.items()},
                        before,
                    )
                )
        if before and any(len(members) < len(before) for members in groups.values()):
            self._part_in_calls(before)

    def _part_in_calls(self, row: Row) -> None:
        traces = self.alignment.traces
        calls = {number: traces[number].calls.get(execution, []) for number, execution in row.items()}
        functions = {number: [traces[number].function(call) for call in called] for number, called in calls.items()}
        most = max(map(len, calls.values()))
        # The calls before the first in which the ranks differ are the same.
        first = next(
            (index for index, made in enumerate(zip(*functions.values(), strict=False)) if len(set(made)) > 1), 0
        )
        arms = {}
        for number, execution in row.items():
            called = calls[number]
            # A rank that waits in a call had no chance to make as many calls as the others.
            waits = len(called) < most and not traces[number].activations[called[-1]].ended if called else False
            following = traces[number].activations[called[first]].first_line if called else None
            ending = Ending.RUNNING if waits else None
            arms[number] = Arm(following, ending, execution, traces[number].end_of(execution), not waits)
        if len({arm.next_line for arm in arms.values()}) == 1:
            # The same functions first: what differs is how often they were called.
            arms = {number: replace(arm, next_line=len(calls[number])) for number, arm in arms.items()}
        self.alignment.partings.append(Parting(row, arms, is_call=True))

    def _members(self, number: int, activation: int) -> list[int]:
        return self.alignment.traces[number].members[activation]

    def _align(self, segment: _Segment) -> None:
        traces, rows = self.alignment.traces, self.alignment.rows
        cursors = [
            (number, self._members(number, activation), traces[number].executions, self.alignment.row_of[number])
            for number, activation in segment.activations.items()
        ]
        start = dict(segment.positions)
        length = min(segment.stops[number] - start[number] for number in start)
        before = segment.before
        offsets = [start[number] for number in segment.activations]
        (_, first_members, first_executions, _), first_offset = cursors[0], offsets[0]
        done = 0
        while done < length:
            line = first_executions[first_members[first_offset + done]].line
            if any(
                executions[members[offset + done]].line != line
                for (_, members, executions, _), offset in zip(cursors[1:], offsets[1:], strict=True)
            ):
                break
            row = {}
            has_calls = False
            for (number, members, executions, row_of), offset in zip(cursors, offsets, strict=True):
                execution = members[offset + done]
                row[number] = execution
                row_of[execution] = len(rows)
                has_calls = has_calls or bool(executions[execution].calls)
            rows.append(row)
            before = row
            if has_calls:
                self.align_calls(
                    [
                        (traces[number].function(call), number, call)
                        for number, execution in row.items()
                        for call in traces[number].calls.get(execution, ())
                    ],
                    row,
                )
            done += 1
        positions = {number: position + done for number, position in start.items()}
        if any(positions[number] < stop for number, stop in segment.stops.items()):
            self._part(segment, positions, before)

    def _part(self, segment: _Segment, positions: dict[int, int], before: Row) -> None:
        """Record a parting, and align each way up to the point where they meet and from there on."""
        traces = self.alignment.traces
        next_lines = {
            number: self._line(number, segment.activations[number], position) for number, position in positions.items()
        }
        meeting = self._meeting(segment, positions, next_lines)
        arms = {}
        for number, position in positions.items():
            activation, stop = segment.activations[number], meeting.get(number, segment.stops[number])
            first, end = traces[number].range_of(activation, position, stop)
            ending = None if next_lines[number] is not None else traces[number].ending(activation)
            arms[number] = Arm(next_lines[number], ending, first, end, number in meeting)
        if before:
            row = {number: before[number] for number in positions if number in before}
            self.alignment.partings.append(Parting(row, arms))
        if meeting:
            rest = {number: segment.stops[number] for number in meeting}
            self._wait(segment, meeting, rest, before, list(meeting))
        ways: defaultdict[int | None, list[int]] = defaultdict(list)
        for number, line in next_lines.items():
            if line is not None:
                ways[line].append(number)
        for way in ways.values():
            stops = {number: meeting.get(number, segment.stops[number]) for number in way}
            self._wait(
                segment, positions, stops, before, [number for number in way if positions[number] < stops[number]]
            )

    def _wait(
        self, segment: _Segment, positions: dict[int, int], stops: dict[int, int], before: Row, numbers: Sequence[int]
    ) -> None:
        if len(numbers) > 1:
            self.waiting.append(
                _Segment(
                    {number: segment.activations[number] for number in numbers},
                    {number: positions[number] for number in numbers},
                    {number: stops[number] for number in numbers},
                    {number: before[number] for number in numbers if number in before},
                )
            )

    def _line(self, number: int, activation: int, position: int) -> int | None:
        members = self._members(number, activation)
        return self.alignment.traces[number].executions[members[position]].line if position < len(members) else None

    def _meeting(
        self, segment: _Segment, positions: dict[int, int], next_lines: dict[int, int | None]
    ) -> dict[int, int]:
        """Return the position of each rank at which different ways meet again, or {} if they do not meet."""
        function = self._function(segment)
        number = min(positions)
        members = self._members(number, segment.activations[number])
        if positions[number] == 0:
            return {}
        line = self.alignment.traces[number].executions[members[positions[number] - 1]].line
        for meeting in self.flow.meetings(function, line):
            found = {}
            for number, position in positions.items():
                where = self._next(number, segment.activations[number], meeting, position)
                if where is not None and where < segment.stops[number]:
                    found[number] = where
            if len({next_lines[number] for number in found}) > 1:
                return found
        return {}

    def _function(self, segment: _Segment) -> Function:
        number, activation = next(iter(segment.activations.items()))
        return self.alignment.traces[number].function(activation)

    def _next(self, number: int, activation: int, line: int, position: int) -> int | None:
        """Return the first position of the line at or after `position`, or None if there is none."""
        if (number, activation) not in self._positions:
            positions: defaultdict[int, list[int]] = defaultdict(list)
            for index, execution in enumerate(self._members(number, activation)):
                positions[self.alignment.traces[number].executions[execution].line].append(index)
            self._positions[number, activation] = positions
        found = self._positions[number, activation].get(line, [])
        index = bisect_left(found, position)
        return found[index] if index < len(found) else None


class ControlFlow:
    """The order of the statements of each function, as observed on any rank.

    The observed order needs no source code, and it includes what `with`, `finally` and exceptions do.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._following: defaultdict[Function, set[tuple[int, int]]] = defaultdict(set)
        self._returned: defaultdict[Function, set[int]] = defaultdict(set)  # last lines of activations that returned
        self._stopped: defaultdict[Function, set[int]] = defaultdict(set)  # last lines of all others
        for trace in traces:
            for index, members in enumerate(trace.members):
                if members:
                    function = trace.function(index)
                    lines = [trace.executions[execution].line for execution in members]
                    self._following[function].update(pairwise(lines))
                    ends = self._returned if trace.ending(index) is Ending.RETURNED else self._stopped
                    ends[function].add(lines[-1])
        self._meeting = cache(self._post_dominators)

    def meetings(self, function: Function, line: int) -> Iterator[int]:
        """Yield the lines that all ways from the line to the end of the function pass, nearest first."""
        meeting = self._meeting(function)
        while (line := meeting.get(line, _EXIT)) != _EXIT:
            yield line

    def _post_dominators(self, function: Function) -> dict[int, int]:
        before: defaultdict[int, set[int]] = defaultdict(set)
        for line, following in self._following[function]:
            before[following].add(line)
        before[_EXIT] = set(self._returned[function]) or set(self._stopped[function])
        reached = _order(before)
        for line in self._stopped[function]:
            if line not in reached:
                before[_EXIT].add(line)
        return _immediate_dominators(before)


def _order(before: defaultdict[int, set[int]]) -> dict[int, int]:
    """Return the lines from which the exit is reached, each with its number in post-order from the exit."""
    numbers: dict[int, int] = {}
    visited = {_EXIT}
    stack = [(_EXIT, iter(sorted(before[_EXIT])))]
    while stack:
        line, remaining = stack[-1]
        for other in remaining:
            if other not in visited:
                visited.add(other)
                stack.append((other, iter(sorted(before[other]))))
                break
        else:
            numbers[line] = len(numbers)
            stack.pop()
    return numbers


def _immediate_dominators(before: defaultdict[int, set[int]]) -> dict[int, int]:
    """Return the immediate dominator of each line in the graph of edges from a line to the lines before it.

    Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm", 2001.
    """
    numbers = _order(before)
    after: defaultdict[int, list[int]] = defaultdict(list)
    for line in numbers:
        for other in before[line]:
            after[other].append(line)
    dominator = {_EXIT: _EXIT}
    changed = True
    while changed:
        changed = False
        for line in sorted(numbers, key=numbers.__getitem__, reverse=True):
            if line == _EXIT:
                continue
            known = [other for other in after[line] if other in dominator]
            nearest = known[0]
            for other in known[1:]:
                nearest = _common(nearest, other, dominator, numbers)
            if dominator.get(line) != nearest:
                dominator[line] = nearest
                changed = True
    return dominator


def _common(first: int, second: int, dominator: dict[int, int], numbers: dict[int, int]) -> int:
    while first != second:
        while numbers[first] < numbers[second]:
            first = dominator[first]
        while numbers[second] < numbers[first]:
            second = dominator[second]
    return first
