"""Make the report's table of the collectives that ranks entered just before and after they diverged."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.report import Divergence, EnteredCall

_BEFORE, _BEHIND = 3, 2  # rows before and after the first row that differs
_MAX_COLUMNS = 6

_Row = tuple[EnteredCall | None, ...]


def divergence(
    difference: Difference, timelines: Mapping[int, Timeline], at_fault: Collection[int]
) -> Divergence | None:
    """Return the table of a difference, or None if its rows are equal for all ranks.

    Ranks with equal rows share one column. The columns of the ranks in `at_fault` come first.
    """
    columns = {rank: _column(difference, timelines[rank]) for rank in difference.all_ranks if rank in timelines}
    ranks_of: dict[_Row, list[int]] = {}
    for rank, column in sorted(columns.items(), key=lambda pair: (pair[0] not in at_fault, pair[0])):
        ranks_of.setdefault(column, []).append(rank)
    if len(ranks_of) < 2:
        return None
    shown = list(ranks_of)[:_MAX_COLUMNS]
    rows = list(zip(*shown, strict=True))
    before = [row for row in rows[:_BEFORE] if any(row)]
    return Divergence(
        group=difference.group,
        ranks=tuple(tuple(sorted(ranks_of[column])) for column in shown),
        rows=(*before, *(row for row in rows[_BEFORE:] if any(row))),
        shared=next((at for at, row in enumerate(before) if len(set(row)) > 1), len(before)),
    )


def _column(difference: Difference, line: Timeline) -> _Row:
    """Return the calls of one rank around the point where the ranks diverge, as a column of the table.

    All columns have the same length. Missing calls are None, so the diverging call has the same row in each column.
    """
    events = line.of_group(difference.group)
    parting = difference.event(line.rank)
    at = next((at for at, event in enumerate(events) if event is parting), len(events))
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
        inside=not event.is_done,
    )
