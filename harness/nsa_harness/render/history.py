"""The lines that `nsa-harness history` and `compare` print, and their HTML pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from nsa_harness.core.comparison.history import (
    QUANTITIES,
    RANK_STEP,
    Change,
    Comparison,
    Entry,
    Quantity,
    Row,
    VerdictChange,
    flake_rate,
    verdict_changes,
)
from nsa_harness.core.report import Outcome, Status
from nsa_harness.render.answer import COMMUNICATION_HEAD, communication_rows
from nsa_harness.render.documents.html import page_html
from nsa_harness.render.sections import (
    Bullets,
    Card,
    Chart,
    Charts,
    Heading,
    Line,
    Part,
    Pictures,
    RunAnswer,
    Section,
    Sentence,
    Span,
    Table,
    join_texts,
    line,
    lines,
)
from nsa_harness.render.terminal.layout import labelled, paragraph, table
from nsa_harness.render.text import escape, escaped, link_target
from nsa_harness.texts.words import LOUDEST_FIRST, listing, middle, number, plural, seconds, size

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_POINTS = 40
_SHOWN = ("step", RANK_STEP, "wall time", "memory per rank")  # the quantities in the table of a history
_TEXT_WIDTH = 60
_MOST_CALLS = 12
_CHANGES = 10
_OVERVIEW_HEAD = ("scenario", "runs", "not as expected", "latest", "run")
_SETTINGS_CHANGED = "the settings of the run changed"
_NOTHING_CHANGED = "nothing that is recorded changed: settings, commit, packages, variables and host are the same"


def overview_lines(groups: Sequence[Sequence[Entry]], width: int) -> Iterator[str]:
    """Yield one line for each scenario or script, the latest first. Each group has the entries of one of them."""
    rows = []
    for entries in sorted(groups, key=lambda group: group[-1].run_id, reverse=True):
        bad = sum(not entry.expected for entry in entries)
        latest = escaped(entries[-1])
        rows.append((latest.scenario, str(len(entries)), str(bad), latest.result, latest.run_id))
    yield from table(_OVERVIEW_HEAD, rows, width)


def history_lines(entries: Sequence[Entry], width: int, most: int) -> Iterator[str]:
    """Yield the history of one scenario or script. `entries`: the oldest first. `most`: the latest runs to list."""
    yield f"{escape(entries[-1].scenario)}: {_run_counts(entries)}"
    if text := _flake_text(entries):
        yield from paragraph(text, width)
    yield ""
    shown = _known(_SHOWN, entries[-most:])
    rows = [
        (entry.run_id, entry.result, *(value_text(quantity, entry.numbers.get(quantity.name)) for quantity in shown))
        for entry in escaped(tuple(entries[-most:]))
    ]
    yield from table(("run", "verdict", *(quantity.name for quantity in shown)), rows, width)
    yield from _trends(entries, width)
    for change in escaped(tuple(verdict_changes(entries))[-_CHANGES:]):
        yield ""
        yield from paragraph(f"{change.after.run_id}: {change.before.result} became {change.after.result}", width)
        yield from _surroundings(change.surroundings, width)
        if change.settings_changed:
            yield f"  {_SETTINGS_CHANGED}"
        elif not change.surroundings:
            yield f"  {_NOTHING_CHANGED}"


def _known(names: Sequence[str], entries: Sequence[Entry]) -> list[Quantity]:
    """Return the quantities with these names that any of the attempts has."""
    known = {name for entry in entries for name in entry.numbers}
    return [quantity for quantity in QUANTITIES if quantity.name in names and quantity.name in known]


def _run_counts(entries: Sequence[Entry]) -> str:
    return f"{plural(len(entries), 'run')}, {sum(not entry.expected for entry in entries)} not as expected"


def _flake_text(entries: Sequence[Entry]) -> str:
    """Return how often the latest attempt's repeats did not end as expected, or "" if all ended in the same way."""
    rate = flake_rate(entries)
    if rate is None:
        return ""
    low, high = rate.interval
    return (
        f"{rate.bad} of {plural(rate.runs, 'run')} with the latest settings and surroundings did not end as"
        f" expected: a rate between {low * 100:.0f} and {high * 100:.0f} %"
    )


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
    return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in _heights(values))


