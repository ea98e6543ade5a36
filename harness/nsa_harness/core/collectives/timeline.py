"""Make a rank's timeline: its collectives and transfers in the order in which the rank entered them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import TRAINING, Call, Collective, Frame, Stack, StatusFile
from nsa_harness.core.evidence.stacks import group_call, is_library
from nsa_harness.core.evidence.steps import SETUP, elements, entered_s, python_calls
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.group_waits import TRANSFERS, call_of_stack, operation

UNKNOWN_GROUP = "?"  # a stack does not show to which group a call belongs
_EVEN_ON_GLOO = protocol.EQUAL_SIZES | {
    "all_gather",
    "all_gather_coalesced",
    "reduce_scatter",
}  # gloo refuses uneven ones


class Token(NamedTuple):
    """The part of an event that is compared: two calls with equal tokens are the same call with the same arguments."""

    site: tuple[object, ...]
    op: str
    from_python: bool
    elements: int
    dtype: str
    root: int | None
    needs_equal_sizes: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry in a rank's timeline: a collective or a transfer that the rank has entered."""

    group: str
    op: str
    from_python: bool  # from Python
    place: Place | None  # the line that called it; None = below Python, or not known
    elements: int  # elements of all tensors together
    dtype: str
    root: int | None  # root of a rooted collective; partner of a transfer
    needs_equal_sizes: bool  # every rank must give the same number of elements, of the same type
    seq: int | None  # the recorder's number in the group
    at_s: float
    is_done: bool
    step: int | None
    position: int | None  # training events since that step began
    call: Call | None = None
    collective: Collective | None = None
    chain: tuple[Frame, ...] = ()  # the program's own lines that led to it, innermost first; () = unknown

    @property
    def is_transfer(self) -> bool:
        return self.op in TRANSFERS

    @property
    def token(self) -> Token:
        return Token(self.site, self.op, self.from_python, self.elements, self.dtype, self.root, self.needs_equal_sizes)

    @property
    def site(self) -> tuple[object, ...]:
        """Where the call is in the program: group, operation, source line and callers, without the call's arguments.

        A call that Python did not make, such as one by DDP, has no line. Its number of elements is used instead.
        """
        if not self.from_python:
            return (self.group, self.op, self.elements)
        line = (self.place.file, self.place.line) if self.place else (None, None)
        return (self.group, self.op, *line, self.chain)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The collectives and transfers that one rank entered, oldest first.

    Calls before a gap in the rank's records are left out.
    """

    rank: int
    events: tuple[Event, ...]
    is_complete: bool  # complete since the start of the run
    groups_with_gaps: frozenset[str] = frozenset()  # groups whose recorder has unexplained gaps

    def of_group(self, group: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.group == group and not event.is_transfer)


def with_comparable_callers(timelines: Mapping[int, Timeline]) -> dict[int, Timeline]:
    """Return the timelines without the callers of those calls for which some rank does not know the callers.

    Otherwise the same call, with and without callers, would look like two different calls.
    """
    bare = {event.site for line in timelines.values() for event in line.events if not event.chain}
    return {
        rank: replace(
            line,
            events=tuple(short if (short := replace(event, chain=())).site in bare else event for event in line.events),
        )
        for rank, line in timelines.items()
    }


def timeline(
    rank: int,
    status_file: StatusFile | None,
    collectives: Sequence[Collective],
    backend: str,
    *,
    lost: Collection[str] = (),
) -> Timeline:
    """Return the timeline of a rank, merged from the entries of its flight recorder and the calls in its status file.

    `collectives` are the entries of the flight recorder, and `lost` names the groups whose entries have unexplained
    gaps. Only calls of the training thread are included.
    """
    even = _EVEN_ON_GLOO if backend == "gloo" else protocol.EQUAL_SIZES
    trains = _training_tid(status_file) if status_file else None
    calls = (
        [call for call in status_file.calls if _belongs_in_timeline(call) and _is_by_thread(call, trains)]
        if status_file
        else []
    )
    # Without a common clock it is unknown which call a number belongs to.
    unclocked = {call.group for call in calls} if status_file and status_file.zero_ns is None else set()
    series = _unbroken([collective for collective in collectives if collective.group not in unclocked])
    numbered = [replace(event, needs_equal_sizes=event.op in even) for event in _recorded_events(status_file, series)]
    if status_file and status_file.calls and status_file.calls[0].number > 1:
        # For events older than the stored calls it is unknown whether Python called them.
        numbered = [event for event in numbered if event.at_s >= status_file.calls[0].entered_s]
    oldest = {
        collective.group: collective.seq
        for collective in sorted(series, key=lambda collective: collective.seq, reverse=True)
    }
    joined = {event.call.number for event in numbered if event.call}
    numbered = [event for event in numbered if event.call is None or _is_by_thread(event.call, trains)]
    alone = [_event_of_call(call, even) for call in calls if call.number not in joined]
    if any(not event.from_python for event in numbered):
        # Older calls are no timeline without the events below Python between them.
        alone = [event for event in alone if event.at_s >= numbered[0].at_s]
    return Timeline(
        rank=rank,
        events=tuple(sorted([*alone, *numbered], key=lambda event: (event.at_s, event.seq or 0))),
        groups_with_gaps=frozenset(lost),
        is_complete=_has_every_call(status_file) and set(oldest.values()) <= {1},
    )


def timeline_of_stack(rank: int, stack: Stack | None, at_s: float) -> Timeline:
    """Return the timeline of a rank of which only a stack is known.

    It has one event, the collective call that the stack is in, or no event if the stack is in none.
    """
    frames = stack.frames if stack else ()
    named = group_call(frames)
    chain = _own_lines(frames)
    call = call_of_stack(stack) if stack else None
    if named is None:
        return Timeline(rank=rank, events=(), is_complete=False)
    event = Event(
        group=UNKNOWN_GROUP,
        op=named.text,
        from_python=not named.by,
        place=_line_of(chain),
        elements=0,
        dtype="",
        root=call.peer if call else None,
        needs_equal_sizes=False,
        seq=None,
        at_s=at_s,
        is_done=False,
        step=None,
        position=None,
        chain=chain,
    )
    return Timeline(rank=rank, events=(event,), is_complete=False)


def _own_lines(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if not is_library(frame.file) and not frame.file.startswith("<"))


def _line_of(chain: Sequence[Frame]) -> Place | None:
    return Place(file=chain[0].file, line=chain[0].line, function=chain[0].function) if chain else None


def _training_tid(status_file: StatusFile) -> int | None:
    """Return the id of the thread that trains, or None if it cannot be told from the recorded events.

    A thread that records only backward events (autograd) or only data events (prefetching) does not count, unless it is
    the main thread.
    """
    marked = [event for event in status_file.events if event.kind in TRAINING]
    trains = [event.tid for event in marked if event.tid == status_file.pid or event.kind not in ("backward", "data")]
    if not trains and any(call.tid == status_file.pid for call in status_file.calls):
        return status_file.pid
    return trains[0] if trains else None


def _is_by_thread(call: Call, tid: int | None) -> bool:
    return tid is None or call.tid is None or call.tid == tid


def _has_every_call(status_file: StatusFile | None) -> bool:
    """Whether the status file still stores every collective call of the rank.

    This is judged by the number of calls per group, or, if that is unknown, by whether the oldest stored call is number
    1.
    """
    if status_file is None or not status_file.counts:
        return status_file is None or not status_file.calls or status_file.calls[0].number == 1
    stored = Counter(
        call.group
        for call in status_file.calls
        if operation(call) not in TRANSFERS and not call.op.startswith(protocol.WAIT)
    )
    return all(total.calls <= stored[group] for group, total in status_file.counts.items())


def _belongs_in_timeline(call: Call) -> bool:
    """Whether the call is a collective or transfer.

    Waits on a handle and calls that create or destroy groups are neither.
    """
    return not call.op.startswith((protocol.WAIT, *SETUP))


def _unbroken(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the flight recorder's entries by time, without those before the last gap in a group's numbers."""
    unbroken: list[Collective] = []
    for _, group in groupby(
        sorted(collectives, key=lambda collective: (collective.group, collective.seq)),
        key=lambda collective: collective.group,
    ):
        series = list(group)
        breaks = [at for at in range(1, len(series)) if series[at].seq > series[at - 1].seq + 1]
        unbroken += series[breaks[-1] :] if breaks else series
    return sorted(unbroken, key=lambda collective: (collective.created_ns, collective.group, collective.seq))


