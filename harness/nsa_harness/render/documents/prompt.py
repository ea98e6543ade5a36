"""One failure as a text to paste into an issue, or to give to an assistant: its evidence, and no more than fits."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.report import Outcome, Report
from nsa_harness.render import answer
from nsa_harness.render.terminal.layout import table
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning

MOST = 6_000  # characters
_COLUMNS = 100
_CUT = "\n[cut here: report.json has the rest]\n"


def prompt_text(report: Report) -> str:
    """Of several runs the worst. What is said first is cut last."""
    report = escaped(report)
    told = answer.told_at_length(report)
    if not told:
        return f"{words.counts_line(report)}. Nothing went wrong.\n"
    sections = [section for section in _sections(report, told[0][1]) if section]
    text = "\n\n".join("\n".join(lines) for lines in sections) + "\n"
    return text if len(text) <= MOST else text[: MOST - len(_CUT)].rsplit("\n", 1)[0] + _CUT


def _sections(report: Report, outcome: Outcome) -> Iterator[list[str]]:
    verdict, said = outcome.verdict, answer.cause_of(outcome)
    yield [f"{verdict.status.value} {outcome.spec.scenario}: {answer.title(outcome)}", answer.sentence(verdict.summary)]
    yield [
        "What nsa-harness observed. `certain`: the evidence leaves no other reading; `likely`: it leaves one.",
        "A HANG is proven, never a timeout. What is not listed here was not seen.",
    ]
    place = outcome.culprit.place if outcome.culprit else None
    if place is not None:
        line = f": {words.statement(place)}" if place.text else ""
        yield [f"look at {words.place_name(place)} {words.place_details(place)}{line}"]
    head, rows, culprits = answer.rank_table(outcome)
    if rows:
        marked = [(*row, "culprit" if blamed else "") for row, blamed in zip(rows, culprits, strict=True)]
        yield list(table((*head, ""), marked, _COLUMNS, indent=""))
    for stack in outcome.stacks:
        yield list(answer.stack_lines(stack))
    if said:
        yield [f"left open by the evidence: {text}" for text in said.left_open]
        yield [f"what to do: {said.advice}"] if said.advice else []
    yield [f"cause code: {verdict.cause}", meaning(outcome), *([f"why a hang: {outcome.why}"] if outcome.why else [])]
    yield [f"also {one.code} ({words.certainty(one.confidence)}): {one.claim}" for one in answer.others(outcome)]
    yield [f"not captured: {words.trouble(one)}" for one in outcome.trouble]
    yield [f"ruled out: {one}" for one in outcome.ruled_out]
    yield [
        f"{words.machine_line(report.machine)} · {' · '.join(words.facts(outcome))} · nsa-harness {report.harness}",
        f"command: {report.command}",
        *([f"repeat: {outcome.repeat}"] if outcome.repeat else []),
    ]
