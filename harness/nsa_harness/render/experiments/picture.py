"""The picture of a search for the page: probes down, items across, as numbers for the template to draw.

Shapes alone are drawn, on a ground of GRID_WIDTH that is stretched to the room there is; texts stand beside them as
text, so that none can be cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from nsa_harness.core.search.report import BisectReport
from nsa_harness.core.search.subject import Subject
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.rows import OFF, ON, PARTLY, Row, pooled, rows, sign
from nsa_harness.texts import words

GRID_WIDTH, ROW_HEIGHT, CELL_HEIGHT = 400, 18, 13
SHOWN = 200  # rows
_MOST_CELLS = 100  # of more items several share one
_LABEL_EVERY = 30.0  # of GRID_WIDTH, which a telephone draws at two thirds
_SIGN = 9.0  # that one character of a label takes there
_REMARK = 60  # characters; the title of the row has the whole
_ROLES = {ON: "on", PARTLY: "partly", OFF: "off"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    x: float
    width: float
    role: str  # "on", "partly" or "off", of a zone what it counts as: a class of the style sheet


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """`open_x` and `open_width` are the items that were open before it."""

    row: Row
    cells: tuple[Cell, ...]
    open_x: float
    open_width: float
    remark: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    noun: str
    labels: tuple[tuple[float, str], ...]  # percent of the width, and what stands there
    rows: tuple[ProbeRow, ...]
    answer: tuple[Cell, ...]  # the items of the answer
    omitted: int


def picture(report: BisectReport) -> Picture | None:
    """None where nothing was asked."""
    if not report.probes:
        return None
    subject, answer = report.subject, _answer(report)
    counted = bisect_words.counted(len(subject.items), subject.noun)
    drawn = tuple(_drawn(subject, row) for row in islice(rows(report), SHOWN))
    return Picture(
        title=f"{words.plural(len(report.probes), 'probe')} against "
        + (f"values of {subject.key}" if subject.ordered else counted),
        noun=subject.key if subject.ordered else subject.noun,
        labels=_labels(subject),
        rows=drawn,
        answer=_zones(report) or (_cells(subject, answer) if answer else ()),
        omitted=len(report.probes) - len(drawn),
    )


def _drawn(subject: Subject, row: Row) -> ProbeRow:
    value = words.middle(row.value, 24)
    first, last = _x(row.open[0], subject), _x(max(row.open), subject)
    return ProbeRow(
        row=row,
        cells=_cells(subject, row.chosen),
        open_x=first,
        open_width=round(last - first, 1),
        remark=words.middle(" · ".join(filter(None, (value, row.remark))), _REMARK),
    )


def _cells(subject: Subject, chosen: frozenset[int]) -> tuple[Cell, ...]:
    """The value on its line; of items without an order each one, with a gap between them where there is room."""
    if subject.ordered:
        # The good end lies before the first item.
        at = _x(max(chosen, default=-1) + 1, subject)
        return (Cell(x=min(max(at - 4.0, 0.0), GRID_WIDTH - 8.0), width=8.0, role="on"),)
    pools = pooled(len(subject.items), _MOST_CELLS)
    wide = GRID_WIDTH / len(pools)
    gap = 2.0 if wide >= 10 else 1.0 if wide >= 6 else 0.0
    return tuple(
        Cell(
            x=round(index * wide, 1),
            width=round(wide - gap, 1),
            role=_ROLES[sign([place in chosen for place in pool])],
        )
        for index, pool in enumerate(pools)
    )


def _zones(report: BisectReport) -> tuple[Cell, ...]:
    """Up to the mark of its last value each."""
    edges = [(_x(max(zone.start - 1, 0), report.subject), zone) for zone in report.answer.zones]
    ends = [x for x, _ in edges[1:]] + [float(GRID_WIDTH)] * bool(edges)
    pairs = zip(edges, ends, strict=True)
    return tuple(Cell(x=x, width=round(end - x, 1), role=zone.counts_as.value) for (x, zone), end in pairs)


def _x(place: int, subject: Subject) -> float:
    return round(GRID_WIDTH * place / len(subject.items), 1)


def _labels(subject: Subject) -> tuple[tuple[float, str], ...]:
    if subject.ordered:
        ends = (bisect_words.value_before(subject, 0), subject.label(len(subject.items) - 1))
        return ((0.0, words.middle(ends[0], 16)), (100.0, words.middle(ends[1], 16)))
    pools = pooled(len(subject.items), _MOST_CELLS)
    wide = GRID_WIDTH / len(pools)
    every = max(1, math.ceil(_LABEL_EVERY / wide))
    names = [subject.label(pool[0]) for pool in pools]
    short = all(len(name) * _SIGN <= wide * every for name in names)
    shown = names if short else [str(pool[0] + 1) for pool in pools]
    return tuple((round(100 * (index + 0.5) / len(pools), 2), shown[index]) for index in range(0, len(pools), every))


def legend(report: BisectReport) -> tuple[str, ...]:
    """What the numbers over the columns stand for, where they are not the items themselves."""
    subject = report.subject
    items = tuple(bisect_words.item_word(subject, place) for place in range(len(subject.items)))
    return () if subject.ordered or all(label in items for _, label in _labels(subject)) else items


def _answer(report: BisectReport) -> frozenset[int]:
    """The items that the answer names; of several culprits all."""
    groups = report.answer.groups or (report.answer.failing or (),)
    return frozenset().union(*groups) if report.answer.items else frozenset()
