"""The chart of a bisection, with one row for each test run, as lines of text and as shapes for HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

from rich.cells import cell_len

from nsa_harness.core.experiment.trial import SLOW, Signature, file_and_line, is_same_failure
from nsa_harness.core.report import Status
from nsa_harness.core.search.question import CONTROLS, ProbeResult, Purpose, Round, Subset
from nsa_harness.core.search.report import BisectReport, ProbeReport
from nsa_harness.core.search.subject import Subject, SubjectForm, describe_layers, plural
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.terminal.layout import NARROW, beside_or_below, cropped, padded, paragraph
from nsa_harness.render.text import escape
from nsa_harness.texts import words

ON, OFF, PARTLY = "■", "·", "▒"
NO_VERDICT, EARLY = "none", "wait"

NextProbe = Round | ProbeReport  # the next round of probes, or the first probe of the next round


@dataclass(frozen=True, kw_only=True)
class ProbeText:
    """The cells of the table row for one test run. `took` is empty if the run could not be launched."""

    n: int
    step: str  # "[0,12) → [6,12)" if the probe narrows the search, otherwise its purpose
    purpose: str  # "right edge, fork"
    switched_on: Subset  # indices of the items that were switched on
    open: tuple[int, int]  # half-open range of the items that were still open before the probe
    value: str  # for ordered items, the value that was launched; otherwise empty
    config: str
    was_launched: bool
    verdict: str  # EARLY if it was stopped before its verdict, NO_VERDICT if it could not be launched
    counts_as: ProbeResult
    took: str
    remark: str  # whether the failure is the sought one, or why the probe could not be judged
    dir: str | None  # relative to the run directory; None: there is none

    def signs(self, columns: Sequence[range]) -> list[str]:
        """Return, for each column of item indices, a character that shows whether its items are switched on."""
        return [sign([index in self.switched_on for index in column]) for column in columns]

    @property
    def title(self) -> str:
        """The tooltip for the row on the HTML page."""
        parts = (f"probe {self.n}", self.step, self.config, self.verdict, self.took, self.value, self.remark)
        return " · ".join(filter(None, parts))


def rows(report: BisectReport) -> Iterator[ProbeText]:
    """Yield one table row for each test run."""
    for index, probe in enumerate(report.probes):
        # Probes of one round are adjacent; the first probe of the next round shows what this round left open.
        following = (other for other in report.probes[index + 1 :] if _round(other) != _round(probe))
        yield row(report, probe, next(following, None))


def row(report: BisectReport, probe: ProbeReport, following: NextProbe | None) -> ProbeText:
    """Return the table row for a test run. `following`, if known, shows what this run left open."""
    subject = report.subject
    step_time = "" if probe.step_s is None else f"{bisect_words.step_time_text(probe.step_s)} a step"
    return ProbeText(
        n=probe.n,
        step=_step(report, probe, following),
        purpose=f"{probe.purpose.value.replace('_', ' ')}, {probe.launcher}",
        switched_on=probe.indices,
        open=probe.open,
        value=bisect_words.last_value(subject, probe) if subject.ordered else "",
        config=bisect_words.config_text(subject.config(probe.indices)),
        was_launched=probe.was_launched,
        verdict=EARLY if probe.early else probe.verdict or NO_VERDICT,
        counts_as=probe.counts_as,
        took=words.seconds(probe.wall_s) if probe.was_launched else "",
        remark=", ".join(filter(None, (step_time, _result_text(report, probe), _repeats_text(report, probe)))),
        dir=probe.dir,
    )


def column_groups(count: int, max_columns: int) -> tuple[range, ...]:
    """Distribute the indices of `count` items over at most `max_columns` columns."""
    size = max(1, -(-count // max_columns))
    return tuple(range(start, min(start + size, count)) for start in range(0, count, size))


def sign(on: Sequence[bool]) -> str:
    """Return a character that shows whether all, some or none of the items are on."""
    return ON if all(on) else PARTLY if any(on) else OFF


def _round(probe: ProbeReport) -> tuple[Purpose, tuple[int, int], int]:
    return probe.purpose, probe.open, probe.left


def _step(report: BisectReport, probe: ProbeReport, following: NextProbe | None) -> str:
    subject = report.subject
    if probe.purpose not in bisect_words.SEARCHING:
        return _purpose(subject, probe)
    before = bisect_words.range_text(subject, probe.open)
    # The next round shows what is still open. After the last round, it follows from the probe's own result.
    still_open = bisect_words.range_left_open(probe, report)
    if following is not None and following.purpose is probe.purpose:
        is_inside = probe.open[0] <= following.open[0] and following.open[1] <= probe.open[1]
        still_open = following.open if is_inside else still_open
    after = bisect_words.range_text(subject, still_open)
    return before if after == before else f"{before} → {after}"


def _purpose(subject: Subject, probe: ProbeReport) -> str:
    match probe.purpose:
        case Purpose.CONTROL_GOOD | Purpose.CONTROL_BAD:
            return "control"
        case Purpose.ALONE:
            return f"only {_short_items(subject, sorted(probe.indices))}"
        case Purpose.DROP_ONE:
            missing = sorted(set(range(*probe.open)) - probe.indices)
            return f"proof: without {_short_items(subject, missing)}" if len(missing) == 1 else "proof: one removed"
        case Purpose.PROOF_BAD | Purpose.PROOF_GOOD:
            return f"proof, {probe.launcher}"
    return bisect_words.PURPOSES[probe.purpose]


def _short_items(subject: Subject, indices: Sequence[int]) -> str:
    """Return the items at `indices` as text for a narrow column."""
    if subject.form is SubjectForm.LAYERS:
        shorter = describe_layers([int(str(subject.items[index])) for index in indices])
        return shorter if len(shorter) <= 8 else f"{len(indices)}"
    return ", ".join(str(index + 1) for index in indices) if len(indices) <= 3 else f"{len(indices)}"


def _result_text(report: BisectReport, probe: ProbeReport) -> str:
    """Return a remark about the result of a test run, or "" if it passed."""
    if probe.early:
        return "same wait, stopped early"
    if probe.counts_as is ProbeResult.UNRESOLVED and probe.verdict == Status.PASS:
        return "not judged: fewer than two optimizer steps, so its step time is unknown"
    if probe.counts_as is ProbeResult.UNRESOLVED:
        reason = "not judged" if probe.was_launched else "could not be launched"
        return f"{reason}: {probe.summary}" if probe.summary else reason
    if probe.counts_as is ProbeResult.DIFFERENT:
        return f"another failure: {probe.cause or 'unknown cause'}, {probe.summary}"
    if probe.counts_as is ProbeResult.GOOD:
        return ""
    if report.signature is not None and report.signature.verdict == SLOW:
        return "slow"
    has_earlier_failure = any(other.n < probe.n and other.counts_as is ProbeResult.BAD for other in report.probes)
    if probe.purpose in CONTROLS or not has_earlier_failure:
        return _where(probe)
    probe_signature = Signature(verdict=probe.verdict or "", cause=probe.cause, place=file_and_line(probe.place))
    return (
        "same"
        if report.signature is None or is_same_failure(probe_signature, report.signature)
        else f"also counts: {probe_signature}"
    )


def _where(probe: ProbeReport) -> str:
    layer = probe.place.layer if probe.place else None
    parts = (probe.phase, None if layer is None else f"layer {layer}", probe.cause if layer is None else None)
    return ", ".join(part for part in parts if part)


def _repeats_text(report: BisectReport, probe: ProbeReport) -> str:
    """Return the number of equal results among repeated test runs, such as "2 of 3", or "" for a single run."""
    repeats = [other for other in report.probes if other.subset == probe.subset and other.n <= probe.n]
    equal = sum(other.counts_as is probe.counts_as for other in repeats)
    return f"{equal} of {len(repeats)}" if len(repeats) > 1 else ""


# The picture as text: one row per probe. It has one column per item or, for ordered items, shows the value.


_NUMBER, _VERDICT, _TIME = 3, 5, 6  # widths of table columns, in columns of the terminal
_LEAST_STEP, _MOST_STEP = 19, 33  # minimum and maximum width of the table column with the step
_INDENT = " " * (_NUMBER + 2)
_LEAST_LEGEND = 24  # minimum width for a name in the legend, if a line connects it with its column
_MAX_WIDTH = 160  # a wider screen, or a file, does not widen the grid
_TICK = 10  # distance between labels above the columns, if not every column has one


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of test runs for the terminal. Its column widths are fixed, so each row can be printed at once."""

    subject: Subject
    width: int

    def head(self) -> Iterator[str]:
        """Yield the header lines of the table, which show the items that the bisection varies."""
        if self.subject.ordered:
            return
        noun = escape(self.subject.noun)
        yield from paragraph(escape(self._key), self.width, "        ")
        if self._narrow:
            yield cropped(f"{_INDENT}{self._ruler}   {noun}", self.width)
        else:
            columns = len(_INDENT) + self._step
            yield f"{cropped(noun, columns):>{columns}}  {self._ruler}"
        yield from self._legend()

    def row(self, row: ProbeText) -> Iterator[str]:
        """Yield the lines of the table that show one test run."""
        step, remark, number = escape(row.step), escape(row.remark), f"{row.n:>{_NUMBER}}  "
        cells, verdict = self._cells(row), cropped(escape(row.verdict), _VERDICT)
        if self._narrow:
            yield from paragraph(step, self.width, number, _INDENT)
            yield from self._with_remark(f"{_INDENT}{cells}   {verdict}   {row.took}".rstrip(), remark)
            return
        if cell_len(step) > self._step:
            yield from paragraph(step, self.width, number, _INDENT)
            number, step = _INDENT, ""
        line = f"{number}{padded(step, self._step)}  {padded(cells, self._grid_columns)}   {verdict:<{_VERDICT}}"
        yield from self._with_remark(f"{line} {row.took:>{_TIME}}".rstrip(), remark)

    def whole(self, rows: Iterable[ProbeText]) -> Iterator[str]:
        """Yield all lines of the table."""
        yield from self.head()
        for row in rows:
            yield from self.row(row)

    def _with_remark(self, line: str, remark: str) -> Iterator[str]:
        yield from beside_or_below(line, f"  {remark}", self.width, f"{_INDENT}  ")

    def _cells(self, row: ProbeText) -> str:
        if self.subject.ordered:
            return cropped(escape(f"{self._name}{row.value}"), self._room)
        if not row.was_launched:  # no item was switched on or off
            return " " * self._grid_columns
        signs = row.signs(self._pools)
        if self._numbered:
            return " ".join(sign.ljust(len(label)) for sign, label in zip(signs, self._labels, strict=True)).rstrip()
        return "".join(signs)

    @property
    def _name(self) -> str:
        """The name of the varied setting, which is shown before its value."""
        return "" if self.subject.form is SubjectForm.COMMIT else f"{self.subject.key.rpartition('.')[2]} "

    @property
    def _narrow(self) -> bool:
        return self.width < NARROW

    @cached_property
    def _step(self) -> int:
        """The width, in terminal columns, of the column that describes a step of the search."""
        whole = bisect_words.range_text(self.subject, (0, len(self.subject.items)))
        return min(max(2 * cell_len(escape(whole)) + 3, _LEAST_STEP), _MOST_STEP)

    @property
    def _room(self) -> int:
        """The width, in terminal columns, that is left for the columns of the items."""
        beside = 0 if self._narrow else self._step + 2
        return max(min(self.width, _MAX_WIDTH) - len(_INDENT) - beside - 3 - _VERDICT - 1 - _TIME, 8)

    @cached_property
    def _grid_columns(self) -> int:
        if not self.subject.ordered:
            return cell_len(self._ruler) if self._numbered else len(self._pools)
        indices = [*range(min(len(self.subject.items), 2)), len(self.subject.items) - 1]
        labels = [bisect_words.value_below(self.subject, 0), *map(self.subject.label, indices)]
        return min(max(cell_len(escape(f"{self._name}{label}")) for label in labels), self._room)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(escape(bisect_words.item_text(self.subject, index)) for index in range(len(self.subject.items)))

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """The labels above the columns, which are the names or numbers of the items."""
        fits = sum(map(cell_len, self._names)) + len(self._names) - 1 <= self._room
        if self.subject.form is SubjectForm.LAYERS or fits:
            return self._names
        return tuple(str(index + 1) for index in range(len(self._names)))

    @cached_property
    def _numbered(self) -> bool:
        """Whether there is enough room for one labelled column for each item."""
        return sum(map(cell_len, self._labels)) + len(self._labels) - 1 <= self._room

    @cached_property
    def _pools(self) -> tuple[range, ...]:
        count = len(self.subject.items)
        return column_groups(count, count if self._numbered else self._room)

    @cached_property
    def _ruler(self) -> str:
        if self._numbered:
            return " ".join(self._labels)
        ruler = ""
        for column in range(0, len(self._pools), _TICK):
            label = self._labels[self._pools[column][0]]
            if column + cell_len(label) <= self._room:
                ruler = f"{ruler:<{column}}{label}"
        return ruler

    @property
    def _key(self) -> str:
        """A phrase that explains the characters of the table."""
        size, nouns = len(self._pools[0]), plural(self.subject.noun)
        signs = f"{ON} on, {OFF} off"
        if size > 1:
            signs = f"one column is {size} {nouns}: {ON} all on, {PARTLY} some on, {OFF} off"
        return f"{signs}; [5,9) is {nouns} 5 to 8" if self.subject.form is SubjectForm.LAYERS else signs

    def _legend(self) -> Iterator[str]:
        if self._labels != self._names:
            indent = len(_INDENT) if self._narrow else len(_INDENT) + self._step + 2
            ends = [indent + sum(len(label) + 1 for label in self._labels[:index]) for index in range(len(self._names))]
            hangs = self._numbered and ends[-1] + _LEAST_LEGEND <= self.width
            for index in reversed(range(len(self._names))) if hangs else range(len(self._names)):
                label, name = self._labels[index], self._names[index]
                bars = "".join(f"{'│':>{end - before}}" for before, end in pairwise((-1, *ends[:index])))
                first, rest = (f"{bars:<{ends[index]}}└ ", bars) if hangs else (f"  {label:>3}  ", " " * 7)
                yield from paragraph(name, self.width, first, f"{rest:<{len(first)}}")