def _recorded_events(status_file: StatusFile | None, series: Sequence[Collective]) -> Iterator[Event]:
    """Yield one event for each call in the flight recorder's entries.

    If one Python call entered several collectives, they become one event with the number of the first.
    """
    calls = python_calls(status_file, series) if status_file else {}
    entered = (
        _event_of_collective(status_file, collective, calls.get((collective.group, collective.seq)))
        for collective in series
    )
    for _, same_call in groupby(
        entered, key=lambda event: event.call.number if event.call else (event.group, event.seq)
    ):
        first, *others = same_call
        yield replace(first, is_done=first.is_done and all(event.is_done for event in others))


def _event_of_collective(status_file: StatusFile | None, collective: Collective, call: Call | None) -> Event:
    at_s = (entered_s(status_file, collective) if status_file else None) or collective.created_ns / 1e9
    if call is not None:
        from_python = _event_of_call(call, frozenset())
        return replace(
            from_python,
            group=collective.group,
            seq=collective.seq,
            at_s=at_s,
            is_done=collective.retired,
            collective=collective,
        )
    # For a rank with a status file, its calls show which collectives are the program's own.
    named = None if status_file else group_call(collective.frames)
    called = named is not None and not named.by
    chain = _own_lines(collective.frames) if called else ()
    return Event(
        group=collective.group,
        op=collective.op,
        from_python=called,
        place=_line_of(chain),
        chain=chain,
        elements=elements(collective),
        dtype="/".join(collective.dtypes),
        root=None,
        needs_equal_sizes=False,
        seq=collective.seq,
        at_s=at_s,
        is_done=collective.retired,
        step=_step_at(status_file, at_s) if status_file and status_file.zero_ns is not None else None,
        position=None,
        collective=collective,
    )


