"""The picture of a search as text: one row a probe, one column an item, or the value where the items are in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rich.cells import cell_len

from nsa_harness.core.search.subject import Form, Subject, plural
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.rows import ON, PARTLY, Row, pooled
from nsa_harness.render.terminal.layout import NARROW, cropped, padded, paragraph
from nsa_harness.render.text import escape

_NUMBER, _VERDICT, _TIME = 3, 5, 6
_LEAST_STEP, _MOST_STEP = 19, 33
_INDENT = " " * (_NUMBER + 2)
_LEAST_LEGEND = 24  # columns for a name that hangs from its column
_TICK = 10  # columns between the labels of a ruler


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows of one width, so that each can be printed when its probe ends."""

    subject: Subject
    width: int

    def head(self) -> Iterator[str]:
        """The line with the items, and below it what each column stands for where it cannot say so itself."""
        if self.subject.ordered:
            return
        noun = escape(self.subject.noun)
        if self._narrow:
            yield cropped(f"{_INDENT}{self._ruler}   {noun}", self.width)
        else:
            columns = len(_INDENT) + self._step
            yield f"{cropped(noun, columns):>{columns}}  {self._ruler}"
        yield from self._legend()

    def row(self, row: Row) -> Iterator[str]:
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

    def whole(self, rows: Iterable[Row]) -> Iterator[str]:
        """Head and rows of a search that has ended."""
        yield from self.head()
        for row in rows:
            yield from self.row(row)

    def _with_remark(self, line: str, remark: str) -> Iterator[str]:
        if not remark:
            yield line
        elif cell_len(line) + 2 + cell_len(remark) <= self.width:
            yield f"{line}  {remark}"
        else:
            yield line
            yield from paragraph(remark, self.width, f"{_INDENT}  ")

    def _cells(self, row: Row) -> str:
        if self.subject.ordered:
            return cropped(escape(f"{self._name}{row.value}"), self._room)
        if not row.launched:  # so nothing was switched on or off
            return " " * self._grid_columns
        signs = row.signs(self._pools)
        if self._numbered:
            return " ".join(sign.ljust(len(label)) for sign, label in zip(signs, self._labels, strict=True)).rstrip()
        return "".join(signs)

    @property
    def _name(self) -> str:
        """Before a value: a commit needs none."""
        return "" if self.subject.form is Form.COMMIT else f"{self.subject.key.rpartition('.')[2]} "

    @property
    def _narrow(self) -> bool:
        return self.width < NARROW

    @cached_property
    def _step(self) -> int:
        """Columns for what a probe narrowed."""
        whole = bisect_words.span(self.subject, (0, len(self.subject.items)))
        return min(max(2 * cell_len(escape(whole)) + 3, _LEAST_STEP), _MOST_STEP)

    @property
    def _room(self) -> int:
        """Columns for the items: what the other cells leave."""
        beside = 0 if self._narrow else self._step + 2
        return max(self.width - len(_INDENT) - beside - 3 - _VERDICT - 1 - _TIME, 8)

    @cached_property
    def _grid_columns(self) -> int:
        if not self.subject.ordered:
            return cell_len(self._ruler) if self._numbered else len(self._pools)
        places = [*range(min(len(self.subject.items), 2)), len(self.subject.items) - 1]
        labels = [bisect_words.value_before(self.subject, 0), *map(self.subject.label, places)]
        return min(max(cell_len(escape(f"{self._name}{label}")) for label in labels), self._room)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(escape(bisect_words.item_word(self.subject, place)) for place in range(len(self.subject.items)))

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """The items at the top of their columns; long names are numbers that the legend explains."""
        fits = sum(map(cell_len, self._names)) + len(self._names) - 1 <= self._room
        if self.subject.form is Form.LAYERS or fits:
            return self._names
        return tuple(str(place + 1) for place in range(len(self._names)))

    @cached_property
    def _numbered(self) -> bool:
        """Each item has a column with its label."""
        return sum(map(cell_len, self._labels)) + len(self._labels) - 1 <= self._room

    @cached_property
    def _pools(self) -> tuple[range, ...]:
        count = len(self.subject.items)
        return pooled(count, count if self._numbered else self._room)

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

    def _legend(self) -> Iterator[str]:
        if self._labels != self._names:
            left = len(_INDENT) if self._narrow else len(_INDENT) + self._step + 2
            ends = [left + sum(len(one) + 1 for one in self._labels[:place]) for place in range(len(self._names))]
            hangs = self._numbered and ends[-1] + _LEAST_LEGEND <= self.width
            for place in reversed(range(len(self._names))) if hangs else range(len(self._names)):
                label, name = self._labels[place], self._names[place]
                bars = "".join(f"{'│':>{end - before}}" for before, end in pairwise((-1, *ends[:place])))
                first, rest = (f"{bars:<{ends[place]}}└ ", bars) if hangs else (f"  {label:>3}  ", " " * 7)
                yield from paragraph(name, self.width, first, f"{rest:<{len(first)}}")
        if len(self._pools[0]) > 1:
            size = len(self._pools[0])
            pooled = f"one column is {size} {plural(self.subject.noun)}: {ON} all on, {PARTLY} some"
            yield from paragraph(escape(pooled), self.width, "  ")
