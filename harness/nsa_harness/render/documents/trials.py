"""The part of a report that answers a claim or a verification, and the trials of an experiment as runs of a report.

The runs of a bisection, a claim or a verification are trials: each of them counts, and none is expected to pass or to
fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.render.sections import Grounds, Part, Section, Sentence, Span
from nsa_harness.supervisor.storage.ledger import LedgerLine, LedgerSide
from nsa_harness.texts import words

_SIDES = {"claim": ("without it", "with it"), "verify": ("before", "now")}


def answer_section(line: LedgerLine) -> Part:
    """Return the part of a report that answers a claim or a verification."""
    name = "Verification" if line.kind == "verify" else "Claim"
    sections: tuple[Section, ...] = (
        Sentence(line=(Span(line.result.upper(), strong=True), Span(line.why))),
        Grounds(rows=tuple(_rows(line))),
    )
    return Part(title=f"{name}: {line.text}", sections=sections, chapter=True)


def _rows(line: LedgerLine) -> Iterator[tuple[str, tuple[str, ...]]]:
    for label, side in zip(_SIDES.get(line.kind, ()), line.sides, strict=False):
        yield label, (side.what, _counts(side))
    if line.fixed:
        yield "fixed", (line.fixed,)
    if line.kind == "claim":
        yield "computes", (line.computes,)
    yield "confidence", (f"{100 * line.confidence:.3g} %",)
    yield "took", (words.plural(line.attempts, "run"), words.seconds(line.seconds))


def _counts(side: LedgerSide) -> str:
    ends = ", ".join(f"{often} {end}" for end, often in side.ends.items())
    interval = f"({100 * side.low:.0f} % to {100 * side.high:.0f} %)"
    return f"failed {side.failed} of {side.of} {interval}{f': {ends}' if ends else ''}"


def as_trials(report: Report) -> Report:
    """Return the report with every run counted, and without remarks about runs that passed against expectation."""
    outcomes = [
        replace(outcome, final=True, expected=outcome.expected or outcome.verdict.status is Status.PASS)
        for outcome in report.outcomes
    ]
    return replace(report, outcomes=tuple(outcomes))


def first_of_each_failure(runs: Sequence[tuple[int, Outcome]]) -> list[tuple[int, Outcome]]:
    """Return the first run of each verdict and cause, each with its number in the report."""
    first: dict[tuple[Status, str | None], tuple[int, Outcome]] = {}
    for number, outcome in sorted(runs, key=lambda run: run[0]):
        first.setdefault((outcome.verdict.status, outcome.verdict.cause), (number, outcome))
    return list(first.values())
