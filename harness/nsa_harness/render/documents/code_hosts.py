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
    """`::error file=,line=::` for what was not expected, worst first.

    `workspace`: the checkout, below which a file is named from there.
    """
    bad = [one for one in escaped(report).outcomes if one.final and not one.expected]
    for outcome in sorted(bad, key=words.worst_first)[:MOST]:
        facts = {**_place(outcome, workspace), "title": f"{outcome.verdict.status.value} {outcome.spec.scenario}"}
        told = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in facts.items())
        level = "error" if outcome.verdict.status in (Status.HANG, Status.FAIL) else "warning"
        yield f"::{level} {told}::{answer.sentence(outcome.verdict.summary).translate(_DATA)}"


def _place(outcome: Outcome, workspace: str) -> dict[str, str]:
    place = outcome.culprit.place if outcome.culprit else None
    if place is None or place.file is None:
        return {}
    name = _below(place.file, workspace) or place.file
    return {"file": name} if place.line is None else {"file": name, "line": str(place.line)}


def _below(file: str, root: str) -> str | None:
    """Relative to the root; None where it does not lie below it."""
    path = PurePosixPath(file)
    return str(path.relative_to(root)) if root and path.is_relative_to(root) else None


# SARIF 2.1.0, https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"
_LEVELS = {Severity.CRITICAL: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_PRINT = "nsaHarnessFinding/v1"
_Json = dict[str, Any]


def sarif(report: Report, checkout: str = "") -> str:
    """One result for each finding of an outcome that counts. `checkout`: files below it are named from there."""
    report = escaped(report)
    found = [(outcome, finding) for outcome in report.outcomes if outcome.final for finding in _findings(outcome)]
    codes = list(dict.fromkeys(finding.code for _, finding in found))
    driver = {"name": "nsa-harness", "version": report.harness, "rules": [_rule(code) for code in codes]}
    run: _Json = {
        "tool": {"driver": driver},
        # What stands before the last slash is one series of analyses to GitHub.
        "automationDetails": {"id": f"nsa-harness/{report.run_id}"},
        "invocations": [
            {
                "commandLine": report.command,
                "exitCode": exit_code(report),
                "executionSuccessful": not report.interrupted,
                "toolExecutionNotifications": [_notification(outcome) for outcome in _unjudged(report)],
            }
        ],
        "results": [_result(outcome, finding, codes.index(finding.code), checkout) for outcome, finding in found],
    }
    if checkout:
        run["originalUriBaseIds"] = {_ROOT: {"uri": f"file://{quote(checkout.rstrip('/'))}/"}}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _findings(outcome: Outcome) -> Iterator[Finding]:
    """Those that stand in the report; where none says why it failed, what the verdict says."""
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
    """What says nothing of the program is no result."""
    yield from (one for one in report.outcomes if one.final and one.verdict.status is Status.ERROR)


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
    """The line to change, else the line that the culprit stands at: no code host shows what has no line."""
    culprit = outcome.culprit.place if outcome.culprit and finding.code == outcome.verdict.cause else None
    told = (culprit, finding.place, *(stack.frames[0] for stack in stacks))
    return next((one for one in told if one is not None and one.file), None)


def _message(outcome: Outcome, finding: Finding, *, causes_it: bool) -> str:
    says = [answer.sentence(outcome.verdict.summary)] if causes_it else []
    says += [answer.sentence(finding.claim)] if finding.claim != outcome.verdict.summary or not causes_it else []
    says += [answer.sentence(finding.advice)] if finding.advice else []
    return f"{outcome.verdict.status.value} {outcome.spec.scenario}: {' '.join(says)}"


def _innermost(stacks: Sequence[CallStack], checkout: str) -> list[_Json]:
    """Where each of the ranks stands."""
    told = [(stack, stack.frames[0]) for stack in stacks if stack.frames[0].file]
    return [{"place": place, "location": _location(place, checkout, answer.whose(stack))} for stack, place in told]


def _location(place: Place, checkout: str, says: str = "") -> _Json:
    physical: _Json = {"artifactLocation": _artifact(place.file or "", checkout)}
    if place.line:
        physical["region"] = {"startLine": place.line}
        lines = len(place.text.splitlines()) if place.text else 0
        if place.text and 0 < lines <= place.line:  # the statement, and above it what it stands under
            around = {"startLine": place.line - lines + 1, "endLine": place.line}
            physical["contextRegion"] = {**around, "snippet": {"text": place.text}}
    named = (("function", place.function), ("module", place.module), ("member", place.parameter))
    logical = [{"fullyQualifiedName": name, "kind": kind} for kind, name in named if name]
    return {
        "physicalLocation": physical,
        **({"logicalLocations": logical} if logical else {}),
        **({"message": {"text": says}} if says else {}),
    }


def _artifact(file: str, checkout: str) -> _Json:
    relative = _below(file, checkout) if file.startswith("/") else file
    if relative is None:
        return {"uri": f"file://{quote(file)}"}
    return {"uri": quote(relative), "uriBaseId": _ROOT}


def _stack(stack: CallStack, checkout: str) -> _Json:
    frames = [{"location": _location(frame, checkout)} for frame in stack.frames if frame.file]
    return {"message": {"text": answer.whose(stack)}, "frames": frames}


def _thread_flow(stack: CallStack, checkout: str) -> _Json:
    """From the call that began it to where it stands."""
    steps = [{"location": _location(frame, checkout)} for frame in reversed(stack.frames) if frame.file]
    return {"id": answer.whose(stack), "message": {"text": f"how {answer.whose(stack)} came there"}, "locations": steps}


def _fingerprint(outcome: Outcome, finding: Finding, place: Place | None, checkout: str) -> str:
    """The same in the next run, also where lines above have moved: neither line nor rank nor time is in it."""
    file = "" if place is None else _artifact(place.file or "", checkout)["uri"]
    told = (outcome.spec.scenario, finding.code, file, *((place.function, place.text) if place else ()))
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
