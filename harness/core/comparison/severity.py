"""Severity: how much a finding matters, by one rule for every document."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from nsa_harness.core.report import Finding, Outcome, Status


class Severity(StrEnum):
    CRITICAL = "critical"  # the run cannot be used
    WARNING = "warning"  # it ended, and something in it is wrong or unsure
    INFO = "info"  # announced, or nothing to do with the program


# The program ended, or would have; what is wrong is a number, or how often it ends so.
_WARNINGS = frozenset(
    {
        "slow",
        "harness_error",
        "expectation_missed",
        "flaky",
        "no_gradient",
        "orphan_process",
        "nan",
        "replica_divergence",
        "memory_growth",
        "gate_collapse",
        "dirty_exit",
    }
)
_SILENT = frozenset({"reentrant_no_grad_input"})  # wrong numbers, where nothing failed of it
_BESIDE = frozenset({"deepened", "same_place"})  # about a fault that another finding names
_BAD = frozenset({Status.FAIL, Status.HANG})


def severity(finding: Finding, outcome: Outcome) -> Severity:
    """Of a finding of that outcome. What the scenario announced is no news; what could not be judged is no fault."""
    if finding.code == outcome.verdict.cause and outcome.expected:
        return Severity.INFO
    if finding.code in _BESIDE:
        return Severity.INFO
    if outcome.verdict.status not in _BAD:
        return Severity.WARNING if finding.code in _WARNINGS | _SILENT else Severity.INFO
    return Severity.WARNING if finding.code in _WARNINGS or finding.code != outcome.verdict.cause else Severity.CRITICAL


def severities(outcomes: Sequence[Outcome]) -> dict[Severity, int]:
    """How many findings of each, over the outcomes that count."""
    found = [severity(finding, one) for one in outcomes if one.final for finding in one.findings]
    return {level: found.count(level) for level in Severity}
