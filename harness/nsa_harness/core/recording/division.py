"""Judge the partings of the ranks: which of them change what the ranks communicate."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from nsa_harness.core.recording.alignment import Alignment, Parting, Row
from nsa_harness.core.recording.communications import Shared, corresponds, difference
from nsa_harness.core.recording.recording import Communication
from nsa_harness.core.recording.trace import HARMLESS_EXCEPTIONS, Ending, Trace

_ROLE = 10  # operations that each of two ranks makes by itself if they have different roles
_NETWORK_ERROR = re.compile(
    r"connection (?:closed|reset|refused|was)|closed by peer|broken pipe|timed? ?out|socket"
    r"|unreachable|remote (?:host|process)",
    re.IGNORECASE,
)
_FROM_BACKEND = re.compile(r"\bgloo|nccl|\bpeer\b|remote worker", re.IGNORECASE)


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
        self._shared = Shared(self._traces)
        self._balanced: dict[tuple[int, int], int] = {}
        self._failed = {number for number, trace in enumerate(self._traces) if trace.error is not None}
        self._forms = Counter(map(self._form, alignment.partings))

    def judge(self) -> list[Judged]:
        found = [judged for parting in self._alignment.partings for judged in self._of_parting(parting)]
        found += [judged for row in self._alignment.rows if (judged := self._of_row(row)) is not None]
        return sorted(found, key=lambda judged: (judged.demotions, self._moment(judged)))

    def _moment(self, judged: Judged) -> tuple[int, int]:
        number = min(judged.row)
        return self._traces[number].executions[judged.row[number]].order, number

    def _of_parting(self, parting: Parting) -> list[Judged]:
        ways = [way for way in parting.ways if not is_consequence(self._traces, parting, way)]
        if len(ways) < 2:
            return []
        found = []
        for way in ways[1:]:
            pair = (way[0], ways[0][0])
            arms = [
                self._shared.of(self._traces[number].communications_in(arm.first, arm.end), pair)
                for number, arm in ((number, parting.arms[number]) for number in pair)
            ]
            operations = difference(arms[0], arms[1])
            if operations is not None and not self._is_balanced_after(parting.row, pair):
                demotions = self._demotions(parting, arms)
                found.append(Judged(parting.row, way, pair, parting, operations, demotions))
        return found

    def _demotions(self, parting: Parting, arms: list[list[Communication]]) -> int:
        recurs = self._forms[self._form(parting)] > 1
        roles = min(map(len, arms)) >= _ROLE
        return recurs + 2 * roles

    def _form(self, parting: Parting) -> tuple[object, ...]:
        number = min(parting.row)
        place = self._traces[number].place(parting.row[number])
        return place.file, place.line, parting.is_call, tuple((n, arm.next_line) for n, arm in parting.arms.items())

    def _last_balanced(self, pair: tuple[int, int]) -> int:
        """Return the last execution of the first trace up to which both made the same operations, or -1.

        The other trace is compared up to its corresponding execution.
        """
        if pair not in self._balanced:
            self._balanced[pair] = self._find_balanced(pair)
        return self._balanced[pair]

    def _find_balanced(self, pair: tuple[int, int]) -> int:
        made = [self._shared.with_owners(number, pair) for number in pair]
        equal = len(made[0])
        for index, (ours, theirs) in enumerate(zip_longest(*([made for made, _ in one] for one in made))):
            if ours is None or theirs is None or not corresponds(ours, theirs):
                equal = index
                break
        owners = [[owner for _, owner in one] for one in made]
        for execution in reversed(range(len(self._traces[pair[0]].executions))):
            other = self._alignment.counterpart(pair[0], execution, pair[1])
            if other is not None:
                count = bisect_left(owners[0], execution)
                if count <= equal and count == bisect_left(owners[1], other):
                    return execution
        return -1

    def _of_row(self, row: Row) -> Judged | None:
        """Return the row if its ranks made operations of different kind, shape or root in it."""
        own = {number: self._traces[number].own_communications(execution) for number, execution in row.items()}
        if not any(own.values()):
            return None
        keys = {number: tuple(map(self._shared.key, made)) for number, made in own.items()}
        if len(set(keys.values())) == 1:
            return self._of_messages(row, own)
        counts = Counter(keys.values())
        usual = max(counts, key=lambda key: (counts[key], -min(n for n in keys if keys[n] == key)))
        minority = tuple(number for number, key in keys.items() if key != usual)
        other = next(number for number, key in keys.items() if key == usual)
        for number in minority:
            pair = (number, other)
            left, right = (self._shared.of(own[n], pair) for n in pair)
            if self._waits(own[number]) or self._waits(own[other]):  # It had no chance to make the other operations.
                shortest = min(len(left), len(right))
                left, right = left[:shortest], right[:shortest]
            operations = difference(left, right)
            if operations is not None and not self._is_balanced_after(row, pair):
                return Judged(row, minority, pair, None, operations, 0)
        return self._of_messages(row, own)

    def _of_messages(self, row: Row, own: dict[int, list[Communication]]) -> Judged | None:
        """Return the row if a rank sent to, or received from, another rank in it that did not do the opposite.

        A rank that failed had no chance to do the opposite.
        """
        ranks = {trace.rank: number for number, trace in enumerate(self._traces)}
        for number, made in own.items():
            for message in self._shared.unpaired(made):
                if message.peer is not None and ranks.get(message.peer, -1) in self._failed:
                    continue
                other = next((n for n in row if self._traces[n].rank == message.peer), number)
                pair = (number, other)
                if other != number and not self._waits(own[other]) and not self._is_balanced_after(row, pair):
                    minority = tuple(n for n in own if self._shared.unpaired(own[n]))
                    return Judged(row, minority, pair, None, (message, None), 0)
        return None

    def _waits(self, made: Sequence[Communication]) -> bool:
        return bool(made) and not made[-1].returned and not made[-1].error

    def _is_balanced_after(self, row: Row, pair: tuple[int, int]) -> bool:
        """Return whether both ranks made the same operations up to a later execution: the row changed nothing."""
        return self._last_balanced(pair) >= self._traces[pair[0]].end_of(row[pair[0]])


def is_consequence(traces: Sequence[Trace], parting: Parting, way: tuple[int, ...]) -> bool:
    """Return whether these ranks only stopped: they still wait, or waiting failed when another rank was gone."""
    execution, trace, ending = parting.row.get(way[0]), traces[way[0]], parting.arms[way[0]].ending
    if ending is Ending.RUNNING:
        return True
    if ending is Ending.RAISED and execution is not None:
        execution = trace.raising(trace.activation_of[execution])
    return execution is not None and raised_by_network(trace, execution)


def raised_by_network(trace: Trace, execution: int) -> bool:
    """Return whether an exception left the execution because another rank was gone."""
    raised = trace.executions[execution].raised
    if raised is None or not _NETWORK_ERROR.search(raised.message):
        return False
    if raised.type == "DistNetworkError":
        return True
    found = trace.communications_in(execution, trace.end_of(execution))
    return bool(found and found[-1].error) or bool(_FROM_BACKEND.search(raised.message))


def own_exceptions(trace: Trace) -> list[int]:
    """Return for each thread that ended with an exception the execution that raised it.

    Exceptions that only tell that another rank is gone are left out.
    """
    last = [activations[-1] for _, activations in trace.roots if activations]
    return [found for activation in last if (found := _own_exception(trace, activation)) is not None]


def failed_children(trace: Trace) -> list[int]:
    """Return the executions whose exceptions left the program's code in child processes of a rank that did not end."""
    activations = trace.roots[0][1] if trace.roots else []
    if not activations or trace.ending(activations[-1]) is Ending.RETURNED:
        return []
    return [execution for execution in own_exceptions(trace) if trace.process[trace.activation_of[execution]]]


def _own_exception(trace: Trace, activation: int) -> int | None:
    raising = trace.raising(activation)
    found = None if raising is None else trace.innermost_raise(raising)
    if found is None or raised_by_network(trace, found):
        return None
    error = trace.executions[found].raised
    return None if error is None or error.type in {*HARMLESS_EXCEPTIONS, "SystemExit", "KeyboardInterrupt"} else found
