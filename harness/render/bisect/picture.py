"""The picture of a search for the page: probes down, items across, as numbers for the template to draw."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.bisect.question import last_place
from nsa_harness.core.bisect.report import BisectTold, ProbeTold
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
class Row:
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
    rows: tuple[Row, ...]
    answer: tuple[Cell, ...]  # the items of the answer
    height: int
    left_out: int


def picture(told: BisectTold) -> Picture | None:
    """None where nothing was asked."""
    if not told.probes:
        return None
    pairs = list(zip(told.probes, following_each(told.probes), strict=True))[:SHOWN]
    pools = _pools(len(told.subject.items))
    rows = tuple(
        _row(told, probe, step_word(told.subject, probe, told, following), pools, TOP + ROW_HEIGHT * index)
        for index, (probe, following) in enumerate(pairs)
    )
    return Picture(
        title=f"{words.plural(len(told.probes), 'probe')} against {_what(told)}",
        noun=told.subject.key if told.subject.ordered else told.subject.noun,
        labels=_labels(told, pools),
        rows=rows,
        answer=_cells(told, frozenset(_answer(told)), pools) if _answer(told) else (),
        height=TOP + ROW_HEIGHT * (len(rows) + 1) + 6,
        left_out=len(told.probes) - len(rows),
    )


def _row(told: BisectTold, probe: ProbeTold, step: str, pools: tuple[range, ...], y: int) -> Row:
    remark = " · ".join(filter(None, (_value(told, probe), bisect_words.remark(told, probe))))
    verdict = probe.verdict or NO_VERDICT
    took = words.seconds(probe.wall_s) if probe.verdict else ""
    asked = bisect_words.config_words(told.subject.config(probe.places))
    first, last = _x(probe.open[0], told), _x(max(probe.open), told)
    return Row(
        y=y,
        n=probe.n,
        step=step,
        cells=_value_cell(told, probe) if told.subject.ordered else _cells(told, probe.places, pools),
        open_x=first,
        open_width=round(last - first, 1),
        verdict=verdict,
        role=verdict,
        took=took,
        remark=cropped(remark, _REMARK),
        title=" · ".join(part for part in (f"probe {probe.n}", step, asked, verdict, took, remark) if part),
    )


def _cells(told: BisectTold, chosen: frozenset[int], pools: tuple[range, ...]) -> tuple[Cell, ...]:
    """A gap between items where there is room for one."""
    if told.subject.ordered:
        return tuple(_mark(told, place) for place in sorted(chosen)[-1:])
    wide = GRID_WIDTH / len(pools)
    gap = 2.0 if wide >= 10 else 1.0 if wide >= 6 else 0.0
    roles = [_role([place in chosen for place in pool]) for pool in pools]
    return tuple(
        Cell(x=round(GRID_X + index * wide, 1), width=round(wide - gap, 1), role=role)
        for index, role in enumerate(roles)
    )


def _value_cell(told: BisectTold, probe: ProbeTold) -> tuple[Cell, ...]:
    last = last_place(probe.subset)
    return (_mark(told, -1 if last is None else last),)


def _mark(told: BisectTold, place: int) -> Cell:
    """A value on its line; the good end lies before the first item."""
    return Cell(x=round(_x(place + 1, told) - 4, 1), width=8.0, role="on")


def _x(place: int, told: BisectTold) -> float:
    return round(GRID_X + GRID_WIDTH * place / len(told.subject.items), 1)


def _value(told: BisectTold, probe: ProbeTold) -> str:
    if not told.subject.ordered:
        return ""
    last = last_place(probe.subset)
    label = bisect_words.value_before(told.subject, 0) if last is None else told.subject.label(last)
    return cropped(label, 24)


def _labels(told: BisectTold, pools: tuple[range, ...]) -> tuple[tuple[float, str], ...]:
    subject = told.subject
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


def legend(told: BisectTold) -> tuple[str, ...]:
    """What the numbers over the columns stand for, where they are not the items themselves."""
    subject = told.subject
    if subject.ordered or _numbers(told):
        return ()
    return tuple(bisect_words.item_word(subject, place) for place in range(len(subject.items)))


def _numbers(told: BisectTold) -> bool:
    labels = [label for _, label in _labels(told, _pools(len(told.subject.items)))]
    values = [bisect_words.item_word(told.subject, place) for place in range(len(told.subject.items))]
    return all(label in values for label in labels)


def _pools(count: int) -> tuple[range, ...]:
    size = max(1, -(-count // int(GRID_WIDTH / _LEAST_CELL)))
    return tuple(range(start, min(start + size, count)) for start in range(0, count, size))


def _role(chosen: list[bool]) -> str:
    return "on" if all(chosen) else "partly" if any(chosen) else "off"


def _answer(told: BisectTold) -> tuple[int, ...]:
    """The items that the answer names; of several culprits all."""
    groups = told.answer.groups or ((told.answer.failing,) if told.answer.failing else ())
    found = {place for group in groups for place in group or ()}
    return tuple(sorted(found)) if told.answer.items else ()


def _what(told: BisectTold) -> str:
    if told.subject.ordered:
        return f"values of {told.subject.key}"
    return bisect_words.counted(len(told.subject.items), told.subject.noun)
