"""The lines that `nsa-harness history`, `compare` and `prune` print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_harness.core.comparison.history import (
    QUANTITIES,
    Change,
    Comparison,
    Entry,
    Quantity,
    Row,
    flake_rate,
    verdict_changes,
)
from nsa_harness.render.terminal.layout import labelled, paragraph, table
from nsa_harness.texts.words import middle, number, plural, seconds, size

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_POINTS = 40
_SHOWN = ("step", "wall time", "memory per rank")  # the quantities in the table of a history
_TEXT_WIDTH = 60
_CHANGES = 10


def overview_lines(groups: Sequence[Sequence[Entry]], width: int) -> Iterator[str]:
    """Yield one line for each scenario or script, the latest first. Each group has the entries of one of them."""
    rows = []
    for entries in sorted(groups, key=lambda group: group[-1].run_id, reverse=True):
        bad = sum(not entry.expected for entry in entries)
        rows.append((entries[-1].scenario, str(len(entries)), str(bad), entries[-1].result, entries[-1].run_id))
    yield from table(("scenario", "runs", "not as expected", "latest", "run"), rows, width)


def history_lines(entries: Sequence[Entry], width: int, most: int) -> Iterator[str]:
    """Yield the history of one scenario or script. `entries`: the oldest first. `most`: the latest runs to list."""
    bad = sum(not entry.expected for entry in entries)
    yield f"{entries[-1].scenario}: {plural(len(entries), 'run')}, {bad} not as expected"
    if (rate := flake_rate(entries)) is not None:
        low, high = rate.interval
        yield from paragraph(
            f"{rate.bad} of {plural(rate.runs, 'run')} with the latest settings and surroundings did not end as"
            f" expected: a rate between {low * 100:.0f} and {high * 100:.0f} %",
            width,
        )
    yield ""
    shown = [quantity for quantity in QUANTITIES if quantity.name in _SHOWN]
    rows = [
        (entry.run_id, entry.result, *(value_text(quantity, entry.numbers.get(quantity.name)) for quantity in shown))
        for entry in entries[-most:]
    ]
    yield from table(("run", "verdict", *(quantity.name for quantity in shown)), rows, width)
    yield from _trends(entries, width)
    changes = list(verdict_changes(entries))[-_CHANGES:]
    for change in changes:
        yield ""
        yield from paragraph(f"{change.after.run_id}: {change.before.result} became {change.after.result}", width)
        yield from _surroundings(change.surroundings, width)
        if change.settings_changed:
            yield "  the settings of the run changed"
        elif not change.surroundings:
            yield "  nothing that is recorded changed: settings, commit, packages, variables and host are the same"


def _trends(entries: Sequence[Entry], width: int) -> Iterator[str]:
    """Yield a sparkline for each quantity that several runs have."""
    first = True
    for quantity in QUANTITIES:
        values = [entry.numbers[quantity.name] for entry in entries if quantity.name in entry.numbers]
        values = values[-min(_MOST_POINTS, max(width // 2, 8)) :]
        if len(values) > 2 and max(values) > min(values):
            if first:
                yield ""
                first = False
            ends = f"{value_text(quantity, values[0])} to {value_text(quantity, values[-1])}"
            yield f"  {quantity.name:<20}{sparkline(values)}  {ends}"


def sparkline(values: Sequence[float]) -> str:
    """Return one character for each value, from the lowest block for the smallest to the highest for the largest."""
    low, high = min(values), max(values)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * steps) if high > low else 0] for value in values)


def comparison_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield the differences between two attempts, and whether they are a regression."""
    before, after = comparison.before, comparison.after
    yield from labelled("before", f"{before.run_id}  {before.scenario}  {before.result}", width)
    yield from labelled("after", f"{after.run_id}  {after.scenario}  {after.result}", width)
    if before.result != after.result and not after.expected:
        yield from labelled("why", after.summary, width)
    if comparison.rows:
        yield ""
        rows = [
            (
                row.quantity.name, value_text(row.quantity, row.before), value_text(row.quantity, row.after),
                _change(row), _meaning(row),
            )
            for row in comparison.rows
        ]  # fmt: skip
        yield from table(("", "before", "after", "change", ""), rows, width)
    if comparison.surroundings:
        yield ""
        yield "  changed:"
        yield from _surroundings(comparison.surroundings, width)
    yield ""
    yield "regression" if comparison.is_regression else "no regression"


def value_text(quantity: Quantity, value: float | None) -> str:
    """Return a quantity's value with its unit."""
    if value is None:
        return "-"
    if quantity.unit == "bytes":
        return size(value)
    return seconds(value) if quantity.unit == "s" and value >= 1 else f"{number(value)} {quantity.unit}".rstrip()


def _change(row: Row) -> str:
    return f"{row.change * 100:+.1f} %" if row.change else "0 %"


def _meaning(row: Row) -> str:
    if row.meaning is Change.SAME:
        return ""
    noise = "" if row.spread is None else f" (repeats vary by {row.spread * 100:.1f} %)"
    return f"{row.meaning.value}{noise}"


def _surroundings(differences: Sequence[tuple[str, str, str]], width: int) -> Iterator[str]:
    for name, before, after in differences:
        text = f"{name}: {middle(before, _TEXT_WIDTH)} -> {middle(after, _TEXT_WIDTH)}"
        yield from paragraph(text, width, first="    ", rest="      ")