def _heights(values: Sequence[float]) -> list[float]:
    """Return where each value is between the smallest, 0, and the largest, 1."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def comparison_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield the differences between two attempts, and whether they are a regression."""
    comparison = escaped(comparison)
    before, after = comparison.before, comparison.after
    yield from labelled("before", f"{before.run_id}  {before.scenario}  {before.result}", width)
    yield from labelled("after", f"{after.run_id}  {after.scenario}  {after.result}", width)
    if before.result != after.result and not after.expected:
        yield from labelled("why", after.summary, width)
    if comparison.rows:
        yield ""
        yield from table(("", "before", "after", "change", ""), list(map(_number_row, comparison.rows)), width)
    if comparison.calls:
        yield ""
        yield "  calls of a step that differ:"
        calls: Any = comparison.calls
        yield from table(COMMUNICATION_HEAD, communication_rows(calls)[:_MOST_CALLS], width, "    ")
    if comparison.surroundings:
        yield ""
        yield "  changed:"
        yield from _surroundings(comparison.surroundings, width)
    yield ""
    yield "regression" if comparison.is_regression else "no regression"


def _number_row(row: Row) -> tuple[str, ...]:
    sides = (value_text(row.quantity, value) for value in (row.before, row.after))
    return row.quantity.name, *sides, _change(row), _meaning(row)


def value_text(quantity: Quantity, value: float | None) -> str:
    """Return a quantity's value with its unit."""
    if value is None:
        return "-"
    if quantity.unit == "bytes":
        return size(value)
    if quantity.unit == "s":
        return seconds(value) if value >= 1 else f"{value:.3g} s"
    return f"{number(value)} {quantity.unit}".rstrip()


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


# The HTML pages. `address`: URL of the directory with the runs, relative to the page.

_MOST_DRAWN = 400  # runs in a chart
_MOST_CARDS, _MOST_ROWS, _MOST_DIFFERENCES = 12, 200, 20
_LABEL_PERCENT = 2.2  # of the width of a chart: the space that a character of a label needs
_PAGE_WIDTH = 200  # characters of a value
_LISTED = (*_SHOWN, "tokens per second", "GPU memory per rank", "last loss")


def history_page(groups: Sequence[Sequence[Entry]], address: str, most: int, notes: Sequence[str] = ()) -> str:
    """Return the HTML page of `history`. Each group has the entries of one scenario or script, the oldest first.

    `most`: the latest runs of a scenario to list. `notes`: remarks about runs that cannot be read.
    """
    groups = sorted(groups, key=lambda group: group[-1].run_id, reverse=True)
    verdicts = Counter(entry.verdict for group in groups for entry in group)
    name = _name(groups[0][-1]) if len(groups) == 1 else plural(len(groups), "scenario")
    title = f"{name}: {plural(verdicts.total(), 'run')}"
    sections: list[Section] = [Heading(text=title, tally=tuple(_tally(verdicts)))]
    sections += [_overview(groups[:_MOST_ROWS], address)] if len(groups) > 1 else []
    sections += [_history_card(group, address, most) for group in groups[:_MOST_CARDS]]
    if (more := len(groups) - _MOST_CARDS) > 0:
        sections += _remarks([f"{plural(more, 'more scenario')}: nsa-harness history NAME shows one of them"])
    sections += _remarks(notes[:_MOST_ROWS])
    return page_html(title, sections)


