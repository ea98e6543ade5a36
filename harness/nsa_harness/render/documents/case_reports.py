"""The outcomes as test cases, for CI servers and dashboards: junit.xml, and ctrf-report.json (https://ctrf.io).

A test case fails where the exit code does, so an expected HANG is no failure and an unexpected PASS is one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.render import answer
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.words import meaning


def junit_xml(report: Report) -> str:
    """One suite a run, one case for each outcome that counts; earlier attempts stand in the case's output."""
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
    marks = Counter(_mark(outcome) for outcome in report.outcomes if outcome.final)
    return {
        "name": "nsa-harness",
        "hostname": report.machine.host,
        "tests": str(marks.total()),
        "failures": str(marks["failure"]),
        "errors": str(marks["error"]),
        "skipped": str(marks["skipped"]),
        "time": f"{sum(outcome.timing.wall_s for outcome in report.outcomes):.3f}",
    }


def _case(report: Report, outcome: Outcome, *, unique: bool) -> ElementTree.Element:
    name = _name(outcome, unique=unique)
    case = ElementTree.Element("testcase", classname="nsa-harness", name=name, time=f"{outcome.timing.wall_s:.3f}")
    attempts = [other for other in report.outcomes if other.spec.scenario == outcome.spec.scenario]
    _properties(
        case, verdict=outcome.verdict.status.value, spec_hash=outcome.spec.spec_hash, attempts=str(len(attempts))
    )
    mark = _mark(outcome)
    if mark is not None:
        kind = f"{outcome.verdict.status.value} {words.headline_tag(outcome) or 'not expected'}"
        element = ElementTree.SubElement(case, mark, message=outcome.verdict.summary, type=kind)
        element.text = "\n".join(_explanation(outcome)) if mark != "skipped" else None
    ElementTree.SubElement(case, "system-out").text = "\n".join(_output(outcome, attempts))
    return case


def _name(outcome: Outcome, *, unique: bool) -> str:
    """CI servers follow a test through its history by name, so the attempt is named only where it must be."""
    return outcome.spec.scenario if unique else f"{outcome.spec.scenario}~{outcome.attempt}"


def _mark(outcome: Outcome) -> str | None:
    """The element that says how a case ended; None for a case that is in order."""
    status = outcome.verdict.status
    if status is Status.ERROR:
        return "error"
    if status is Status.SKIP:
        return "skipped"
    return None if outcome.expected else "failure"


def _explanation(outcome: Outcome) -> Iterator[str]:
    """The answer, in the order of every other document."""
    yield answer.title(outcome)
    yield answer.sentence(outcome.verdict.summary)
    place, said = outcome.culprit.place if outcome.culprit else None, answer.cause_of(outcome)
    if place:
        yield f"look at {words.place_name(place)} {words.place_details(place)}".rstrip()
        yield from words.source_lines(place)
    for stack in outcome.stacks:
        yield from answer.stack_lines(stack)
    if said:
        yield f"do: {said.advice}"
        yield from (f"left open: {text}" for text in said.left_open)
    yield meaning(outcome)
    if outcome.culprit:
        yield words.culprit_line(outcome)
    if outcome.why:
        yield f"why a hang: {outcome.why}"
    for finding in answer.others(outcome):
        yield f"also {finding.code} ({words.certainty(finding.confidence)}): {finding.claim}"
        yield f"do: {finding.advice}"
    if outcome.repeat:
        yield f"repeat: {outcome.repeat}"


def _output(outcome: Outcome, attempts: list[Outcome]) -> Iterator[str]:
    yield f"{outcome.verdict.status.value}: {outcome.verdict.summary}"
    yield from words.remarks(outcome)
    for other in attempts if len(attempts) > 1 else ():
        tag = f" {other.verdict.kind.value}" if other.verdict.kind else ""
        counted = "" if other.final else " (superseded)"
        yield f"attempt {other.attempt}{counted}: {other.verdict.status.value}{tag}: {other.verdict.summary}"
    yield f"directory: {outcome.dir}"
    yield from (f"proof: {path}" for finding in outcome.findings for path in finding.proof)
    yield from (f"not captured: {words.trouble(item)}" for item in outcome.trouble)


def _properties(parent: ElementTree.Element, **values: str) -> None:
    group = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(group, "property", name=name, value=value)


# CTRF. Its fixed words for what a mark says.
_CTRF_VERSION = "0.0.0"
_CTRF_STATUS: Mapping[str | None, str] = {None: "passed", "failure": "failed", "error": "other", "skipped": "skipped"}
_NAMED = "%Y%m%dT%H%M%S"  # how the name of a run begins


def ctrf_json(report: Report) -> str:
    """One test for each outcome that counts; those that were never started are pending.

    A report holds no times of the clock: the run began when its name says, and the runs follow one another.
    """
    report = escaped(report)
    final = [outcome for outcome in report.outcomes if outcome.final]
    names = Counter(outcome.spec.scenario for outcome in final)
    pending = [{"name": name, "status": "pending", "duration": 0} for name in report.not_run]
    tests = [_ctrf_test(report, outcome, unique=names[outcome.spec.scenario] == 1) for outcome in final] + pending
    statuses = Counter(test["status"] for test in tests)
    start_ms = _began_ms(report.run_id)
    results = {
        "tool": {"name": "nsa-harness", "version": report.harness},
        "summary": {
            "tests": len(tests),
            **{status: statuses[status] for status in ("passed", "failed", "pending", "skipped", "other")},
            "start": start_ms,
            "stop": start_ms + sum(_milliseconds(outcome.timing.wall_s) for outcome in report.outcomes),
        },
        "tests": tests,
        "environment": {
            "testEnvironment": words.machine_line(report.machine),
            "extra": {"run": report.run_id, "command": report.command, "interrupted": report.interrupted},
        },
    }
    whole = {"reportFormat": "CTRF", "specVersion": _CTRF_VERSION, "generatedBy": "nsa-harness", "results": results}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def _ctrf_test(report: Report, outcome: Outcome, *, unique: bool) -> dict[str, Any]:
    mark, attempts = _mark(outcome), [one for one in report.outcomes if one.spec.scenario == outcome.spec.scenario]
    test: dict[str, Any] = {
        "name": _name(outcome, unique=unique),
        "status": _CTRF_STATUS[mark],
        "duration": _milliseconds(outcome.timing.wall_s),
        "suite": ["nsa-harness"],
        "rawStatus": outcome.verdict.status.value,
        "flaky": outcome.flaky,
        "retries": len(attempts) - 1,
        "tags": list(outcome.spec.tags),
        "stdout": list(_output(outcome, attempts)),
        "extra": {
            "specHash": outcome.spec.spec_hash,
            "kind": outcome.verdict.kind,
            "cause": outcome.verdict.cause,
            "ranks": outcome.spec.ranks,
            "backend": outcome.spec.backend,
            "dir": outcome.dir,
        },
    }
    if mark is not None:
        test["message"] = answer.sentence(outcome.verdict.summary)
        test["trace"] = "\n".join(_explanation(outcome))
    place = outcome.culprit.place if outcome.culprit else None
    if place is not None and place.file is not None:
        test["filePath"] = place.file
        test |= {} if place.line is None else {"line": place.line}
    return test


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _began_ms(run_id: str) -> int:
    """0 where somebody has given the run another name."""
    try:
        return round(datetime.strptime(run_id.partition("-")[0], _NAMED).replace(tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        return 0
