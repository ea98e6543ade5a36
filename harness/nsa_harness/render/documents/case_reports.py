"""junit.xml: the outcomes of a run as test cases, each of which fails only if its outcome was not expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree

from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.render import answer
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning


def junit_xml(report: Report) -> str:
    """Return junit.xml as text, with one test case for each final outcome."""
    report = escaped(report)
    suite = ElementTree.Element("testsuite", _attributes(report))
    _properties(suite, run_id=report.run_id, command=report.command, machine=words.machine_line(report.machine))
    names = Counter(outcome.spec.scenario for outcome in report.outcomes if outcome.final)
    for outcome in report.outcomes:
        if outcome.final:
            suite.append(_case(report, outcome, unique=names[outcome.spec.scenario] == 1))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _attributes(report: Report) -> dict[str, str]:
    results = Counter(_result_element(outcome) for outcome in report.outcomes if outcome.final)
    return {
        "name": "nsa-harness",
        "hostname": report.machine.host,
        "tests": str(results.total()),
        "failures": str(results["failure"]),
        "errors": str(results["error"]),
        "skipped": str(results["skipped"]),
        "time": f"{sum(outcome.timing.wall_s for outcome in report.outcomes):.3f}",
    }


def _case(report: Report, outcome: Outcome, *, unique: bool) -> ElementTree.Element:
    name = _name(outcome, unique=unique)
    case = ElementTree.Element("testcase", classname="nsa-harness", name=name, time=f"{outcome.timing.wall_s:.3f}")
    attempts = [other for other in report.outcomes if other.spec.scenario == outcome.spec.scenario]
    _properties(
        case, verdict=outcome.verdict.status.value, spec_hash=outcome.spec.spec_hash, attempts=str(len(attempts))
    )
    result = _result_element(outcome)
    if result is not None:
        kind = f"{outcome.verdict.status.value} {words.headline_tag(outcome) or 'not expected'}"
        element = ElementTree.SubElement(case, result, message=outcome.verdict.summary, type=kind)
        element.text = "\n".join(_explanation(outcome)) if result != "skipped" else None
    ElementTree.SubElement(case, "system-out").text = "\n".join(_output(outcome, attempts))
    return case


def _name(outcome: Outcome, *, unique: bool) -> str:
    return outcome.spec.scenario if unique else f"{outcome.spec.scenario}~{outcome.attempt}"


def _result_element(outcome: Outcome) -> str | None:
    """Return the JUnit element for an outcome that did not pass, such as "failure", or else None."""
    status = outcome.verdict.status
    if status is Status.ERROR:
        return "error"
    if status is Status.SKIP:
        return "skipped"
    return None if outcome.expected else "failure"


def _explanation(outcome: Outcome) -> Iterator[str]:
    """Yield lines that explain why a run did not pass and what to do."""
    yield answer.title(outcome)
    yield answer.sentence(outcome.verdict.summary)
    place, cause = outcome.culprit.place if outcome.culprit else None, answer.cause_of(outcome)
    if place:
        yield f"look at {words.place_name(place)} {words.place_details(place)}".rstrip()
        yield from words.numbered_lines(place, place.line) if place.text else ()
    for stack in outcome.stacks:
        yield from answer.stack_lines(stack)
    if raised := answer.raised(outcome):
        yield f"raised: {raised}"
    if advice := answer.advice(outcome):
        yield f"do: {advice}"
    if cause:
        yield f"cause code: {cause.code}"
        yield from (f"open question: {text}" for text in cause.left_open)
    yield meaning(outcome)
    if outcome.culprit:
        yield words.culprit_line(outcome)
    if outcome.proof_reason:
        yield f"why a hang: {outcome.proof_reason}"
    for finding in answer.other_findings(outcome):
        yield f"also {finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        yield f"do: {finding.advice}"
    if outcome.repeat_command:
        yield f"repeat: {outcome.repeat_command}"


def _output(outcome: Outcome, attempts: list[Outcome]) -> Iterator[str]:
    yield f"{outcome.verdict.status.value}: {outcome.verdict.summary}"
    yield from words.remarks(outcome)
    for other in attempts if len(attempts) > 1 else ():
        tag = f" {other.verdict.kind.value}" if other.verdict.kind else ""
        remark = "" if other.final else " (superseded)"
        yield f"attempt {other.attempt}{remark}: {other.verdict.status.value}{tag}: {other.verdict.summary}"
    yield f"directory: {outcome.dir}"
    yield from (f"proof: {path}" for finding in outcome.findings for path in finding.proof)
    yield from (f"not captured: {words.trouble(item)}" for item in outcome.trouble)


def _properties(parent: ElementTree.Element, **values: str) -> None:
    group = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(group, "property", name=name, value=value)