# The picture for the HTML page: one row per probe, one column per item. Only shapes are drawn, in a width of GRID_WIDTH
# units that the page stretches. Texts are separate HTML elements, so that they are never cut.


GRID_WIDTH, ROW_HEIGHT, CELL_HEIGHT = 400, 18, 13
MAX_DRAWN_ROWS = 200
_MOST_CELLS = 100  # if there are more items, several share a cell
_LABEL_EVERY = 30.0  # minimum distance between labels, in units of GRID_WIDTH; a phone draws them at two thirds
_SIGN = 9.0  # width of one character of a label, in units of GRID_WIDTH
_REMARK = 60  # maximum characters of a remark; the tooltip of the row has the whole remark
_ROLES = {ON: "on", PARTLY: "partly", OFF: "off"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A rectangle in one row of the chart, which stands for a group of items or a range of values."""

    x: float
    width: float
    role: str  # CSS class: "on", "partly" or "off"; for a range of values its result


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """The shapes that show one test run, and the range of items still open before it, on the HTML page."""

    row: ProbeText
    cells: tuple[Cell, ...]
    open_x: float
    open_width: float
    remark: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The chart of a bisection on the HTML page, with one row for each test run."""

    title: str
    noun: str  # the word for what the columns show
    labels: tuple[tuple[float, str], ...]  # pairs of position in percent of the width, and text
    rows: tuple[ProbeRow, ...]
    answer: tuple[Cell, ...]  # the shapes of the answer
    omitted: int  # number of probes that are not drawn


def picture(report: BisectReport) -> Picture | None:
    """Return a chart of the test runs of a bisection, or None if nothing was launched."""
    if not report.probes:
        return None
    subject, answer = report.subject, _answer(report)
    items_text = words.plural(len(subject.items), subject.noun)
    probe_rows = tuple(_draw_row(subject, row) for row in islice(rows(report), MAX_DRAWN_ROWS))
    return Picture(
        title=f"{words.plural(len(report.probes), 'probe')} over "
        + (f"values of {subject.key}" if subject.ordered else items_text),
        noun=subject.key if subject.ordered else subject.noun,
        labels=_labels(subject),
        rows=probe_rows,
        answer=_zones(report) or (_cells(subject, answer) if answer else ()),
        omitted=len(report.probes) - len(probe_rows),
    )


def _draw_row(subject: Subject, row: ProbeText) -> ProbeRow:
    value = words.middle(row.value, 24)
    first, last = _x(row.open[0], subject), _x(max(row.open), subject)
    return ProbeRow(
        row=row,
        cells=_cells(subject, row.switched_on),
        open_x=first,
        open_width=round(last - first, 1),
        remark=words.middle(" · ".join(filter(None, (value, row.remark))), _REMARK),
    )


def _cells(subject: Subject, switched_on: frozenset[int]) -> tuple[Cell, ...]:
    """Return rectangles that show which items are switched on."""
    if subject.ordered:
        # The good end lies before the first item.
        position = _x(max(switched_on, default=-1) + 1, subject)
        return (Cell(x=min(max(position - 4.0, 0.0), GRID_WIDTH - 8.0), width=8.0, role="on"),)
    columns = column_groups(len(subject.items), _MOST_CELLS)
    column_width = GRID_WIDTH / len(columns)
    gap = 2.0 if column_width >= 10 else 1.0 if column_width >= 6 else 0.0
    return tuple(
        Cell(
            x=round(number * column_width, 1),
            width=round(column_width - gap, 1),
            role=_ROLES[sign([index in switched_on for index in column])],
        )
        for number, column in enumerate(columns)
    )


def _zones(report: BisectReport) -> tuple[Cell, ...]:
    """Return one rectangle for each range of values that have the same result."""
    edges = [(_x(max(zone.start - 1, 0), report.subject), zone) for zone in report.answer.zones]
    ends = [x for x, _ in edges[1:]] + [float(GRID_WIDTH)] * bool(edges)
    pairs = zip(edges, ends, strict=True)
    return tuple(Cell(x=x, width=round(end - x, 1), role=zone.counts_as.value) for (x, zone), end in pairs)


def _x(index: int, subject: Subject) -> float:
    return round(GRID_WIDTH * index / len(subject.items), 1)


def _labels(subject: Subject) -> tuple[tuple[float, str], ...]:
    if subject.ordered:
        ends = (bisect_words.value_below(subject, 0), subject.label(len(subject.items) - 1))
        return ((0.0, words.middle(ends[0], 16)), (100.0, words.middle(ends[1], 16)))
    columns = column_groups(len(subject.items), _MOST_CELLS)
    column_width = GRID_WIDTH / len(columns)
    every = max(1, math.ceil(_LABEL_EVERY / column_width))
    names = [subject.label(column[0]) for column in columns]
    short = all(len(name) * _SIGN <= column_width * every for name in names)
    texts = names if short else [str(column[0] + 1) for column in columns]
    return tuple(
        (round(100 * (index + 0.5) / len(columns), 2), texts[index]) for index in range(0, len(columns), every)
    )


def legend(report: BisectReport) -> tuple[str, ...]:
    """Return the names of the items if the chart shows only their numbers, or else ()."""
    subject = report.subject
    items = tuple(bisect_words.item_text(subject, index) for index in range(len(subject.items)))
    return () if subject.ordered or all(label in items for _, label in _labels(subject)) else items


def _answer(report: BisectReport) -> frozenset[int]:
    """Return the indices of the items that the bisection's answer names."""
    groups = report.answer.groups or (report.answer.failing or (),)
    return frozenset().union(*groups) if report.answer.items else frozenset()
