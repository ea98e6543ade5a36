"""Compare the communication of ranks: which operations correspond, and which have no counterpart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from nsa_harness.core.recording.recording import Communication
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace

# Operations whose input may have another shape on each rank.
_UNEVEN = ("object", "all_to_all", "scatter", "gather_v", "send", "recv")
_NOT_COLLECTIVE = ("no_sync", "step")

_SENDS = frozenset({"send", "isend", "send_object_list"})
_RECEIVES = frozenset({"recv", "irecv", "recv_object_list"})

Key = tuple[object, ...]


def is_point_to_point(communication: Communication) -> bool:
    return communication.operation.startswith(("send", "isend", "recv", "irecv"))


def key_of(communication: Communication) -> Key:
    """Return what must be equal on all ranks that take part in a collective."""
    shape: Key = ()
    if not any(word in communication.operation for word in _UNEVEN):
        shape = (communication.shape, communication.dtype)
    return communication.operation, communication.ranks, communication.root, *shape


def corresponds(ours: Communication, theirs: Communication) -> bool:
    """Return whether the operations of two ranks can be the same one. Point-to-point operations never are."""
    return not is_point_to_point(ours) and not is_point_to_point(theirs) and key_of(ours) == key_of(theirs)


def difference(
    left: Sequence[Communication], right: Sequence[Communication]
) -> tuple[Communication | None, Communication | None] | None:
    """Return the first operations in which two ranks differ, or None if both made the same."""
    for ours, theirs in zip_longest(left, right):
        if ours is None or theirs is None or not corresponds(ours, theirs):
            return ours, theirs
    return None


class Shared:
    """The operations of a run in which two ranks can differ.

    For two ranks, these are the operations of groups that both belong to, and the point-to-point operations without a
    counterpart. `backward` counts if it communicates.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self._paired = _paired(traces)
        self._ignored = set(_NOT_COLLECTIVE)
        if not any(_communicates_in_backward(trace) for trace in traces):
            self._ignored.add("backward")

    def of(self, communications: Iterable[Communication], pair: tuple[int, int]) -> list[Communication]:
        """Return those of the operations in which the traces of the pair can differ."""
        ranks = {self._traces[number].rank for number in pair}
        return [made for made in communications if self._counts(made, ranks)]

    def with_owners(self, number: int, pair: tuple[int, int]) -> list[tuple[Communication, int]]:
        """Return all operations of a trace in which the pair can differ, each with the execution that made it."""
        ranks = {self._traces[number].rank for number in pair}
        trace = self._traces[number]
        made = zip(trace.communications, trace.owners, strict=True)
        return [(communication, owner) for communication, owner in made if self._counts(communication, ranks)]

    def unpaired(self, communications: Iterable[Communication]) -> list[Communication]:
        """Return the point-to-point operations that have no counterpart on the other rank."""
        return [made for made in communications if is_point_to_point(made) and id(made) not in self._paired]

    def key(self, communication: Communication) -> Key:
        if communication.operation in self._ignored or is_point_to_point(communication):
            return ()
        return key_of(communication)

    def _counts(self, communication: Communication, ranks: set[int]) -> bool:
        if communication.operation in self._ignored:
            return False
        if is_point_to_point(communication):
            return id(communication) not in self._paired
        return not communication.ranks or ranks <= set(communication.ranks)


def _communicates_in_backward(trace: Trace) -> bool:
    return any(
        made.operation == "DistributedDataParallel"
        or (made.operation == "backward" and not made.returned and not made.error)
        for made in trace.communications
    )


def _paired(traces: Sequence[Trace]) -> set[int]:
    """Return the id() of each point-to-point operation that has its counterpart on the other rank.

    The n-th message to a rank with a tag belongs to the n-th receive from this rank with this tag.
    """
    sent: defaultdict[tuple[int | None, int | None, int], list[Communication]] = defaultdict(list)
    received: defaultdict[tuple[int | None, int | None, int], list[Communication]] = defaultdict(list)
    for trace in traces:
        for communication in sorted(trace.communications, key=lambda communication: communication.order):
            if not is_point_to_point(communication):
                continue
            if "recv" in communication.operation:
                received[communication.peer, trace.rank, communication.tag or 0].append(communication)
            else:
                sent[trace.rank, communication.peer, communication.tag or 0].append(communication)
    found = set()
    for route, messages in sent.items():
        for message, receive in zip(messages, received.get(route, ()), strict=False):
            found |= {id(message), id(receive)}
    return found


def left_out(trace: Trace, awaited: Communication, statements: Statements) -> Iterator[int]:
    """Yield executions of a rank that left out the counterpart of a message that another rank waits for.

    The first is the last execution of a condition or loop around a statement that could have made it, whose body was
    not executed. Then come the ends of the calls in it, which decided that, and the statement that called the function.
    """
    opposite = statements.leading_to(_SENDS if "recv" in awaited.operation else _RECEIVES)
    headers = statements.headers_around(opposite)
    for execution in reversed(range(len(trace.executions))):
        place = trace.place(execution)
        span = headers.get((place.file or "", place.line or 0))
        if span is not None and not _enters(trace, execution, span):
            yield execution
            yield from (trace.members[call][-1] for call in trace.calls.get(execution, ()) if trace.members[call])
            yield from list(trace.outer(execution))[:1]
            return


# Methods that end the waiting in a method of this name.
_ENDS_WAITING = {
    "get": ("put", "put_nowait", "set"),
    "wait": ("set", "notify", "notify_all"),
    "acquire": ("release",),
    "join": ("put", "put_nowait", "set"),
}


def left_out_for(trace: Trace, waiting: Sequence[str], statements: Statements) -> int | None:
    """Return the execution with which a function ended before a call that would have ended the waiting elsewhere.

    `waiting`: the methods in which a thread waits. Calls that the rank never made come first, then the latest ones.
    """
    ending = {name for method in waiting for name in _ENDS_WAITING.get(method, ())}
    calls = statements.calls_of(statements.leading_to(ending)) if ending else {}
    ran = {(place.file, place.line) for place in map(trace.place, range(len(trace.executions)))}
    for is_never in (True, False):
        for activation in sorted(range(len(trace.activations)), key=lambda one: -trace.ends[one]):
            recorded, members = trace.activations[activation], trace.members[activation]
            lines = calls.get((recorded.file, recorded.first_line), ())
            wanted = {line for line in lines if ((recorded.file, line) in ran) is not is_never}
            if not members or not wanted or not recorded.ended:
                continue
            executed = {trace.executions[execution].line for execution in members}
            if not executed & wanted and trace.executions[members[-1]].line < max(wanted):
                return members[-1]
    return None


def _enters(trace: Trace, execution: int, span: tuple[int, int]) -> bool:
    """Return whether the statement after this one in the same function is in the lines `span`, or is not known."""
    following = trace.position[execution] + 1
    members = trace.members[trace.activation_of[execution]]
    if following == len(members):
        return not trace.activations[trace.activation_of[execution]].ended
    return span[0] <= trace.executions[members[following]].line <= span[1]
