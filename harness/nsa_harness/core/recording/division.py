"""Judge the partings of the ranks: which of them change what the ranks communicate."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nsa_harness.core.recording.alignment import Alignment, Parting, Row
from nsa_harness.core.recording.communications import difference, is_point_to_point, key_of, paired
from nsa_harness.core.recording.recording import Communication
from nsa_harness.core.recording.trace import HARMLESS_EXCEPTIONS, Ending, Trace

_TOGETHER = 20  # operations that ranks make together after a parting without consequences
_ROLE = 10  # operations that each of two ranks makes by itself if they have different roles


@dataclass(frozen=True, eq=False)
class Judged:
    """A parting, or one execution, after which the communication of two ranks differs."""

    row: Row
    minority: tuple[int, ...]  # traces that do not go the way of most ranks
    pair: tuple[int, int]  # a trace of the minority, and one of the others
    parting: Parting | None  # None: the ranks made different operations in the same execution
    operations: tuple[Communication | None, Communication | None]  # the first that differ, in the order of `pair`
    demotions: int  # reasons why this is probably no fault


class Divisions:
    """The divisions of a run, most likely first."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._traces = alignment.traces
        self._pairs = paired(self._traces)
        self._joint = [self._joint_operations(number) for number in range(len(self._traces))]
        self._forms = Counter(map(self._form, alignment.partings))

    def judge(self) -> list[Judged]:
        found = [judged for parting in self._alignment.partings for judged in self._of_parting(parting)]
        found += [judged for row in self._alignment.rows if (judged := self._of_row(row)) is not None]
        return sorted(found, key=lambda judged: (judged.demotions, self._moment(judged)))

    def _moment(self, judged: Judged) -> tuple[int, int]:
        number = min(judged.row)
        return self._traces[number].executions[judged.row[number]].order, number

    def _of_parting(self, parting: Parting) -> list[Judged]:
        ways = [way for way in parting.ways if not self._is_consequence(parting, way)]
        if len(ways) < 2:
            return []
        found = []
        for way in ways[1:]:
            pair = (way[0], ways[0][0])
            arms = [
                self._traces[number].communications_in(parting.arms[number].first, parting.arms[number].end)
                for number in pair
            ]
            ranks = (self._traces[pair[0]].rank, self._traces[pair[1]].rank)
            operations = difference(arms[0], arms[1], ranks, self._pairs)
            if operations is not None:
                demotions = self._demotions(parting, pair, arms)
                found.append(Judged(parting.row, way, pair, parting, operations, demotions))
        return found

    def _is_consequence(self, parting: Parting, way: tuple[int, ...]) -> bool:
        """Return whether these ranks only stopped: they still wait, or waiting failed when another rank was gone."""
        arm = parting.arms[way[0]]
        if arm.ending is Ending.RUNNING:
            return True
        if arm.ending is not Ending.RAISED:
            return False
        trace, execution = self._traces[way[0]], parting.row.get(way[0])
        return execution is not None and raised_by_communication(trace, execution)

    def _demotions(self, parting: Parting, pair: tuple[int, int], arms: list[list[Communication]]) -> int:
        together = self._together_after(parting.row, pair) >= _TOGETHER
        recurs = self._forms[self._form(parting)] > 1
        roles = min(map(len, arms)) >= _ROLE
        return together + recurs + 2 * roles

    def _form(self, parting: Parting) -> tuple[object, ...]:
        number = min(parting.row)
        place = self._traces[number].place(parting.row[number])
        return place.file, place.line, parting.is_call, tuple((n, arm.next_line) for n, arm in parting.arms.items())

    def _joint_operations(self, number: int) -> dict[int, list[int]]:
        """Return for each other trace the executions of this trace in which both made the same operation."""
        found: dict[int, list[int]] = {}
        trace = self._traces[number]
        for execution, following in pairwise([*trace.owners, -1]):
            row = self._alignment.row_of[number][execution]
            if execution != following and row >= 0:
                for other in self._alignment.rows[row]:
                    found.setdefault(other, []).append(execution)
        return found

    def _together_after(self, row: Row, pair: tuple[int, int]) -> int:
        first, second = pair
        executions = self._joint[first].get(second, [])
        return len(executions) - bisect_right(executions, row[first])

    def _of_row(self, row: Row) -> Judged | None:
        """Return the row if its ranks made operations of different kind, shape or root in it."""
        own = {number: self._traces[number].own_communications(execution) for number, execution in row.items()}
        if not any(own.values()):
            return None
        keys = {number: tuple(map(self._key, made)) for number, made in own.items()}
        if len(set(keys.values())) == 1:
            return None
        counts = Counter(keys.values())
        usual = max(counts, key=lambda key: (counts[key], -min(n for n in keys if keys[n] == key)))
        minority = tuple(number for number, key in keys.items() if key != usual)
        other = next(number for number, key in keys.items() if key == usual)
        for number in minority:
            if any(made and not made[-1].returned and not made[-1].error for made in (own[number], own[other])):
                # One rank still waits in an operation of this execution: it had no chance to make the others.
                shortest = min(len(own[number]), len(own[other]))
                left, right = own[number][:shortest], own[other][:shortest]
            else:
                left, right = own[number], own[other]
            ranks = (self._traces[number].rank, self._traces[other].rank)
            operations = difference(left, right, ranks, self._pairs)
            if operations is not None:
                demotions = int(self._together_after(row, (number, other)) >= _TOGETHER)
                return Judged(row, minority, (number, other), None, operations, demotions)
        return None

    def _key(self, communication: Communication) -> tuple[object, ...]:
        if is_point_to_point(communication):
            return (id(communication) in self._pairs,)
        return key_of(communication)


def raised_by_communication(trace: Trace, execution: int) -> bool:
    """Return whether an exception left the execution because an operation of communication failed."""
    found = trace.communications_in(execution, trace.end_of(execution))
    return bool(found) and bool(found[-1].error)


def own_exceptions(trace: Trace) -> list[int]:
    """Return for each thread that ended with an exception the execution that raised it.

    Exceptions that only tell that another rank is gone are left out.
    """
    last = [activations[-1] for _, activations in trace.roots if activations]
    return [found for activation in last if (found := _own_exception(trace, activation)) is not None]


def _own_exception(trace: Trace, activation: int) -> int | None:
    activations: Sequence[int] = (activation,)
    found = None
    while activations:
        members = trace.members[activations[-1]]
        if not members or trace.ending(activations[-1]) is not Ending.RAISED:
            break
        found = members[-1]
        activations = trace.calls.get(found, ())
    if found is None or raised_by_communication(trace, found):
        return None
    raised = trace.executions[found].raised
    return None if raised is None or raised.type in {*HARMLESS_EXCEPTIONS, "SystemExit", "KeyboardInterrupt"} else found
