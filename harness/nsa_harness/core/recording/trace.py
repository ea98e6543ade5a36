"""Number the executions of a recording, so that every part of the tree is a range of numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from nsa_harness.core.recording.recording import Activation, Communication, Execution, RankRecording
from nsa_harness.core.report import Place

Function = tuple[str, str, int]  # file, qualified name, first line
HARMLESS_EXCEPTIONS = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class Ending(StrEnum):
    """How the sequence of statements of an activation ended."""

    RETURNED = "returned"
    RAISED = "raised"
    RUNNING = "running"  # it was still running when the recording ended


@dataclass
class Trace:
    """The executions of one rank in depth-first order: an execution, then all that its calls executed, then the next.

    Executions and activations are known by their index in these lists.
    """

    rank: int
    executions: list[Execution] = field(default_factory=list)
    activation_of: list[int] = field(default_factory=list)  # by execution
    position: list[int] = field(default_factory=list)  # by execution: its position in the activation
    occurrence: list[int] = field(default_factory=list)  # by execution: how often its statement had run, with it
    activations: list[Activation] = field(default_factory=list)
    caller: list[int] = field(default_factory=list)  # by activation: the execution that started it, or -1
    members: list[list[int]] = field(default_factory=list)  # by activation: its executions
    ends: list[int] = field(default_factory=list)  # by activation: one more than the last execution below it
    calls: dict[int, list[int]] = field(default_factory=dict)  # by execution: the activations that it started
    communications: list[Communication] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # by communication: the execution that made it, ascending
    roots: list[tuple[str, list[int]]] = field(default_factory=list)  # by thread: its outermost activations
    threads: int = 0  # roots of the rank's own process; the others are those of its child processes
    process: list[str] = field(default_factory=list)  # by activation: the root of a child process, otherwise ""
    forks: dict[str, int] = field(default_factory=dict)  # by root of a child process: the order of its beginning

    def range_of(self, activation: int, start: int, stop: int) -> tuple[int, int]:
        """Return the range of executions that positions `start` to `stop` of the activation and their calls cover."""
        members = self.members[activation]
        end = self.ends[activation]
        first = members[start] if start < len(members) else end
        return first, members[stop] if stop < len(members) else end

    def communications_in(self, first: int, end: int) -> list[Communication]:
        """Return the communications that the executions `first` to `end` made, in the order of time."""
        found = self.communications[bisect_left(self.owners, first) : bisect_left(self.owners, end)]
        return sorted(found, key=lambda communication: communication.order)

    def own_communications(self, execution: int) -> list[Communication]:
        return self.executions[execution].communications

    def owner(self, communication: Communication) -> int:
        """Return the execution that made the communication, or -1 if none did."""
        made = zip(self.communications, self.owners, strict=True)
        return next((owner for other, owner in made if other is communication), -1)

    def function(self, activation: int) -> Function:
        return function_of(self.activations[activation])

    def place(self, execution: int) -> Place:
        activation = self.activations[self.activation_of[execution]]
        return Place(file=activation.file, line=self.executions[execution].line, function=activation.function)

    def end_of(self, execution: int) -> int:
        """Return one more than the last execution that the calls of this execution started."""
        members = self.members[self.activation_of[execution]]
        following = self.position[execution] + 1
        return members[following] if following < len(members) else self.ends[self.activation_of[execution]]

    def outer(self, execution: int) -> Iterator[int]:
        """Yield the executions that called the function of this execution, innermost first."""
        execution = self.caller[self.activation_of[execution]]
        while execution >= 0:
            yield execution
            execution = self.caller[self.activation_of[execution]]

    def ending(self, activation: int) -> Ending:
        recorded = self.activations[activation]
        if not recorded.ended:
            return Ending.RUNNING
        return Ending.RETURNED if self.raising(activation) is None else Ending.RAISED

    def raising(self, activation: int) -> int | None:
        """Return the execution whose exception left the activation, or None if no exception did."""
        recorded = self.activations[activation]
        if not recorded.ended or recorded.returned is not None:
            return None
        # Statements of `finally` and the end of `with` may follow it.
        for execution in reversed(self.members[activation]):
            raised = self.executions[execution].raised
            if raised is not None and not raised.handled:
                return None if raised.type in HARMLESS_EXCEPTIONS else execution
        return None

    def innermost_raise(self, execution: int) -> int:
        """Return the execution in which the exception that left this execution was raised."""
        while (raising := self.raising_below(execution)) is not None:
            execution = raising
        return execution

    def raising_below(self, execution: int) -> int | None:
        """Return the execution in a called function whose exception reached this execution, or None.

        A `for` loop also resumes generators that an earlier execution of the same statement started.
        """
        if self.executions[execution].raised is None:
            return None
        called = self.calls.get(execution) or self.resumed(execution)
        raising = [found for call in called if (found := self.raising(call)) is not None]
        return raising[-1] if raising else None

    def resumed(self, execution: int) -> list[int]:
        """Return the calls that the latest earlier execution of the same statement in this activation started."""
        line = self.executions[execution].line
        members = self.members[self.activation_of[execution]]
        for earlier in reversed(members[: self.position[execution]]):
            if self.executions[earlier].line == line and earlier in self.calls:
                return self.calls[earlier]
        return []

    @property
    def error(self) -> int | None:
        """The execution whose exception ended the main thread, or None if no exception did."""
        main = self.roots[0][1] if self.roots else []
        return self.raising(main[-1]) if main else None

    @property
    def last(self) -> int:
        """The execution in which the main thread was when the recording ended, or -1 if there is none."""
        return self._last(self.roots[0][1]) if self.roots else -1

    def running(self) -> Iterator[int]:
        """Yield the execution in which each thread was that had not ended."""
        for _, activations in self.roots:
            if activations and not self.activations[activations[-1]].ended and (last := self._last(activations)) >= 0:
                yield last

    def stopped_child(self) -> tuple[str, int] | None:
        """Return the child process for which the rank waited when the recording ended, and the execution it was in."""
        last = self.last
        if last < 0 or any(not made.returned and not made.error for made in self.own_communications(last)):
            return None
        if self.activations[self.activation_of[last]].ended:
            return None
        running = ((self.process[self.activation_of[execution]], execution) for execution in self.running())
        return next((found for found in running if found[0]), None)

    def is_visible(self, definition: int, execution: int) -> bool:
        """Return whether both are in the same process, or the definition is older than the fork of the other one."""
        process, own = (self.process[self.activation_of[number]] for number in (definition, execution))
        return process == own or (not process and self.order(definition) < self.forks[own])

    def _last(self, activations: Sequence[int]) -> int:
        execution = -1
        while activations:
            members = self.members[activations[-1]]
            if not members or (execution >= 0 and self.activations[activations[-1]].ended):
                break
            execution = members[-1]
            activations = self.calls.get(execution, [])
        return execution

    def next_line(self, execution: int) -> int | None:
        """Return the next line in the same activation, None if it ended, or 0 if this is its last line so far."""
        members, activation = self.members[self.activation_of[execution]], self.activation_of[execution]
        following = self.position[execution] + 1
        if following < len(members):
            return self.executions[members[following]].line
        return None if self.activations[activation].ended else 0

    def order(self, execution: int) -> int:
        return self.executions[execution].order


def function_of(activation: Activation) -> Function:
    return activation.file, activation.function, activation.first_line


def trace_of(recording: RankRecording, *, with_children: bool = False) -> Trace:
    """Return the executions of the recording, numbered in depth-first order. Takes time linear in their number."""
    trace = Trace(rank=recording.rank, threads=len(recording.threads))
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for index, thread in enumerate((*recording.threads, *(recording.children if with_children else ()))):
        trace.roots.append((thread.name, []))
        for activation in thread.activations:
            trace.roots[-1][1].append(_add(trace, activation, counts))
        process = thread.name if index >= trace.threads else ""
        trace.process += [process] * (len(trace.activations) - len(trace.process))
        if process and thread.activations and thread.activations[0].executions:
            trace.forks[process] = thread.activations[0].executions[0].order
    return trace


def _add(trace: Trace, outermost: Activation, counts: defaultdict[tuple[str, int], int]) -> int:
    """Number an activation and all below it. Return its index."""
    root = _open(trace, outermost, -1)
    stack = [(root, iter(outermost.executions))]
    while stack:
        index, remaining = stack[-1]
        activation = trace.activations[index]
        for execution in remaining:
            number = len(trace.executions)
            counts[activation.file, execution.line] += 1
            trace.executions.append(execution)
            trace.activation_of.append(index)
            trace.position.append(len(trace.members[index]))
            trace.occurrence.append(counts[activation.file, execution.line])
            trace.members[index].append(number)
            for communication in execution.communications:
                trace.communications.append(communication)
                trace.owners.append(number)
            if execution.calls:
                called = [_open(trace, call, number) for call in execution.calls]
                trace.calls[number] = called
                # The stack is last in, first out; numbers must follow the order of the calls.
                stack.extend((call, iter(trace.activations[call].executions)) for call in reversed(called))
                break
        else:
            stack.pop()
            trace.ends[index] = len(trace.executions)
    return root


def _open(trace: Trace, activation: Activation, caller: int) -> int:
    trace.activations.append(activation)
    trace.caller.append(caller)
    trace.members.append([])
    trace.ends.append(0)
    return len(trace.activations) - 1


class Coverage:
    """The statements that each trace executed, by file and line."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces

    def line(self, number: int, execution: int) -> tuple[str, int]:
        trace = self._traces[number]
        return trace.activations[trace.activation_of[execution]].file, trace.executions[execution].line

    @cached_property
    def first(self) -> list[dict[tuple[str, int], int]]:
        """The first execution of each statement, for each trace."""
        return [
            {self.line(number, execution): execution for execution in reversed(range(len(trace.executions)))}
            for number, trace in enumerate(self._traces)
        ]

    def elsewhere(self, number: int) -> set[tuple[str, int]]:
        """Return the statements that the other traces executed."""
        return set().union(*(lines for other, lines in enumerate(self.first) if other != number))

    def alone(self, number: int, execution: int) -> int:
        """Return the innermost execution around this one whose statement no other rank ever executed, or this one."""
        others = self.elsewhere(number)
        around = (execution, *self._traces[number].outer(execution))
        return next((other for other in around if self.line(number, other) not in others), execution)

    def extra_call(self, number: int, execution: int) -> int | None:
        """Return the innermost call around this execution that no other rank ever made, or None if there is none."""
        others = self.elsewhere(number)
        outer = self._traces[number].outer(execution)
        return next((call for call in outer if self.line(number, call) not in others), None)

    def raised_elsewhere(self, number: int, execution: int) -> bool:
        """Return whether another rank had an exception in the same statement of the program."""
        line = self.line(number, execution)
        return any(line in raised for other, raised in enumerate(self._raised) if other != number)

    @cached_property
    def _raised(self) -> list[set[tuple[str, int]]]:
        return [
            {self.line(number, at) for at, execution in enumerate(trace.executions) if execution.raised is not None}
            for number, trace in enumerate(self._traces)
        ]

    @cached_property
    def ways(self) -> list[dict[tuple[str, int], dict[int | None, int]]]:
        """The first execution of each statement that went on to each next line, for each trace."""
        found: list[dict[tuple[str, int], dict[int | None, int]]] = []
        for number, trace in enumerate(self._traces):
            ways: defaultdict[tuple[str, int], dict[int | None, int]] = defaultdict(dict)
            for execution in range(len(trace.executions)):
                if (following := trace.next_line(execution)) != 0:
                    ways[self.line(number, execution)].setdefault(following, execution)
            found.append(ways)
        return found
