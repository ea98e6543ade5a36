"""Timelines: the collectives and transfers of each rank, in the order of the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import TRAINING, Call, Collective, Frame, Stack, StatusFile
from nsa_harness.core.evidence.stacks import GroupCall, NativeWait, group_call, is_library, native_wait
from nsa_harness.core.evidence.steps import SETUP, elements, entered_s, python_calls
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.group_waits import TRANSFERS, call_of_stack, operation

UNKNOWN_GROUP = "?"  # a stack does not show the process group of a call
# Operations with equal sizes on all ranks if the backend is gloo, which refuses unequal sizes in the last three.
_EQUAL_SIZES_ON_GLOO = protocol.EQUAL_SIZES | {"all_gather", "all_gather_coalesced", "reduce_scatter"}


class Token(NamedTuple):
    """The properties by which calls of different ranks are compared, and which are equal for matching calls."""

    site: tuple[object, ...]
    op: str
    from_python: bool
    elements: int
    dtype: str
    root: int | None
    needs_equal_sizes: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """One rank's call to a collective or transfer."""

    group: str
    op: str
    from_python: bool  # the program called it; False if it was called below Python, for example by DDP
    place: Place | None  # the line that called it; None if it was called below Python, or if unknown
    elements: int  # number of elements of all tensors together
    dtype: str
    root: int | None  # root of a rooted collective, or partner of a transfer
    needs_equal_sizes: bool  # every rank must pass the same number of elements, of the same dtype
    seq: int | None  # the flight recorder's number in the group; None if not recorded
    at_s: float
    is_done: bool  # the rank has left the call
    step: int | None  # optimizer step in progress
    position: int | None  # number of training events since that step began
    call: Call | None = None
    collective: Collective | None = None
    chain: tuple[Frame, ...] = ()  # the program's own lines that led to the call, innermost first; empty if unknown

    @property
    def is_transfer(self) -> bool:
        return self.op in TRANSFERS

    @property
    def token(self) -> Token:
        """The properties by which this event is compared with events on other ranks."""
        return Token(self.site, self.op, self.from_python, self.elements, self.dtype, self.root, self.needs_equal_sizes)

    @property
    def site(self) -> tuple[object, ...]:
        """The identity of the call in the program, without its arguments."""
        if not self.from_python:
            return (self.group, self.op, self.elements)
        line = (self.place.file, self.place.line) if self.place else (None, None)
        return (self.group, self.op, *line, self.chain)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The collectives and transfers of one rank in call order, beginning after the latest gap in the records."""

    rank: int
    events: tuple[Event, ...]  # oldest first
    is_complete: bool  # nothing is missing since the start of the run
    groups_with_gaps: frozenset[str] = frozenset()  # groups with unexplained gaps in the flight recorder

    def of_group(self, group: str) -> tuple[Event, ...]:
        """Return the rank's collectives in one process group, oldest first."""
        return self._events_by_group.get(group, ())

    @property
    def groups(self) -> Iterable[str]:
        """The process groups in which the rank called a collective."""
        return self._events_by_group

    @cached_property
    def _events_by_group(self) -> dict[str, tuple[Event, ...]]:
        events: dict[str, list[Event]] = {}
        for event in self.events:
            if not event.is_transfer:
                events.setdefault(event.group, []).append(event)
        return {group: tuple(of_group) for group, of_group in events.items()}


def with_comparable_callers(timelines: Mapping[int, Timeline]) -> dict[int, Timeline]:
    """Return the timelines without the call paths of calls whose path is unknown on any rank."""
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
    groups_with_gaps: Collection[str] = (),
) -> Timeline:
    """Return the timeline of a rank, built from its flight recorder and status file.

    Calls of threads other than the training thread are not included. `groups_with_gaps`: groups whose recorder lacks
    numbers.
    """
    equal_sized = _EQUAL_SIZES_ON_GLOO if backend == "gloo" else protocol.EQUAL_SIZES
    training_tid = _training_tid(status_file) if status_file else None
    calls = (
        [call for call in status_file.calls if _belongs_in_timeline(call) and _is_by_thread(call, training_tid)]
        if status_file
        else []
    )
    # If the two clocks cannot be compared, it is unknown which call a recorded collective belongs to.
    unmatched_groups = {call.group for call in calls} if status_file and status_file.zero_ns is None else set()
    series = _unbroken([collective for collective in collectives if collective.group not in unmatched_groups])
    recorded_events = [
        replace(event, needs_equal_sizes=event.op in equal_sized) for event in _recorded_events(status_file, series)
    ]
    if status_file and status_file.calls and status_file.calls[0].number > 1:
        # Whether Python called a collective is unknown if it is older than the stored calls.
        recorded_events = [event for event in recorded_events if event.at_s >= status_file.calls[0].entered_s]
    oldest = {
        collective.group: collective.seq
        for collective in sorted(series, key=lambda collective: collective.seq, reverse=True)
    }
    recorded_calls = {event.call.number for event in recorded_events if event.call}
    recorded_events = [
        event for event in recorded_events if event.call is None or _is_by_thread(event.call, training_tid)
    ]
    other_events = [_event_of_call(call, equal_sized) for call in calls if call.number not in recorded_calls]
    if any(not event.from_python for event in recorded_events):
        # Before the recorded events, the events below Python between the calls are missing.
        other_events = [event for event in other_events if event.at_s >= recorded_events[0].at_s]
    return Timeline(
        rank=rank,
        events=tuple(sorted([*other_events, *recorded_events], key=lambda event: (event.at_s, event.seq or 0))),
        groups_with_gaps=frozenset(groups_with_gaps),
        is_complete=_has_every_call(status_file) and set(oldest.values()) <= {1},
    )


