"""The collectives around the point where ranks diverge: a few rows of each timeline as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.report import Divergence, EnteredCall

_BEFORE, _BEHIND = 3, 2  # rows around the first one that differs
_MAX_COLUMNS = 6

_Row = tuple[EnteredCall | None, ...]


def divergence(found: Difference, timelines: Mapping[int, Timeline], blamed: Collection[int]) -> Divergence | None:
    """Return the table of a difference; None if no column visibly differs from another."""
    columns = {rank: _column(found, timelines[rank]) for rank in found.everyone if rank in timelines}
    alike: dict[_Row, list[int]] = {}
    for rank, column in sorted(columns.items(), key=lambda pair: (pair[0] not in blamed, pair[0])):
        alike.setdefault(column, []).append(rank)
    if len(alike) < 2:
        return None
    shown = list(alike)[:_MAX_COLUMNS]
    rows = list(zip(*shown, strict=True))
    before = [row for row in rows[:_BEFORE] if any(row)]
    return Divergence(
        group=found.group,
        ranks=tuple(tuple(sorted(alike[column])) for column in shown),
        rows=(*before, *(row for row in rows[_BEFORE:] if any(row))),
        shared=next((at for at, row in enumerate(before) if len(set(row)) > 1), len(before)),
    )


def _column(found: Difference, line: Timeline) -> _Row:
    """Return the rows of one rank: the same number for each rank, with the diverging event at the same position."""
    events = line.of_group(found.group)
    parting = found.event(line.rank)
    at = next((at for at, one in enumerate(events) if one is parting), len(events))
    before = events[max(0, at - _BEFORE) : at]
    behind = events[at : at + 1 + _BEHIND]
    return (
        *[None] * (_BEFORE - len(before)),
        *map(_entered_call, (*before, *behind)),
        *[None] * (1 + _BEHIND - len(behind)),
    )


def _entered_call(event: Event) -> EnteredCall:
    return EnteredCall(
        op=event.op,
        seq=event.seq,
        step=event.step,
        place=event.place,
        elements=event.elements,
        dtype=event.dtype,
        peer=event.root,
        inside=not event.done,
    )
