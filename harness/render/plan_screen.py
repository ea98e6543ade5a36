"""What the terminal shows of several outcomes: a line for each that went well, and the table at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.cells import cell_len

from harness.core.report import Outcome, Report, Status
from harness.render import words
from harness.render.layout import command, cropped, paragraph
from harness.render.screen import headline
from harness.render.text import escape, escaped

_SENTENCE_COLUMNS = 28  # beside the row; with less room it stands below
_LINES_BESIDE, _LINES_BELOW = 2, 4
_LABEL_WIDTH = 11


def needs_a_screen(outcome: Outcome) -> bool:
    """Among several outcomes, one that passed or did not run is told in a line, and so is a look into another one."""
    if outcome.deepening and outcome.showed:
        return False
    went_well = outcome.verdict.status in (Status.PASS, Status.SKIP)
    return not went_well or not outcome.expected or outcome.flaky


def outcome_line(outcome: Outcome, width: int) -> Iterator[str]:
    outcome = escaped(outcome)
    if outcome.verdict.status is Status.SKIP:
        text = f"SKIP  {outcome.scenario}   {outcome.verdict.summary}"
    elif outcome.showed:
        text = f"{headline(outcome)}   {outcome.showed}"
    else:
        text = " · ".join((headline(outcome), *words.numbers(outcome)))
    yield from paragraph(text, width, "", "      ")


def done_lines(report: Report, run_dir: Path, width: int) -> Iterator[str]:
    """The verdicts in order where there are several, the counts, where everything lies, and how to go on."""
    report = escaped(report)
    if report.interrupted:
        yield from paragraph("Interrupted: only what is listed was judged.", width)
        yield ""
    if len(report.outcomes) != 1:
        yield from _verdicts(report, width)
        yield from paragraph(words.counts_line(report), width, "", "  ")
        yield ""
        yield from _labelled("expected", _expectations(report), width)
    yield from _labelled("artifacts", _artifacts(report), width)
    yield from command("report", f"{escape(str(run_dir))}/SUMMARY.md", width, _LABEL_WIDTH)
    yield from command("page", f"{escape(str(run_dir))}/report.html", width, _LABEL_WIDTH)
    following = _next(report, run_dir)
    if following is not None:
        yield from command("next", escape(following), width, _LABEL_WIDTH)


def _verdicts(report: Report, width: int) -> Iterator[str]:
    """The sentence beside its row, or below it where the line is narrow or a name long."""
    names = [_name(outcome) for outcome in report.outcomes]
    times = [words.wall_time(outcome) for outcome in report.outcomes]
    longest, time_columns = max(map(cell_len, names), default=0), max(map(cell_len, times), default=0)
    digits = len(str(len(report.outcomes)))
    room = width - digits - time_columns - 13  # for the name
    beside = longest + 3 + _SENTENCE_COLUMNS <= room
    name_columns = min(longest, max(room, 1))
    for number, (outcome, name, took) in enumerate(zip(report.outcomes, names, times, strict=True), start=1):
        head = f"  {number:>{digits}}  {outcome.verdict.status:<5}  "
        row = f"{head}{_padded(cropped(name, name_columns), name_columns)}  {took:>{time_columns}}"
        sentence = _sentence(outcome)
        if not (beside and sentence):
            yield cropped(row.rstrip(), width)
        first, most = (f"{row}   ", _LINES_BESIDE) if beside else (" " * len(head), _LINES_BELOW)
        yield from _short(sentence, width, first, most)
    if report.outcomes:
        yield ""


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - cell_len(text))


def _short(sentence: str, width: int, first: str, most: int) -> Iterator[str]:
    """The sentence in at most so many lines; SUMMARY.md has the whole."""
    lines = list(paragraph(sentence, width, first, " " * cell_len(first))) if sentence else []
    kept = lines[:most]
    if len(lines) > most:
        kept[-1] += " …"
    yield from (cropped(line, width) for line in kept)


def _name(outcome: Outcome) -> str:
    return outcome.scenario if outcome.attempt == 1 and outcome.final else f"{outcome.scenario} ~{outcome.attempt}"


def _sentence(outcome: Outcome) -> str:
    """What was expected, then what was seen; of a PASS its numbers."""
    bad = outcome.verdict.status not in (Status.PASS, Status.SKIP)
    expected = "as expected" if bad and outcome.expected else "" if outcome.expected else "not as expected"
    remarks = ("does not count" if not outcome.final else "", "flaky" if outcome.flaky else "")
    if outcome.showed:
        return f"does not count · {outcome.showed}"
    return " · ".join(part for part in (expected, *remarks, words.in_a_row(outcome)) if part)


def _expectations(report: Report) -> str:
    final = [outcome for outcome in report.outcomes if outcome.final and outcome.verdict.status is not Status.SKIP]
    met = sum(outcome.expected for outcome in final)
    if not final:
        return "no run"
    return "every run" if met == len(final) else f"{met} of {words.plural(len(final), 'run')}"


def _artifacts(report: Report) -> str:
    every = [artifact for outcome in report.outcomes for artifact in outcome.artifacts]
    absent = sum(artifact.absent is not None for artifact in every)
    if not every:
        return ""
    reason = f" · {absent} absent, each with its reason in SUMMARY.md" if absent else ""
    return f"{len(every) - absent} written{reason}"


def _labelled(label: str, text: str, width: int) -> Iterator[str]:
    if text:
        yield from paragraph(text, width, f"  {label:<{_LABEL_WIDTH}}", " " * (_LABEL_WIDTH + 2))


def _next(report: Report, run_dir: Path) -> str | None:
    """The command that goes on: with what was cut short, with what the gates ask, with the first surprise."""
    from harness.core.compared.decisions import decided, fired  # here alone, so that a run begins sooner

    if report.interrupted:
        return f"nsa-harness run --resume={shlex.quote(str(run_dir))}"
    asked = (one.answer.command for one in fired(decided(report.outcomes)))
    outcomes = sorted((one for _, one in words.bad_news_first(report)), key=lambda one: one.expected)
    offered = (one.next or (None if one.expected else one.repeat) for one in outcomes)
    alone = "nsa-harness run -t plan" if len(report.outcomes) == 1 else None
    return next(filter(None, (*asked, *offered)), alone)
