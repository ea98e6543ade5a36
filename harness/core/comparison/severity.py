"""Severity: how much a finding matters, by one rule for every document."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.causes import row_of
from nsa_harness.core.report import Finding, Outcome, Severity, Status

_BAD = frozenset({Status.FAIL, Status.HANG})


def severity(finding: Finding, outcome: Outcome) -> Severity:
    """Of a finding of that outcome. What the scenario announced is no news; what could not be judged is no fault."""
    row, causes_it = row_of(finding.code), finding.code == outcome.verdict.cause
    if causes_it and outcome.expected:
        return Severity.INFO
    if outcome.verdict.status not in _BAD:
        return row.unfailed
    # Beside the cause of a failure nothing is critical.
    return Severity.WARNING if row.severity is Severity.CRITICAL and not causes_it else row.severity


def severities(outcomes: Sequence[Outcome]) -> dict[Severity, int]:
    """How many findings of each, over the outcomes that count."""
    found = [severity(finding, one) for one in outcomes if one.final for finding in one.findings]
    return {level: found.count(level) for level in Severity}
