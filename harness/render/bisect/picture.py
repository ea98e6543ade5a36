"""The picture of a search for the page: probes down, items across, as numbers for the template to draw."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.bisect.question import last_place
from nsa_harness.core.bisect.report import BisectReport, ProbeReport
from nsa_harness.render import words
from nsa_harness.render.bisect import words as bisect_words
from nsa_harness.render.bisect.grid import NO_VERDICT, following_each, step_word
from nsa_harness.render.terminal.layout import cropped

WIDTH = 920
NUMBER_X, STEP_X = 22, 32
GRID_X, GRID_WIDTH = 190, 400
VERDICT_X, TIME_X, REMARK_X = 606, 712, 726
ROW_HEIGHT, CELL_HEIGHT, TOP = 22, 13, 26
SHOWN = 200  # rows
_LEAST_CELL = 4.0  # below, several items share one
_LABEL_EVERY = 17.0
_REMARK = 30  # signs; the title of the row has the whole


@dataclass(frozen=True, kw_only=True)
class Cell:
    x: float
    width: float
    role: str  # "on", "partly" or "off": a class of the style sheet


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One probe; `open_x` and `open_width` are the items that were open before it."""

    y: int
    n: int
    step: str
    cells: tuple[Cell, ...]
    open_x: float
    open_width: float
    verdict: str
    role: str  # the verdict where it is one, else "none"
    took: str
    remark: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    noun: str
    labels: tuple[tuple[float, str], ...]
    rows: tuple[ProbeRow, ...]
    answer: tuple[Cell, ...]  # the items of the answer
    height: int
    omitted: int


def picture(report: BisectReport) -> Picture | None:
    """None where nothing was asked."""
    if not report.probes:
        return None
    pairs = list(zip(report.probes, following_each(report.probes), strict=True))[:SHOWN]
    pools = _pools(len(report.subject.items))
    rows = tuple(
        _row(report, probe, step_word(report.subject, probe, report, following), pools, TOP + ROW_HEIGHT * index)
        for index, (probe, following) in enumerate(pairs)
    )
    return Picture(
        title=f"{words.plural(len(report.probes), 'probe')} against {_what(report)}",
        noun=report.subject.key if report.subject.ordered else report.subject.noun,
        labels=_labels(report, pools),
        rows=rows,
        answer=_cells(report, frozenset(_answer(report)), pools) if _answer(report) else (),
        height=TOP + ROW_HEIGHT * (len(rows) + 1) + 6,
        omitted=len(report.probes) - len(rows),
    )


def _row(report: BisectReport, probe: ProbeReport, step: str, pools: tuple[range, ...], y: int) -> ProbeRow:
    remark = " · ".join(filter(None, (_value(report, probe), bisect_words.remark(report, probe))))
    verdict = probe.verdict or NO_VERDICT
    took = words.seconds(probe.wall_s) if probe.verdict else ""
    asked = bisect_words.config_words(report.subject.config(probe.places))
    first, last = _x(probe.open[0], report), _x(max(probe.open), report)
    return ProbeRow(
        y=y,
        n=probe.n,
        step=step,
        cells=_value_cell(report, probe) if report.subject.ordered else _cells(report, probe.places, pools),
        open_x=first,
        open_width=round(last - first, 1),
        verdict=verdict,
        role=verdict,
        took=took,
        remark=cropped(remark, _REMARK),
        title=" · ".join(part for part in (f"probe {probe.n}", step, asked, verdict, took, remark) if part),
    )


def _cells(report: BisectReport, chosen: frozenset[int], pools: tuple[range, ...]) -> tuple[Cell, ...]:
    """A gap between items where there is room for one."""
    if report.subject.ordered:
        return tuple(_mark(report, place) for place in sorted(chosen)[-1:])
    wide = GRID_WIDTH / len(pools)
    gap = 2.0 if wide >= 10 else 1.0 if wide >= 6 else 0.0
    roles = [_role([place in chosen for place in pool]) for pool in pools]
    return tuple(
        Cell(x=round(GRID_X + index * wide, 1), width=round(wide - gap, 1), role=role)
        for index, role in enumerate(roles)
    )


def _value_cell(report: BisectReport, probe: ProbeReport) -> tuple[Cell, ...]:
    last = last_place(probe.subset)
    return (_mark(report, -1 if last is None else last),)


def _mark(report: BisectReport, place: int) -> Cell:
    """A value on its line; the good end lies before the first item."""
    return Cell(x=round(_x(place + 1, report) - 4, 1), width=8.0, role="on")


def _x(place: int, report: BisectReport) -> float:
    return round(GRID_X + GRID_WIDTH * place / len(report.subject.items), 1)


def _value(report: BisectReport, probe: ProbeReport) -> str:
    if not report.subject.ordered:
        return ""
    last = last_place(probe.subset)
    label = bisect_words.value_before(report.subject, 0) if last is None else report.subject.label(last)
    return cropped(label, 24)


def _labels(report: BisectReport, pools: tuple[range, ...]) -> tuple[tuple[float, str], ...]:
    subject = report.subject
    if subject.ordered:
        ends = (bisect_words.value_before(subject, 0), subject.label(len(subject.items) - 1))
        return ((float(GRID_X), cropped(ends[0], 16)), (float(GRID_X + GRID_WIDTH), cropped(ends[1], 16)))
    wide = GRID_WIDTH / len(pools)
    every = max(1, -(-int(_LABEL_EVERY) // max(int(wide), 1)))
    names = [subject.label(pool[0]) for pool in pools]
    short = all(len(name) * 6.5 <= wide * every for name in names)
    shown = names if short else [str(pool[0] + 1) for pool in pools]
    gap = 2.0 if wide >= 10 else 0.0
    return tuple(
        (round(GRID_X + index * wide + (wide - gap) / 2, 1), shown[index]) for index in range(0, len(pools), every)
    )


def legend(report: BisectReport) -> tuple[str, ...]:
    """What the numbers over the columns stand for, where they are not the items themselves."""
    subject = report.subject
    if subject.ordered or _numbers(report):
        return ()
    return tuple(bisect_words.item_word(subject, place) for place in range(len(subject.items)))


def _numbers(report: BisectReport) -> bool:
    labels = [label for _, label in _labels(report, _pools(len(report.subject.items)))]
    values = [bisect_words.item_word(report.subject, place) for place in range(len(report.subject.items))]
    return all(label in values for label in labels)


def _pools(count: int) -> tuple[range, ...]:
    size = max(1, -(-count // int(GRID_WIDTH / _LEAST_CELL)))
    return tuple(range(start, min(start + size, count)) for start in range(0, count, size))


def _role(chosen: list[bool]) -> str:
    return "on" if all(chosen) else "partly" if any(chosen) else "off"


def _answer(report: BisectReport) -> tuple[int, ...]:
    """The items that the answer names; of several culprits all."""
    groups = report.answer.groups or ((report.answer.failing,) if report.answer.failing else ())
    found = {place for group in groups for place in group or ()}
    return tuple(sorted(found)) if report.answer.items else ()


def _what(report: BisectReport) -> str:
    if report.subject.ordered:
        return f"values of {report.subject.key}"
    return bisect_words.counted(len(report.subject.items), report.subject.noun)
