"""The parts of a report on a claim, a verification or `why`, whose runs are trials: none is expected to pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.render.experiments import why as shown
from nsa_harness.render.sections import Bullets, Grounds, Part, Section, Sentence, Span, Table, line, lines
from nsa_harness.supervisor.storage.ledger import LedgerLine, LedgerSide
from nsa_harness.texts import why as why_texts
from nsa_harness.texts import words

_SIDES = {"claim": ("without it", "with it"), "verify": ("before", "now")}


def answer_section(answer: LedgerLine) -> Part:
    """Return the part of a report that answers a claim or a verification."""
    name = "Verification" if answer.kind == "verify" else "Claim"
    sections: tuple[Section, ...] = (
        Sentence(line=(Span(answer.result.upper(), strong=True), Span(answer.why))),
        Grounds(rows=tuple(_rows(answer))),
    )
    return Part(title=f"{name}: {answer.text}", sections=sections, chapter=True)


def why_section(why: WhyReport) -> Part:
    """Return the part of a report that says why the ranks of a failed run took different ways."""
    name, _, answer = shown.headline(why).partition("  ")
    sections: list[Section] = [Sentence(line=(Span(f"{name}:", strong=True), Span(answer), Span(shown.took_text(why))))]
    explanation, origin = why.explanation, why.origin
    if why.has_origin and explanation is not None and origin is not None:
        namer = why_texts.namer_of(why_texts.places_of(explanation))
        sections.append(Sentence(label="Why:", line=line(" ".join(why_texts.sentences(explanation, origin, namer)))))
        rows = tuple(
            ((Span(name),), (Span(source, code=True),) if source else (), (Span(remark),))
            for name, source, remark in why_texts.path_rows(explanation, origin, namer)
        )
        sections.append(
            Table(title="From the origin to the effect", head=("line", "source", "what happens"), rows=rows)
        )
        head, values = why_texts.value_table(explanation, origin)
        if values:
            sections.append(Table(title="Values that differ or decide", head=head, rows=lines(values)))
        sections.append(Sentence(label="Do:", line=line(why_texts.remedy(origin, namer))))
        if why.others:
            items = tuple(shown.other_text(other, namer) for other in why.others)
            sections.append(Bullets(title="Further candidates:", items=items))
    else:
        sections.append(Sentence(label="Why:", line=line(" ".join(shown.not_answered_texts(why)))))
        sections += [Sentence(label="Do:", line=line(why.first.advice))] if why.first.advice else []
        if other := shown.other_origin_text(why):
            sections.append(Bullets(title="Shown by a recorded run:", items=(other,)))
    for title, texts in (("Proof:", shown.proof_texts(why)), ("Limits:", shown.note_texts(why))):
        if items := tuple(texts):
            sections.append(Bullets(title=title, items=items))
    return Part(title=f"Why {why.scenario} of {why.first.run_id} failed", sections=tuple(sections), chapter=True)


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
