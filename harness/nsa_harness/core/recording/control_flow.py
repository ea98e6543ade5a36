"""Find the statement at which different ways through a function meet again: the immediate post-dominator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from nsa_harness.core.recording.trace import Ending, Function, Trace

_EXIT = 0  # no statement has this line


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