def _step_at(status_file: StatusFile, at_s: float) -> int | None:
    """Return the optimizer step that was in progress at `at_s`, or None if it is older than the recorded steps."""
    if not status_file.steps_s or (status_file.steps_s[0][0] > 1 and at_s < status_file.steps_s[0][1]):
        return None
    return next((step for step, done_s in status_file.steps_s if at_s <= done_s), status_file.steps_s[-1][0] + 1)


def _event_of_call(call: Call, even: frozenset[str]) -> Event:
    """Return the event for a call from Python.

    `even` names the operations that need the same number of elements on every rank.
    """
    return Event(
        group=call.group,
        op=operation(call),
        from_python=True,
        place=call.place,
        elements=call.elements,
        dtype=call.dtype,
        root=call.peer,
        needs_equal_sizes=call.op in even,
        seq=None,
        at_s=call.entered_s,
        is_done=call.left_s is not None,
        step=call.step,
        position=call.position,
        call=call,
        chain=call.chain,
    )


class Field(StrEnum):
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"


def field_value(event: Event | Token, field: Field) -> int | str | None:
    if field is Field.ROOT:
        return event.root
    return event.elements if field is Field.SHAPE else event.dtype


def differing_field(one: Event | Token, other: Event | Token) -> Field | None:
    """Return the first field (shape, dtype, root) that differs between two calls although it must be equal.

    Return None if the calls agree or are different operations.
    """
    if one.op != other.op:
        return None
    fields = [Field.SHAPE, Field.DTYPE] if one.needs_equal_sizes and other.needs_equal_sizes else []
    if one.root is not None and other.root is not None:
        fields.append(Field.ROOT)
    return next((field for field in fields if field_value(one, field) != field_value(other, field)), None)
