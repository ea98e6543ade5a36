"""Findings in formats that code hosts show next to source lines: SARIF and GitHub annotations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.diagnosis.causes import row_of
from nsa_harness.core.report import CallStack, Finding, Outcome, Place, Report, Severity, Status, exit_code
from nsa_harness.render import answer
from nsa_harness.render.text import escaped
from nsa_harness.texts import words
from nsa_harness.texts.causes import text_of

MOST = 10  # annotations that GitHub shows per workflow step
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def github_annotations(report: Report, workspace: str) -> Iterator[str]:
    """Yield GitHub's `::error file=…` commands for unexpected outcomes, worst first, relative to `workspace`."""
    bad = [outcome for outcome in escaped(report).outcomes if outcome.final and not outcome.expected]
    for outcome in sorted(bad, key=words.severity_key)[:MOST]:
        facts = {**_place(outcome, workspace), "title": f"{outcome.verdict.status.value} {outcome.spec.scenario}"}
        properties = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in facts.items())
        level = "error" if outcome.verdict.status in (Status.HANG, Status.FAIL) else "warning"
        yield f"::{level} {properties}::{answer.sentence(outcome.verdict.summary).translate(_DATA)}"


def _place(outcome: Outcome, workspace: str) -> dict[str, str]:
    """Return the file and line for a GitHub annotation, or {} if they are unknown."""
    place = outcome.culprit.place if outcome.culprit else None
    if place is None or place.file is None:
        return {}
    name = _below(place.file, workspace) or place.file
    return {"file": name} if place.line is None else {"file": name, "line": str(place.line)}


def _below(file: str, root: str) -> str | None:
    """Return the path of `file` relative to `root`, or None if it is not inside `root`."""
    path = PurePosixPath(file)
    return str(path.relative_to(root)) if root and path.is_relative_to(root) else None


# SARIF 2.1.0, https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"
_LEVELS = {Severity.CRITICAL: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_FINGERPRINT = "nsaHarnessFinding/v1"
_Json = dict[str, Any]


def sarif(report: Report, checkout: str = "") -> str:
    """Return a SARIF log with one result for each finding, and file paths relative to the repository `checkout`."""
    report = escaped(report)
    findings = [(outcome, finding) for outcome in report.outcomes if outcome.final for finding in _findings(outcome)]
    codes = list(dict.fromkeys(finding.code for _, finding in findings))
    driver = {"name": "nsa-harness", "version": report.harness, "rules": [_rule(code) for code in codes]}
    run: _Json = {
        "tool": {"driver": driver},
        # GitHub treats the part before the last slash as the name of a series of analyses.
        "automationDetails": {"id": f"nsa-harness/{report.run_id}"},
        "invocations": [
            {
                "commandLine": report.command,
                "exitCode": exit_code(report),
                "executionSuccessful": not report.interrupted,
                # An ERROR says nothing about the program under test.
                "toolExecutionNotifications": [_notification(outcome) for outcome in _errors(report)],
            }
        ],
        "results": [_result(outcome, finding, codes.index(finding.code), checkout) for outcome, finding in findings],
    }
    if checkout:
        run["originalUriBaseIds"] = {_ROOT: {"uri": f"file://{quote(checkout.rstrip('/'))}/"}}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _findings(outcome: Outcome) -> Iterator[Finding]:
    """Yield the findings of an outcome. A failure without a cause gets a finding made from its verdict."""
    verdict = outcome.verdict
    if verdict.status in (Status.HANG, Status.FAIL) and answer.cause_of(outcome) is None:
        yield Finding(
            code=verdict.cause or "unknown",
            claim=verdict.summary,
            ranks=outcome.culprit.ranks if outcome.culprit else (),
            place=None,
            confidence=0.0,
            proof=(),
            advice="",
        )
    yield from outcome.findings


def _errors(report: Report) -> Iterator[Outcome]:
    yield from (outcome for outcome in report.outcomes if outcome.final and outcome.verdict.status is Status.ERROR)


def _notification(outcome: Outcome) -> _Json:
    return {"level": "warning", "message": {"text": f"{outcome.spec.scenario}: {outcome.verdict.summary}"}}


def _rule(code: str) -> _Json:
    """Return the SARIF rule for a cause code, with the text from `nsa-harness explain`."""
    row = row_of(code)
    means, proven_by, remedy = (text_of(code, key) for key in ("means", "proven_by", "remedy"))
    more = f"nsa-harness explain {code}"
    return {
        "id": code,
        "name": "".join(part.capitalize() for part in code.split("_")),
        "shortDescription": {"text": answer.sentence(code.replace("_", " "))},
        "fullDescription": {"text": answer.sentence(means)},
        "help": {
            "text": f"Means: {means}\nProven by: {proven_by}\nTry: {remedy}\n{more}",
            "markdown": f"**Means:** {means}\n\n**Proven by:** {proven_by}\n\n**Try:** {remedy}\n\n`{more}`",
        },
        "defaultConfiguration": {"level": _LEVELS[row.severity]},
        "properties": {"tags": ["distributed training", *sorted(status.value for status in row.verdicts)]},
    }


def _result(outcome: Outcome, finding: Finding, rule: int, checkout: str) -> _Json:
    """Return the SARIF result for a finding. `rule`: the index of its rule in the log's list of rules."""
    is_cause = finding.code == outcome.verdict.cause
    stacks = outcome.stacks if is_cause else ()
    place = _look_at(outcome, finding, stacks)
    others = [frame for frame in _innermost(stacks, checkout) if place is None or frame["place"] != place]
    result: _Json = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        # A failure that the scenario expects is not an error in the code.
        "level": _LEVELS[Severity.INFO if is_cause and outcome.expected else severity(finding, outcome)],
        "message": {"text": _message(outcome, finding, is_cause=is_cause)},
        "locations": [_location(place, checkout)] if place else [],
        "relatedLocations": [{"id": number, **frame["location"]} for number, frame in enumerate(others, 1)],
        "stacks": [_stack(stack, checkout) for stack in stacks],
        "partialFingerprints": {_FINGERPRINT: _fingerprint(outcome, finding, place, checkout)},
        "properties": {
            "scenario": outcome.spec.scenario,
            "attempt": outcome.attempt,
            "verdict": outcome.verdict.status.value,
            "ranks": list(finding.ranks),
            "certainty": words.certainty(finding.confidence),
            "leftOpen": list(finding.left_open),
            "proof": list(finding.proof),
        },
    }
    if stacks:
        result["codeFlows"] = [{"threadFlows": [_thread_flow(stack, checkout) for stack in stacks]}]
    return result


