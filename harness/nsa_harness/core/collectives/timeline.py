"""Make a rank's timeline: its collectives and transfers in the order in which it entered them."""

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
    """The value that events are compared by: equal tokens are the same call with the same arguments."""

    site: tuple[object, ...]
    op: str
    from_python: bool
    elements: int
    dtype: str
    root: int | None
    needs_equal_sizes: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """One rank's entry into one collective, or one transfer."""

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
        """The identity of the call in the program without its arguments. Below Python only the sizes identify it."""
        if not self.from_python:
            return (self.group, self.op, self.elements)
        line = (self.place.file, self.place.line) if self.place else (None, None)
        return (self.group, self.op, *line, self.chain)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that one rank entered, oldest first, back to the first gap."""

    rank: int
    events: tuple[Event, ...]
    is_complete: bool  # complete since the start of the run
    groups_with_gaps: frozenset[str] = frozenset()  # groups whose recorder has unexplained gaps

    def of_group(self, group: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.group == group and not event.is_transfer)


def with_comparable_callers(timelines: Mapping[int, Timeline]) -> dict[int, Timeline]:
    """Return the timelines without the callers of a call if some rank does not know them.

    An event with callers would differ from the same event without them.
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
    """Return the timeline from the recorder's numbered calls and the status file's calls.

    Calls of threads other than the training thread are not included.
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
    """Return the timeline of a rank without any record: the one call that its stack is in, if any."""
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
    """Return the training thread. autograd's own threads record only backward, a prefetching thread only data."""
    marked = [event for event in status_file.events if event.kind in TRAINING]
    trains = [event.tid for event in marked if event.tid == status_file.pid or event.kind not in ("backward", "data")]
    if not trains and any(call.tid == status_file.pid for call in status_file.calls):
        return status_file.pid
    return trains[0] if trains else None


def _is_by_thread(call: Call, tid: int | None) -> bool:
    return tid is None or call.tid is None or call.tid == tid


def _has_every_call(status_file: StatusFile | None) -> bool:
    """Whether the status file stores every call: by each group's count if known, else by the oldest call's number."""
    if status_file is None or not status_file.counts:
        return status_file is None or not status_file.calls or status_file.calls[0].number == 1
    stored = Counter(
        call.group
        for call in status_file.calls
        if operation(call) not in TRANSFERS and not call.op.startswith(protocol.WAIT)
    )
    return all(total.calls <= stored[group] for group, total in status_file.counts.items())


def _belongs_in_timeline(call: Call) -> bool:
    """Whether the call belongs in a timeline. Waits on a handle, and calls that create or destroy groups, do not."""
    return not call.op.startswith((protocol.WAIT, *SETUP))


def _unbroken(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the entries after the last gap in the numbers of each group. Older entries are incomplete."""
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
    """Yield one event per recorded call; a call that enters several collectives is one event with the first number."""
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
    """Return the step in progress then; None before the oldest remembered step."""
    if not status_file.steps_s or (status_file.steps_s[0][0] > 1 and at_s < status_file.steps_s[0][1]):
        return None
    return next((step for step, done_s in status_file.steps_s if at_s <= done_s), status_file.steps_s[-1][0] + 1)


def _event_of_call(call: Call, even: frozenset[str]) -> Event:
    """Return the event of a call from Python. `even`: operations with the same number of elements on every rank."""
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
    """Return the first field that must be equal in two calls of one operation, and is not; None if they agree."""
    if one.op != other.op:
        return None
    fields = [Field.SHAPE, Field.DTYPE] if one.needs_equal_sizes and other.needs_equal_sizes else []
    if one.root is not None and other.root is not None:
        fields.append(Field.ROOT)
    return next((field for field in fields if field_value(one, field) != field_value(other, field)), None)
