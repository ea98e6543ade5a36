"""Findings at lines of the source, for code hosts: SARIF, and the annotations of GitHub."""

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

MOST = 10  # of a step, that GitHub shows
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def github_annotations(report: Report, workspace: str) -> Iterator[str]:
    """Yield `::error file=,line=::` for each outcome that was not expected, worst first.

    `workspace`: the checkout. Files below it get relative names.
    """
    bad = [outcome for outcome in escaped(report).outcomes if outcome.final and not outcome.expected]
    for outcome in sorted(bad, key=words.worst_first)[:MOST]:
        facts = {**_place(outcome, workspace), "title": f"{outcome.verdict.status.value} {outcome.spec.scenario}"}
        properties = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in facts.items())
        level = "error" if outcome.verdict.status in (Status.HANG, Status.FAIL) else "warning"
        yield f"::{level} {properties}::{answer.sentence(outcome.verdict.summary).translate(_DATA)}"


def _place(outcome: Outcome, workspace: str) -> dict[str, str]:
    place = outcome.culprit.place if outcome.culprit else None
    if place is None or place.file is None:
        return {}
    name = _below(place.file, workspace) or place.file
    return {"file": name} if place.line is None else {"file": name, "line": str(place.line)}


def _below(file: str, root: str) -> str | None:
    """Return the path relative to the root, or None if it is not below the root."""
    path = PurePosixPath(file)
    return str(path.relative_to(root)) if root and path.is_relative_to(root) else None


# SARIF 2.1.0, https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"
_LEVELS = {Severity.CRITICAL: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_PRINT = "nsaHarnessFinding/v1"
_Json = dict[str, Any]


def sarif(report: Report, checkout: str = "") -> str:
    """Return a result for each finding of an outcome that counts. Files below `checkout` get relative names."""
    report = escaped(report)
    findings = [(outcome, finding) for outcome in report.outcomes if outcome.final for finding in _findings(outcome)]
    codes = list(dict.fromkeys(finding.code for _, finding in findings))
    driver = {"name": "nsa-harness", "version": report.harness, "rules": [_rule(code) for code in codes]}
    run: _Json = {
        "tool": {"driver": driver},
        # To GitHub, the part before the last slash names a series of analyses.
        "automationDetails": {"id": f"nsa-harness/{report.run_id}"},
        "invocations": [
            {
                "commandLine": report.command,
                "exitCode": exit_code(report),
                "executionSuccessful": not report.interrupted,
                "toolExecutionNotifications": [_notification(outcome) for outcome in _unjudged(report)],
            }
        ],
        "results": [_result(outcome, finding, codes.index(finding.code), checkout) for outcome, finding in findings],
    }
    if checkout:
        run["originalUriBaseIds"] = {_ROOT: {"uri": f"file://{quote(checkout.rstrip('/'))}/"}}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _findings(outcome: Outcome) -> Iterator[Finding]:
    """Yield the findings of the report. If no finding explains the failure, yield the verdict as a finding first."""
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


def _unjudged(report: Report) -> Iterator[Outcome]:
    """Yield the outcomes that are ERROR: they say nothing about the program, so they are not results."""
    yield from (outcome for outcome in report.outcomes if outcome.final and outcome.verdict.status is Status.ERROR)


def _notification(outcome: Outcome) -> _Json:
    return {"level": "warning", "message": {"text": f"{outcome.spec.scenario}: {outcome.verdict.summary}"}}


def _rule(code: str) -> _Json:
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
    causes_it = finding.code == outcome.verdict.cause
    stacks = outcome.stacks if causes_it else ()
    place = _look_at(outcome, finding, stacks)
    related = [one for one in _innermost(stacks, checkout) if place is None or one["place"] != place]
    result: _Json = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        # A failure that its scenario plants is no error of the code that is checked.
        "level": _LEVELS[Severity.INFO if causes_it and outcome.expected else severity(finding, outcome)],
        "message": {"text": _message(outcome, finding, causes_it=causes_it)},
        "locations": [_location(place, checkout)] if place else [],
        "relatedLocations": [{"id": number, **one["location"]} for number, one in enumerate(related, 1)],
        "stacks": [_stack(stack, checkout) for stack in stacks],
        "partialFingerprints": {_PRINT: _fingerprint(outcome, finding, place, checkout)},
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
    """Return the line to change, or the culprit's line: a code host shows only results with a line."""
    culprit = outcome.culprit.place if outcome.culprit and finding.code == outcome.verdict.cause else None
    places = (culprit, finding.place, *(stack.frames[0] for stack in stacks))
    return next((place for place in places if place is not None and place.file), None)


def _message(outcome: Outcome, finding: Finding, *, causes_it: bool) -> str:
    sentences = [answer.sentence(outcome.verdict.summary)] if causes_it else []
    sentences += [answer.sentence(finding.claim)] if finding.claim != outcome.verdict.summary or not causes_it else []
    sentences += [answer.sentence(finding.advice)] if finding.advice else []
    return f"{outcome.verdict.status.value} {outcome.spec.scenario}: {' '.join(sentences)}"


def _innermost(stacks: Sequence[CallStack], checkout: str) -> list[_Json]:
    """Return the innermost line of each stack."""
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
        if place.text and 0 < lines <= place.line:  # the statement and the lines above it that contain it
            around = {"startLine": place.line - lines + 1, "endLine": place.line}
            physical["contextRegion"] = {**around, "snippet": {"text": place.text}}
    named = (("function", place.function), ("module", place.module), ("member", place.parameter))
    logical = [{"fullyQualifiedName": name, "kind": kind} for kind, name in named if name]
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
    """Return the frames of the stack, outermost first."""
    steps = [{"location": _location(frame, checkout)} for frame in reversed(stack.frames) if frame.file]
    owner = answer.stack_owner(stack)
    return {"id": owner, "message": {"text": f"how {owner} came there"}, "locations": steps}


def _fingerprint(outcome: Outcome, finding: Finding, place: Place | None, checkout: str) -> str:
    """Return a fingerprint that is equal in the next run: it has neither line nor rank nor time."""
    file = "" if place is None else _artifact(place.file or "", checkout)["uri"]
    identity = (outcome.spec.scenario, finding.code, file, *((place.function, place.text) if place else ()))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
