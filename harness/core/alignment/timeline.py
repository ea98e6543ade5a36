"""A rank's timeline: the calls that matter to other ranks, in the order in which the rank entered them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from math import prod
from typing import NamedTuple

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Board, Call, Collective
from nsa_harness.core.evidence.steps import SETUP, call_of, entered_s
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.group_waits import TRANSFERS, operation

# Elsewhere sizes rightly differ: the root of a scatter has the payload, objects have any size, all_to_all and (on NCCL)
# all_gather and reduce_scatter may be uneven.
_EVEN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "_all_gather_base", "all_gather_into_tensor",
    "all_gather_single", "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single",
})  # fmt: skip
_EVEN_ON_GLOO = _EVEN | {"all_gather", "all_gather_coalesced", "reduce_scatter"}  # gloo refuses uneven ones


class Token(NamedTuple):
    """What an event is compared by: equal ones are the same call with the same arguments."""

    site: tuple[object, ...]
    op: str
    called: bool
    elements: int
    dtype: str
    root: int | None
    even: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """One rank entering one collective, or one transfer."""

    group: str
    op: str
    called: bool  # from Python
    place: Place | None  # the line it was called from; None = below Python, or not known
    elements: int  # of all its tensors
    dtype: str
    root: int | None  # of a rooted collective; the partner of a transfer
    even: bool  # every rank has to give as many elements, of the same type
    seq: int | None  # the recorder's number in the group
    at_s: float
    done: bool
    step: int | None
    position: int | None  # training marks since that step began
    call: Call | None = None
    collective: Collective | None = None

    @property
    def transfer(self) -> bool:
        return self.op in TRANSFERS

    @property
    def token(self) -> Token:
        return Token(self.site, self.op, self.called, self.elements, self.dtype, self.root, self.even)

    @property
    def site(self) -> tuple[object, ...]:
        """Which call of the program this is, whatever it is called with. Below Python only the sizes tell."""
        if not self.called:
            return (self.group, self.op, self.elements)
        return (self.group, self.op, self.place.file if self.place else None, self.place.line if self.place else None)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything one rank entered, oldest first, as far back as nothing is missing."""

    rank: int
    events: tuple[Event, ...]
    whole: bool  # from the beginning on

    def of_group(self, group: str) -> tuple[Event, ...]:
        return tuple(one for one in self.events if one.group == group and not one.transfer)


def timeline(rank: int, board: Board | None, collectives: Sequence[Collective], backend: str) -> Timeline:
    """From both sources: what the recorder numbered, and what the board knows of the same calls and of others."""
    even = _EVEN_ON_GLOO if backend == "gloo" else _EVEN
    calls = [one for one in board.calls if _matters(one)] if board else []
    # Without a common clock nobody knows which call a number belongs to.
    apart = {one.group for one in calls} if board and board.zero_ns is None else set()
    series = _unbroken([one for one in collectives if one.group not in apart])
    numbered = [replace(one, even=one.op in even) for one in _numbered(board, series)]
    if board and board.calls and board.calls[0].number > 1:
        # Of what is older than the calls that are kept nobody knows whether it was called from Python.
        numbered = [one for one in numbered if one.at_s >= board.calls[0].entered_s]
    joined = {one.call.number for one in numbered if one.call}
    alone = [_called(one, even) for one in calls if one.number not in joined]
    if any(not one.called for one in numbered):
        # Without what lay between them below Python, older calls are no timeline.
        alone = [one for one in alone if one.at_s >= numbered[0].at_s]
    return Timeline(
        rank=rank,
        events=tuple(sorted([*alone, *numbered], key=lambda one: (one.at_s, one.seq or 0))),
        whole=(not calls or calls[0].number == 1) and all(one.seq == 1 for one in _first_of_each(series)),
    )


def _matters(call: Call) -> bool:
    """Waits are no step of the program; what makes and ends groups has rules of its own."""
    return not call.op.startswith((protocol.WAIT, *SETUP))


def _unbroken(collectives: Sequence[Collective]) -> list[Collective]:
    """Of each group what follows the last hole in its numbers: what is older was lost, or kept for being open."""
    kept: list[Collective] = []
    for _, group in groupby(sorted(collectives, key=lambda one: (one.group, one.seq)), key=lambda one: one.group):
        series = list(group)
        breaks = [at for at in range(1, len(series)) if series[at].seq > series[at - 1].seq + 1]
        kept += series[breaks[-1] :] if breaks else series
    return sorted(kept, key=lambda one: (one.created_ns, one.group, one.seq))


def _first_of_each(series: Sequence[Collective]) -> Iterator[Collective]:
    return (min(group, key=lambda one: one.seq) for group in _by_group(series))


def _by_group(series: Sequence[Collective]) -> Iterator[list[Collective]]:
    return (list(group) for _, group in groupby(sorted(series, key=lambda one: one.group), key=lambda one: one.group))


def _numbered(board: Board | None, series: Sequence[Collective]) -> Iterator[Event]:
    """One event for each; a call that enters several is one event with the first one's number."""
    before: Event | None = None
    for one in series:
        event = _entered(board, one)
        same_call = before is not None and event.call is not None and event.call == before.call
        if before is not None and same_call:
            before = replace(before, done=before.done and event.done)
            continue
        if before is not None:
            yield before
        before = event
    if before is not None:
        yield before


def _entered(board: Board | None, one: Collective) -> Event:
    call = call_of(board, one) if board else None
    at_s = (entered_s(board, one) if board else None) or one.created_ns / 1e9
    below = Event(
        group=one.group,
        op=one.op,
        called=False,
        place=None,
        elements=elements(one),
        dtype="/".join(one.dtypes),
        root=None,
        even=False,
        seq=one.seq,
        at_s=at_s,
        done=one.retired,
        step=_step_at(board, at_s) if board and board.zero_ns is not None else None,
        position=None,
        collective=one,
    )
    if call is None:
        return below
    return replace(
        below,
        op=operation(call),
        called=True,
        place=call.place,
        root=call.peer,
        step=call.step,
        position=call.position,
        call=call,
    )


def _step_at(board: Board, at_s: float) -> int | None:
    """The step in progress then; None for what lies before the oldest step that is remembered."""
    if not board.steps_s or (board.steps_s[0][0] > 1 and at_s < board.steps_s[0][1]):
        return None
    return next((step for step, done_s in board.steps_s if at_s <= done_s), board.steps_s[-1][0] + 1)


def _called(call: Call, even: frozenset[str]) -> Event:
    return Event(
        group=call.group,
        op=operation(call),
        called=True,
        place=call.place,
        elements=call.elements,
        dtype=call.dtype,
        root=call.peer,
        even=call.op in even,
        seq=None,
        at_s=call.entered_s,
        done=call.left_s is not None,
        step=call.step,
        position=call.position,
        call=call,
    )


def elements(collective: Collective) -> int:
    """Of all its tensors: their shapes need not agree between ranks."""
    return sum(prod(sizes) for sizes in collective.sizes)


class Field(StrEnum):
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"


def value(event: Event | Token, field: Field) -> int | str | None:
    if field is Field.ROOT:
        return event.root
    return event.elements if field is Field.SHAPE else event.dtype


def field_apart(one: Event | Token, other: Event | Token) -> Field | None:
    """The first field in which two entries of one operation may not differ."""
    if one.op != other.op:
        return None
    fields = [Field.SHAPE, Field.DTYPE] if one.even and other.even else []
    if one.root is not None and other.root is not None:
        fields.append(Field.ROOT)
    return next((field for field in fields if value(one, field) != value(other, field)), None)
