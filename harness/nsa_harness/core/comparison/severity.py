"""Decide on the severity of a finding."""

from __future__ import annotations

from nsa_harness.core.diagnosis.causes import row_of
from nsa_harness.core.report import Finding, Outcome, Report, Severity, Status, exit_code

_BAD = frozenset({Status.FAIL, Status.HANG})
_WEIGHT = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


def severity(finding: Finding, outcome: Outcome) -> Severity:
    """Return the severity of a finding in this run.

    The cause of a failure is critical, and other findings of a failed run are at most warnings. If the run did not
    fail, the severity comes from the table of causes.
    """
    row, causes_it = row_of(finding.code), finding.code == outcome.verdict.cause
    if outcome.verdict.status in _BAD:
        # Only the cause of a failure is critical.
        return Severity.CRITICAL if causes_it else min(row.severity, Severity.WARNING, key=_WEIGHT.index)
    return Severity.INFO if causes_it and outcome.expected else row.ok_severity


def silent_faults(outcome: Outcome) -> tuple[Finding, ...]:
    """Return the findings that show a problem in a run that passed."""
    if outcome.verdict.status is not Status.PASS:
        return ()
    return tuple(finding for finding in outcome.findings if severity(finding, outcome) is not Severity.INFO)


def strict_exit_code(report: Report) -> int:
    """Return the exit code for `--strict`, which is 1 even for a run that passed with a silent fault."""
    silent = any(silent_faults(outcome) for outcome in report.outcomes if outcome.final)
    return exit_code(report, strict=True) or int(silent)
