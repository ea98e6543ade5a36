"""Build the report's table of the collective calls around the point at which the ranks diverge."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.report import Divergence, EnteredCall

_ROWS_BEFORE, _ROWS_AFTER = 3, 2  # rows before and after the first row that differs
_MAX_COLUMNS = 6

_Row = tuple[EnteredCall | None, ...]


def divergence(
    difference: Difference, timelines: Mapping[int, Timeline], at_fault: Collection[int]
) -> Divergence | None:
    """Return a table of the calls around a difference, or None if all ranks made equal calls."""
    columns = {rank: _column(difference, timelines[rank]) for rank in difference.all_ranks if rank in timelines}
    ranks_of: dict[_Row, list[int]] = {}
    for rank, column in sorted(columns.items(), key=lambda pair: (pair[0] not in at_fault, pair[0])):
        ranks_of.setdefault(column, []).append(rank)
    if len(ranks_of) < 2:
        return None
    first_columns = list(ranks_of)[:_MAX_COLUMNS]
    rows = list(zip(*first_columns, strict=True))
    before = [row for row in rows[:_ROWS_BEFORE] if any(row)]
    return Divergence(
        group=difference.group,
        ranks=tuple(tuple(sorted(ranks_of[column])) for column in first_columns),
        rows=(*before, *(row for row in rows[_ROWS_BEFORE:] if any(row))),
        shared=next((at for at, row in enumerate(before) if len(set(row)) > 1), len(before)),
    )


def _column(difference: Difference, line: Timeline) -> _Row:
    """Return one rank's column in the table of calls. A missing call is represented by None."""
    events = line.of_group(difference.group)
    diverging_event = difference.event(line.rank)
    at = next((at for at, event in enumerate(events) if event is diverging_event), len(events))
    before = events[max(0, at - _ROWS_BEFORE) : at]
    after = events[at : at + 1 + _ROWS_AFTER]
    return (
        *[None] * (_ROWS_BEFORE - len(before)),
        *map(_entered_call, (*before, *after)),
        *[None] * (1 + _ROWS_AFTER - len(after)),
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
        inside=not event.is_done,
    )