def _look_at(outcome: Outcome, finding: Finding, stacks: Sequence[CallStack]) -> Place | None:
    """Return the source line to show for a finding, or None if no line is known."""
    # Code hosts show only results with a line.
    culprit = outcome.culprit.place if outcome.culprit and finding.code == outcome.verdict.cause else None
    places = (culprit, finding.place, *(stack.frames[0] for stack in stacks))
    return next((place for place in places if place is not None and place.file), None)


def _message(outcome: Outcome, finding: Finding, *, is_cause: bool) -> str:
    sentences = [answer.sentence(outcome.verdict.summary)] if is_cause else []
    sentences += [answer.sentence(finding.claim)] if finding.claim != outcome.verdict.summary or not is_cause else []
    sentences += [answer.sentence(finding.advice)] if finding.advice else []
    return f"{outcome.verdict.status.value} {outcome.spec.scenario}: {' '.join(sentences)}"


def _innermost(stacks: Sequence[CallStack], checkout: str) -> list[_Json]:
    """Return the innermost frame of each stack, together with its SARIF location."""
    return [
        {"place": stack.frames[0], "location": _location(stack.frames[0], checkout, answer.stack_owner(stack))}
        for stack in stacks
        if stack.frames[0].file
    ]


def _location(place: Place, checkout: str, message: str = "") -> _Json:
    physical: _Json = {"artifactLocation": _artifact(place.file or "", checkout)}
    if place.line:
        physical["region"] = {"startLine": place.line}
        lines = len(place.text.splitlines()) if place.text else 0
        if place.text and 0 < lines <= place.line:  # the statement and the lines around it, such as an enclosing `if`
            around = {"startLine": place.line - lines + 1, "endLine": place.line}
            physical["contextRegion"] = {**around, "snippet": {"text": place.text}}
    names = (("function", place.function), ("module", place.module), ("member", place.parameter))
    logical = [{"fullyQualifiedName": name, "kind": kind} for kind, name in names if name]
    return {
        "physicalLocation": physical,
        **({"logicalLocations": logical} if logical else {}),
        **({"message": {"text": message}} if message else {}),
    }


def _artifact(file: str, checkout: str) -> _Json:
    relative = _below(file, checkout) if file.startswith("/") else file
    if relative is None:
        return {"uri": f"file://{quote(file)}"}
    return {"uri": quote(relative), "uriBaseId": _ROOT}


def _stack(stack: CallStack, checkout: str) -> _Json:
    frames = [{"location": _location(frame, checkout)} for frame in stack.frames if frame.file]
    return {"message": {"text": answer.stack_owner(stack)}, "frames": frames}


def _thread_flow(stack: CallStack, checkout: str) -> _Json:
    """Return a call stack as a SARIF thread flow, from its outermost to its innermost frame."""
    steps = [{"location": _location(frame, checkout)} for frame in reversed(stack.frames) if frame.file]
    owner = answer.stack_owner(stack)
    return {"id": owner, "message": {"text": f"how {owner} got there"}, "locations": steps}


def _fingerprint(outcome: Outcome, finding: Finding, place: Place | None, checkout: str) -> str:
    """Return a hash that is the same for the same finding in later runs, whatever its line, ranks or times."""
    file = "" if place is None else _artifact(place.file or "", checkout)["uri"]
    identity = (outcome.spec.scenario, finding.code, file, *((place.function, place.text) if place else ()))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