def timeline_of_stack(rank: int, stack: Stack | None, at_s: float) -> Timeline:
    """Return a timeline of at most one call for a rank of which only the stack is known."""
    frames = stack.frames if stack else ()
    stack_call = group_call(frames)
    if stack is not None and stack_call is None and native_wait(stack) is NativeWait.WORK:
        stack_call = GroupCall(op=NativeWait.WORK.value, by="")
    chain = _own_lines(frames)
    call = call_of_stack(stack) if stack else None
    if stack_call is None:
        return Timeline(rank=rank, events=(), is_complete=False)
    event = Event(
        group=UNKNOWN_GROUP,
        op=stack_call.text,
        from_python=not stack_call.by,
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
    """Return the native id of the training thread, not of autograd or a prefetcher, or None if it is unknown."""
    training_events = [event for event in status_file.events if event.kind in TRAINING]
    tids = [
        event.tid for event in training_events if event.tid == status_file.pid or event.kind not in ("backward", "data")
    ]
    if not tids and any(call.tid == status_file.pid for call in status_file.calls):
        return status_file.pid
    return tids[0] if tids else None


def _is_by_thread(call: Call, tid: int | None) -> bool:
    return tid is None or call.tid is None or call.tid == tid


def _has_every_call(status_file: StatusFile | None) -> bool:
    """Return whether the status file still stores every call of the rank."""
    if status_file is None or not status_file.counts:
        return status_file is None or not status_file.calls or status_file.calls[0].number == 1
    stored_counts = Counter(
        call.group
        for call in status_file.calls
        if operation(call) not in TRANSFERS and not call.op.startswith(protocol.WAIT)
    )
    return all(total.calls <= stored_counts[group] for group, total in status_file.counts.items())


def _belongs_in_timeline(call: Call) -> bool:
    """Return whether a call belongs in a timeline: it neither waits on a handle nor creates or destroys a group."""
    return not call.op.startswith((protocol.WAIT, *SETUP))


def _unbroken(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the collectives after the latest gap in the numbers of each group, in chronological order."""
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
    """Yield an event for each recorded collective, or one for all that the same Python call entered."""
    calls = python_calls(status_file, series) if status_file else {}
    events = (
        _event_of_collective(status_file, collective, calls.get((collective.group, collective.seq)))
        for collective in series
    )
    for _, same_call in groupby(
        events, key=lambda event: event.call.number if event.call else (event.group, event.seq)
    ):
        first, *others = same_call
        yield replace(first, is_done=first.is_done and all(event.is_done for event in others))


def _event_of_collective(status_file: StatusFile | None, collective: Collective, call: Call | None) -> Event:
    at_s = (entered_s(status_file, collective) if status_file else None) or collective.created_ns / 1e9
    if call is not None:
        return replace(
            _event_of_call(call, frozenset()),
            group=collective.group,
            seq=collective.seq,
            at_s=at_s,
            is_done=collective.retired,
            collective=collective,
        )
    # Without a status file, the recorded stack shows whether the program called the collective.
    stack_call = None if status_file else group_call(collective.frames)
    from_python = stack_call is not None and not stack_call.by
    chain = _own_lines(collective.frames) if from_python else ()
    return Event(
        group=collective.group,
        op=collective.op,
        from_python=from_python,
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
    """Return the optimizer step in progress at the time `at_s`, or None if it is unknown."""
    if not status_file.steps_s or (status_file.steps_s[0][0] > 1 and at_s < status_file.steps_s[0][1]):
        return None
    return next((step for step, done_s in status_file.steps_s if at_s <= done_s), status_file.steps_s[-1][0] + 1)


def _event_of_call(call: Call, equal_sized: frozenset[str]) -> Event:
    """Convert a call made from Python to an event. Every rank passes the same size to operations in `equal_sized`."""
    return Event(
        group=call.group,
        op=operation(call),
        from_python=True,
        place=call.place,
        elements=call.elements,
        dtype=call.dtype,
        root=call.peer,
        needs_equal_sizes=call.op in equal_sized,
        seq=None,
        at_s=call.entered_s,
        is_done=call.left_s is not None,
        step=call.step,
        position=call.position,
        call=call,
        chain=call.chain,
    )


class Field(StrEnum):
    """An argument that must be equal on all ranks for some collectives."""

    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"


def field_value(event: Event | Token, field: Field) -> int | str | None:
    """Return the value of `field` for an event: the root, the number of elements or the dtype."""
    if field is Field.ROOT:
        return event.root
    return event.elements if field is Field.SHAPE else event.dtype


def differing_field(event: Event | Token, other: Event | Token) -> Field | None:
    """Return the first argument that must be equal but differs between two calls of one operation, or None."""
    if event.op != other.op:
        return None
    fields = [Field.SHAPE, Field.DTYPE] if event.needs_equal_sizes and other.needs_equal_sizes else []
    if event.root is not None and other.root is not None:
        fields.append(Field.ROOT)
    return next((field for field in fields if field_value(event, field) != field_value(other, field)), None)
