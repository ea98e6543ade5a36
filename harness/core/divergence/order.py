"""The order in which a rank enters the collectives of a group, held against its own order before."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness import protocol
from nsa_harness.core.divergence.divergence import Divergence, Members, Track
from nsa_harness.core.evidence.evidence import Board, Call, Collective
from nsa_harness.core.evidence.steps import SETUP

_TIMES = 2  # that a line was passed, before what it does can be called usual


def went_ahead(found: Divergence, tracks: Mapping[int, Track]) -> Members:
    """The ranks that left something out: they entered what they usually enter later, and some other rank what is due.

    Empty where that is not shown, and where it would be every rank.
    """
    entered = {entry.rank: entry.collective for entry in found.entries}
    due = {rank for rank, one in entered.items() if _is_due(one, tracks[rank])}
    ahead = tuple(rank for rank, one in sorted(entered.items()) if rank not in due and _is_later(one, tracks[rank]))
    return ahead if due and len(due) + len(ahead) == len(entered) else ()


def added(found: Divergence, tracks: Mapping[int, Track]) -> Members:
    """The ranks that entered something which they never entered before, where all others did what is due."""
    entered = {entry.rank: entry.collective for entry in found.entries}
    new = tuple(rank for rank, one in sorted(entered.items()) if _is_new(one, tracks[rank]))
    due = {rank for rank, one in entered.items() if rank not in new and _is_due(one, tracks[rank])}
    return new if due and len(due) + len(new) == len(entered) else ()


@dataclass(frozen=True, kw_only=True)
class Departure:
    """`due` was left out behind `after`, the last call that the rank made in its usual order."""

    due: Call  # as it was made in an earlier round
    after: Call


def first_departure(board: Board) -> Departure | None:
    """The call that was due where the rank first went on to what comes later in its rounds; None = it kept to them.

    Calls from Python only, transfers included. A call that it never made before is the end of a loop, no departure.
    """
    calls = [one for one in board.calls if not one.op.startswith(protocol.WAIT)]
    made = [_from_python(one) for one in calls]
    for number in range(1, len(made)):
        at = _same_point(made[:number])
        if at is not None and made[at] != made[number] and made[number] in made[at + 1 : number]:
            return Departure(due=calls[at], after=calls[number - 1])
    return None


def other_partner(board: Board) -> Call | None:
    """The newest transfer, where its line has had one and the same partner each time before, and now another."""
    made = [one for one in board.calls if not one.op.startswith(protocol.WAIT) and one.peer is not None]
    if not made:
        return None
    newest = made[-1]
    usual = [one.peer for one in made[:-1] if (one.op, one.group, one.place) == (newest.op, newest.group, newest.place)]
    return newest if len(usual) >= _TIMES and len(set(usual)) == 1 and usual[0] != newest.peer else None


def turned(board: Board) -> bool:
    """In its newest step it began with, or went on to, what came later in the step before."""
    calls = [one for one in board.calls if not one.op.startswith(SETUP)]
    if not calls:
        return False
    now, before = ([_from_python(one) for one in calls if one.step == calls[-1].step - back] for back in (0, 1))
    unlike = next((one for one, earlier in zip(now, before, strict=False) if one != earlier), None)
    return unlike is not None and unlike in before


def _from_python(one: Call) -> Hashable:
    return one.op, one.group, one.place, one.peer


def _is_due(one: Collective, track: Track) -> bool:
    """At this point of its order before, the rank entered the same."""
    before = _before(one, track)
    at = _same_point(before)
    return at is not None and before[at] == _signature(one)


def _is_later(one: Collective, track: Track) -> bool:
    """It was entered after this point in the order before, and not at it."""
    before = _before(one, track)
    at = _same_point(before)
    return at is not None and before[at] != _signature(one) and _signature(one) in before[at + 1 :]


def _is_new(one: Collective, track: Track) -> bool:
    before = _before(one, track)
    return _same_point(before) is not None and _signature(one) not in before


def _same_point(before: Sequence[Hashable]) -> int | None:
    """Where what now follows stood the last time: behind the newest earlier series that ends as `before` does.

    The longest such series decides, as layers of one size make short ones ambiguous.
    """
    best: tuple[int, int] | None = None
    for at in range(len(before) - 1, 0, -1):
        length = 0
        while length < at and before[at - 1 - length] == before[len(before) - 1 - length]:
            length += 1
        if length and (best is None or length > best[0]):
            best = (length, at)
    return best[1] if best else None


def _before(one: Collective, track: Track) -> list[Hashable]:
    return [_signature(other) for other in track.collectives if other.group == one.group and other.seq < one.seq]


def _signature(one: Collective) -> Hashable:
    return one.op, one.sizes, one.dtypes
