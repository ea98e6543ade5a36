"""Plain-text output: the description of one failure, and profile.txt."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness import protocol
from nsa_harness.core.diagnosis.profile import Pace, pace, profiles
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.report import Outcome, Report
from nsa_harness.render import answer
from nsa_harness.render.terminal.layout import table
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning

MOST = 6_000  # maximum number of characters in the description of a failure
_COLUMNS = 100  # width of the table of ranks
_CUT = "\n[cut here: the rest is in report.json]\n"


def prompt_text(report: Report) -> str:
    """Return a description of the worst run that can be pasted into an issue or a prompt."""
    report = escaped(report)
    in_full = answer.outcomes_in_full(report)
    if not in_full:
        return f"{words.counts_line(report)}. Nothing went wrong.\n"
    sections = [section for section in _sections(report, in_full[0][1]) if section]
    text = "\n\n".join("\n".join(lines) for lines in sections) + "\n"
    return text if len(text) <= MOST else text[: MOST - len(_CUT)].rsplit("\n", 1)[0] + _CUT


def _sections(report: Report, outcome: Outcome) -> Iterator[list[str]]:
    verdict, cause = outcome.verdict, answer.cause_of(outcome)
    yield [f"{verdict.status.value} {outcome.spec.scenario}: {answer.title(outcome)}", answer.sentence(verdict.summary)]
    yield [
        "Observed by nsa-harness. `certain`: nothing else explains the evidence; `likely`: something else might.",
        "A HANG is proven; it is never just a timeout. Anything that is not listed here was not observed.",
    ]
    place = outcome.culprit.place if outcome.culprit else None
    if place is not None:
        line = f": {words.statement(place)}" if place.text else ""
        name = f"{words.whole_place_name(place)} {words.place_details(place)}"  # a reader of a prompt opens the file
        yield [f"look at {name}{line} ({answer.why_look_at(outcome)})"]
    head, rows, culprits = answer.rank_table(outcome)
    if rows:
        with_remarks = [(*row, "culprit" if culprit else "") for row, culprit in zip(rows, culprits, strict=True)]
        yield list(table((*head, ""), with_remarks, _COLUMNS, indent=""))
    for stack in outcome.stacks:
        yield list(answer.stack_lines(stack))
    yield [f"raised: {answer.raised(outcome)}"] if answer.raised(outcome) else []
    yield [f"open question: {text}" for text in cause.left_open] if cause else []
    yield [f"what to do: {answer.advice(outcome)}"] if answer.advice(outcome) else []
    yield [
        f"cause code: {verdict.cause}",
        meaning(outcome),
        *([f"why a hang: {outcome.proof_reason}"] if outcome.proof_reason else []),
    ]
    yield [
        f"also {finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        for finding in answer.other_findings(outcome)
    ]
    yield [f"not captured: {words.trouble(trouble)}" for trouble in outcome.trouble]
    yield [f"ruled out: {text}" for text in outcome.ruled_out_causes]
    yield [
        f"{words.machine_line(report.machine)} · {' · '.join(words.run_facts(outcome))} · nsa-harness {report.harness}",
        f"command: {report.command}",
        *([f"repeat: {outcome.repeat_command}"] if outcome.repeat_command else []),
    ]


def profile_text(evidence: Evidence) -> Iterator[str]:
    """Yield the lines of profile.txt, which shows where the program spent its time."""
    ranks = profiles(evidence)
    if not ranks:
        return
    at_s = [sample.at_s for sample in evidence.samples]
    yield f"{len(at_s)} samples, {min(at_s):.1f} s to {max(at_s):.1f} s after the launch"
    if (speed := pace(evidence)) is not None:
        yield f"{words.plural(speed.steps_done, 'step')} done, {_pace_text(speed)}"
    for rank in ranks:
        yield ""
        yield f"rank {rank.rank}: working in {rank.working} of {rank.samples} samples{_nodes_text(rank.nodes)}"
        for line in rank.lines:
            inside = "" if line.leaf is None or line.leaf == line.frame else f"   in {line.leaf.function}"
            share = f"{100 * line.sample_count / rank.samples:5.1f} %"
            yield f"  {share}  {line.frame.file}:{line.frame.line} {line.frame.function}{inside}"


def _nodes_text(nodes: int | None) -> str:
    if nodes is None:
        return ""
    more = " or more" if nodes >= protocol.NODES_LIMIT else ""
    return f", {nodes}{more} autograd nodes in its first backward pass"


def _pace_text(speed: Pace) -> str:
    text = f"the current step has taken {speed.running_s:.1f} s so far"
    if speed.step_s is not None:
        text = f"{speed.step_s:.1f} s per step; {text}"
    return text if speed.left_s is None else f"{text}; {speed.left_s:.0f} s more for all {speed.steps_planned} steps"