def _tally(verdicts: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield the verdicts that occur, with their number, the worst first."""
    return ((status.value, verdicts[status.value]) for status in LOUDEST_FIRST if verdicts[status.value])


def _name(entry: Entry) -> str:
    return middle(escape(entry.scenario), _TEXT_WIDTH)


def _remarks(texts: Sequence[str]) -> list[Section]:
    return [Sentence(line=line(escape(text)), quiet=True) for text in texts]


def _overview(groups: Sequence[Sequence[Entry]], address: str) -> Section:
    rows = []
    for entries in groups:
        counts = str(len(entries)), str(sum(not entry.expected for entry in entries))
        rows.append((line(_name(entries[-1])), *map(line, counts), _result(entries[-1]), _run(entries[-1], address)))
    head = ("scenario", "runs:", "not as expected:", "latest", "run")
    return Table(title="All scenarios and scripts", head=head, rows=tuple(rows), kind="runs", extra=("run",))


def _result(entry: Entry) -> Line:
    status = Status(entry.verdict) if entry.verdict in list(Status) else None
    return Span(escape(entry.verdict), status=status), Span(escape(entry.cause or ""))


def _run(entry: Entry, address: str) -> Line:
    file = f"{address}/{entry.run_id}/report.html"
    return (Span(escape(entry.run_id), address=link_target(file) if file == escape(file) else None),)


def _history_card(entries: Sequence[Entry], address: str, most: int) -> Section:
    drawn, listed = entries[-_MOST_DRAWN:], entries[-most:]
    positions = [at for at in range(1, len(drawn)) if drawn[at - 1].result != drawn[at].result]
    changes = list(zip(positions, verdict_changes(drawn), strict=True))[-_CHANGES:]
    sections = _charts(drawn, [(at, str(count)) for count, (at, _) in enumerate(changes, start=1)])
    if len(entries) > len(drawn):
        sections += _remarks([f"The charts show the latest {len(drawn)} of {len(entries)} runs."])
    if text := _flake_text(entries):
        sections.append(Sentence(label="Flaky:", line=line(text)))
    if changes:
        numbered = reversed(list(enumerate((change for _, change in changes), start=1)))
        inner = tuple(one for count, change in numbered for one in _change_sections(count, escaped(change), address))
        sections.append(Part(title="What changed with the verdict", sections=inner))
    title = "All runs" if len(listed) == len(entries) else f"The latest {len(listed)} runs"
    sections.append(Part(title=title, sections=(_run_table(title, listed, address),)))
    return Card(
        verdicts=(escape(entries[-1].verdict),), title=_name(entries[-1]), remark=_run_counts(entries),
        sections=tuple(sections),
    )  # fmt: skip


def _change_sections(count: int, change: VerdictChange, address: str) -> Iterator[Section]:
    """Yield the number of a change of the verdict, the run in which it occurred, and what changed with it."""
    before, after = change.before, change.after
    result = Span(f"{before.result} became {after.result}", strong=True)
    items = [f"{name}: {old} → {new}" for name, old, new in _shown(change.surroundings)]
    items += [_SETTINGS_CHANGED] if change.settings_changed else []
    remark = Span("" if items else f"({_NOTHING_CHANGED})")
    yield Sentence(line=(Span(f"{count}."), *_run(after, address), result, remark))
    if items:
        yield Bullets(title="", items=tuple(items))


def _shown(surroundings: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the differences to show on a page, with their values cut to a width that fits."""
    shown = [
        (name, middle(old, _PAGE_WIDTH), middle(new, _PAGE_WIDTH))
        for name, old, new in surroundings[:_MOST_DIFFERENCES]
    ]
    left = len(surroundings) - len(shown)
    return [*shown, *([(f"and {left} more", "…", "…")] if left else [])]


def _run_table(title: str, entries: Sequence[Entry], address: str) -> Section:
    quantities = _known(_LISTED, entries)
    rows = [
        (
            _run(entry, address), _result(entry),
            *(line(value_text(quantity, entry.numbers.get(quantity.name))) for quantity in quantities),
        )
        for entry in reversed(entries)
    ]  # fmt: skip
    names = tuple(f"{quantity.name}:" for quantity in quantities)
    extra = tuple(name for name in names if name.rstrip(":") not in _SHOWN[:-1])
    return Table(title=title, head=("run", "verdict", *names), rows=tuple(rows), kind="runs", extra=extra)


def _charts(entries: Sequence[Entry], positions: Sequence[tuple[int, str]]) -> list[Section]:
    """Return a strip with the verdict of each run, and a line chart of each number. `positions`: (index, label)."""
    ticks: list[tuple[float, str]] = []
    labelled_at = 0  # index of the last tick with a label
    for at, label in positions:
        percent = round(100 * (at + 0.5) / len(entries), 1)
        if ticks and percent - ticks[labelled_at][0] < _LABEL_PERCENT * len(label):
            first = ticks[labelled_at][1].partition("–")[0]
            ticks[labelled_at] = (ticks[labelled_at][0], f"{first}–{label}")
            label = ""
        else:
            labelled_at = len(ticks)
        ticks.append((percent, label))
    charts, equal = [_strip(entries)], []
    for quantity in QUANTITIES:
        values = [entry.numbers.get(quantity.name) for entry in entries]
        known = [value for value in values if value is not None]
        if known and min(known) == max(known):
            equal.append(f"{quantity.name} {value_text(quantity, known[0])}")
        elif known:
            charts.append(_chart(quantity, entries, values))
    ends = (escape(entries[0].run_id), escape(entries[-1].run_id))
    remarks = _remarks([f"The same in all of these runs: {join_texts(equal)}"] if equal else [])
    return [Charts(charts=tuple(charts), ticks=tuple(ticks), ends=ends), *remarks]


def _strip(entries: Sequence[Entry]) -> Chart:
    """Return a strip in which runs with the same verdict that follow each other share a cell."""
    cells: dict[str, str] = {}
    for verdict, group in groupby(enumerate(entries), key=lambda pair: pair[1].verdict):
        (start, _), *others = group
        left, width = (round(1000 * runs / len(entries), 1) for runs in (start, 1 + len(others)))
        cells[verdict] = cells.get(verdict, "") + f"M{left} 0h{width}v100h-{width}z"
    counted = tuple(_tally(Counter(entry.verdict for entry in entries)))
    caption = join_texts(f"{count} {verdict}" for verdict, count in counted)
    marks = tuple((verdict, cells[verdict]) for verdict, _ in counted)
    return Chart(label="verdict", caption=caption, title=f"Verdicts: {caption}", line="", marks=marks)


def _chart(quantity: Quantity, entries: Sequence[Entry], values: Sequence[float | None]) -> Chart:
    known = [value for value in values if value is not None]
    heights = iter(_heights(known))
    points = {
        at: f"{1000 * (at + 0.5) / len(values):.0f} {92 - 84 * next(heights):.0f}"
        for at, value in enumerate(values)
        if value is not None
    }
    low, high, latest = (value_text(quantity, value) for value in (min(known), max(known), known[-1]))
    dots: dict[str, str] = {}
    for at, point in points.items():
        if not entries[at].expected:
            dots[entries[at].verdict] = dots.get(entries[at].verdict, "") + f"M{point}h0"
    return Chart(
        label=quantity.name,
        caption=f"{latest} ({low} to {high})",
        title=f"{quantity.name} of {len(known)} runs: {low} to {high}, {latest} in the latest",
        line="".join(f"{'L' if at - 1 in points else 'M'}{point}" for at, point in points.items()),
        marks=tuple((status.value, dots[status.value]) for status in LOUDEST_FIRST if status.value in dots),
    )


def comparison_page(
    comparisons: Sequence[Comparison],
    outcomes: Mapping[tuple[str, str], Outcome],
    earlier: Sequence[Entry],
    addresses: Sequence[str],
) -> str:
    """Return the HTML page of `compare`.

    `outcomes`: of the attempts, by run ID and directory. `earlier`: all stored attempts, the oldest first. `addresses`:
    URLs of the directories with the first and with the second run, relative to the page.
    """
    is_regression = any(comparison.is_regression for comparison in comparisons)
    sides = [comparisons[0].before, comparisons[0].after]
    before, after = (_run(entry, address) for entry, address in zip(sides, addresses, strict=True))
    title = "Regression" if is_regression else "No regression"
    sections: list[Section] = [
        Heading(text=title, tally=()),
        Sentence(line=(Span("From", quiet=True), *before, Span("to", quiet=True), *after)),
    ]
    for comparison in comparisons[:_MOST_ROWS]:
        sections.append(_comparison_card(escaped(comparison), outcomes, earlier, addresses))
    return page_html(f"{title}: {escape(sides[0].run_id)} to {escape(sides[1].run_id)}", sections)


def _comparison_card(
    comparison: Comparison,
    outcomes: Mapping[tuple[str, str], Outcome],
    earlier: Sequence[Entry],
    addresses: Sequence[str],
) -> Section:
    before, after = comparison.before, comparison.after
    sections: list[Section] = []
    worse = ["the run does not end as expected any more"] if before.expected and not after.expected else []
    worse += [f"{row.quantity.name} ({_change(row)})" for row in comparison.rows if row.meaning is Change.WORSE]
    if worse:
        sections.append(Sentence(label="Regression:", line=line(listing(worse))))
    for side, entry, address in zip(("Before", "After"), (before, after), addresses, strict=True):
        if entry.cause and (entry is after or before.summary != after.summary):
            outcome = outcomes.get((entry.run_id, entry.directory))
            sections.append(Part(title=f"{side}: {entry.verdict}", sections=_ending(entry, outcome, address)))
    rows = tuple(map(_number_row, comparison.rows))
    bad = frozenset(at for at, row in enumerate(comparison.rows) if row.meaning is Change.WORSE)
    if rows:
        head = ("number", "before:", "after:", "change:", "meaning")
        table_ = Table(
            title="Numbers", head=head, rows=lines(rows), kind="runs", culprits=bad, badge="regression", badge_column=4
        )
        sections.append(Part(title="Numbers", sections=(table_,)))
    if comparison.calls:
        calls: Any = comparison.calls
        title = "Calls of a step that differ"
        rows = tuple(communication_rows(calls)[:_MOST_ROWS])
        sections.append(Part(title=title, sections=(Table(title=title, head=COMMUNICATION_HEAD, rows=lines(rows)),)))
    shown: Section = Sentence(line=line("No recorded difference in host, commit, packages or variables."), quiet=True)
    if comparison.surroundings:
        shown = Table(
            title="What changed in the surroundings", head=("name", "before", "after"),
            rows=lines(_shown(comparison.surroundings)),
        )  # fmt: skip
    sections.append(Part(title="Surroundings", sections=(shown,)))
    sections += _among_others(comparison, earlier)
    names = dict.fromkeys(map(_name, (before, after)))
    causes = dict.fromkeys(entry.cause or "no cause" for entry in (before, after))
    return Card(
        verdicts=(before.verdict, after.verdict), title=" → ".join(names),
        remark=" → ".join(causes) if before.cause or after.cause else "", sections=tuple(sections),
    )  # fmt: skip


def _ending(entry: Entry, outcome: Outcome | None, address: str) -> tuple[Section, ...]:
    """Return what happened in an attempt, and where its ranks diverge."""
    if outcome is None:  # the report has an older form
        return (Sentence(line=line(entry.summary)),)
    stacks = tuple(
        replace(stack, proof=stack.proof and f"{address}/{entry.run_id}/{stack.proof}") for stack in outcome.stacks
    )
    outcome = escaped(replace(outcome, stacks=stacks))
    return RunAnswer(outcome=outcome), Pictures(outcome=outcome)


def _among_others(comparison: Comparison, earlier: Sequence[Entry]) -> list[Section]:
    """Return charts of all runs of the scenario, in which both runs are marked, if there are more than these two."""
    before, after = comparison.before, comparison.after
    entries = [entry for entry in earlier if escape(entry.scenario) == after.scenario][-_MOST_DRAWN:]
    keys = {(entry.run_id, entry.directory): at for at, entry in enumerate(entries)}
    places = [
        (keys[key], label)
        for label, one in (("before", before), ("after", after))
        if (key := (one.run_id, one.directory)) in keys
    ]
    if len(entries) < 3:
        return []
    return [Part(title=f"Among {len(entries)} runs of this scenario", sections=tuple(_charts(entries, sorted(places))))]
