"""The values of names that decide what the ranks do or differ between ranks, as a line and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from nsa_harness.core.report import NamedValue, Outcome, Place
from nsa_harness.render.answer import short_names
from nsa_harness.texts import words

_MAX_COLUMNS = 8  # if more ranks have values, equal values share one text
_MAX_ON_LINE = 6
_MAX_CELL = 40  # characters of a value on the terminal
_SHORT = 12  # characters of a value that is easier to read once for each rank
_BETWEEN_RANKS, _BETWEEN_NAMES = " | ", "     "
_NONE = "-"  # the rank has no such value


def values_line(outcome: Outcome, columns: int) -> str:
    """Return the most telling values as one line, such as "stopper.bad  3 | 1 | 1     stopper.patience  3 | 3 | 3".

    The values of a name are in the order of the ranks; a long value that all ranks share is shown once. As many names
    are shown as fit into `columns`, but at least one.
    Return "" if there are no values.
    """
    ranks = _ranks(outcome.values)
    deciding = [value for value in outcome.values if value.decides] or list(outcome.values)
    line = ""
    for value in deciding[:_MAX_ON_LINE]:
        cells = list(_cells(value, ranks))
        shown = _on_line(cells)
        text = f"{value.name}  {shown}{', ' if shown else ''}{_origin(value)}".rstrip(", ")
        longer = f"{line}{_BETWEEN_NAMES}{text}" if line else text
        if line and cell_len(longer) > columns:
            break
        line = longer
    return line


def values_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column names and the rows of a table of all values, with a column for each rank of a small job."""
    ranks = _ranks(outcome.values)
    places = [Place(file=value.file, line=value.line, function=value.function) for value in outcome.values]
    name_of = short_names(places)
    rows = [
        (
            value.name,
            *_cells(value, ranks),
            f"{name_of(place)} {value.function} {_origin(value)}".rstrip(),
            _ROLE[value.decides],
        )
        for value, place in zip(outcome.values, places, strict=True)
    ]
    columns = [words.ranks([rank]) for rank in ranks] if len(ranks) <= _MAX_COLUMNS else ["values"]
    return ("name", *columns, "where", "role"), rows


def _on_line(cells: Sequence[str]) -> str:
    """Return the values of all ranks as one text. A long value that all of them share is shown once."""
    if len(cells) < 2:
        return "".join(cells)
    if len(set(cells)) == 1 and len(cells[0]) > _SHORT:
        return f"{_cropped(cells[0])} on all ranks"
    return _BETWEEN_RANKS.join(map(_cropped, cells))


_ROLE = {True: "decides", False: "differs"}


def _ranks(values: Sequence[NamedValue]) -> list[int]:
    return sorted({rank for value in values for equal in value.values for rank in equal.ranks})


def _origin(value: NamedValue) -> str:
    """Return the line that a value decides and the lines that set it, or "" if the source was not searched for them."""
    set_in = f", set in {', '.join(map(str, value.definitions))}" if value.definitions else ""
    return f"decides line {value.line}{set_in}" if set_in or not value.values else ""


def _cells(value: NamedValue, ranks: Sequence[int]) -> Iterator[str]:
    """Yield the value on each rank, or a single text in a job of many ranks."""
    if len(ranks) <= _MAX_COLUMNS:
        by_rank = {rank: equal.value for equal in value.values for rank in equal.ranks}
        yield from (by_rank.get(rank, _NONE) for rank in ranks)
        return
    fewest_first = sorted(value.values, key=lambda equal: len(equal.ranks))
    yield _BETWEEN_RANKS.join(f"{_cropped(equal.value)} ({words.ranks(equal.ranks)})" for equal in fewest_first)


def _cropped(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"
