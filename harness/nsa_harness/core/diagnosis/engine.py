"""Diagnosis: the cause of a verdict that is not PASS, the culprit, and everything else worth knowing.

A rule is a function with `@rule` in one of the modules of rules/, a new one of which is named in `_FAMILIES`. Causes
have a row in causes.py. Rules that one program alone needs are passed in. Phases are asked in the order of `RulePhase`,
and the first answer is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from nsa_harness.core.collectives.divergence import divergence
from nsa_harness.core.diagnosis.caveats import as_sure_as_proven, with_reason
from nsa_harness.core.diagnosis.context import Case, Explanation
from nsa_harness.core.diagnosis.phases import Rule, RulePhase, in_order
from nsa_harness.core.diagnosis.progress import step_in_progress
from nsa_harness.core.diagnosis.rank_text import meshes, with_coordinates, without_steps
from nsa_harness.core.diagnosis.rules import (
    autograd,
    calls_differ,
    failures,
    group_waits,
    host_waits,
    p2p,
    resources,
    silent_faults,
    threads,
)
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.report import Culprit, Divergence, Finding, Status
from nsa_harness.core.verdict.verdict import Judgement

_FAMILIES = (
    autograd,
    calls_differ,
    failures,
    group_waits,
    host_waits,
    silent_faults,
    p2p,
    resources,
    threads,
)
RULES = tuple(one for family in _FAMILIES for one in vars(family).values() if isinstance(one, Rule))


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`cause` is the code of the first finding; None for PASS."""

    cause: str | None
    culprit: Culprit | None
    findings: tuple[Finding, ...]
    divergence: Divergence | None = None  # of a PASS, and where the ranks part in no collective


@cache
def by_phase(rules: tuple[Rule, ...]) -> dict[RulePhase, tuple[Rule, ...]]:
    """Each phase with its rules, in the order in which they are asked."""
    return {phase: in_order(one for one in rules if one.phase is phase) for phase in RulePhase}


def diagnose(evidence: Evidence, judgement: Judgement, own_rules: tuple[Rule, ...] = ()) -> Diagnosis:
    """`own_rules`: those of the program that ran."""
    case = Case(evidence=evidence, judgement=judgement)
    phases = by_phase((*RULES, *own_rules))
    first = None if judgement.status is Status.PASS else _cause(case, phases)
    besides = [answer.finding for one in phases[RulePhase.SILENT] if (answer := one(case)) is not None]
    main = with_reason(as_sure_as_proven(case, first), besides) if first else None
    places = meshes(evidence)
    reworded: Callable[[str], str] = str if case.counts_steps else without_steps
    findings = tuple(
        replace(
            one,
            claim=with_coordinates(reworded(one.claim), places),
            left_open=tuple(with_coordinates(reworded(text), places) for text in one.left_open),
        )
        for one in (*([_with_proof(case, main)] if main else []), *besides)
    )
    culprit = _culprit(case, first)
    parted = case.difference or next(iter(case.differences), None) if first else None
    return Diagnosis(
        cause=main.code if main else None,
        culprit=culprit,
        findings=findings,
        divergence=divergence(parted, case.timelines, culprit.ranks if culprit else ()) if parted else None,
    )


def _with_proof(case: Case, found: Finding) -> Finding:
    """Where no record stands behind it, what it was read from: the dumps of the last look."""
    concerned = found.ranks or tuple(case.looked)
    dumps = (case.looked[rank].proof for rank in concerned if rank in case.looked)
    return found if found.proof else replace(found, proof=tuple(path for path in dumps if path))


def _cause(case: Case, phases: Mapping[RulePhase, Sequence[Rule]]) -> Explanation:
    """The first answer. The last rule of the fallback answers every case."""
    rules = (one for phase in RulePhase if phase is not RulePhase.SILENT for one in phases[phase])
    return next(answer for one in rules if (answer := one(case)) is not None)


def _culprit(case: Case, first: Explanation | None) -> Culprit | None:
    if first is None or not first.cause.row.blames:
        return None
    found, step = first.finding, first.step
    rank = case.rank(found.ranks[0]) if found.ranks else None
    if step is None and rank:
        step = step_in_progress(case, rank)
    return Culprit(
        ranks=found.ranks, step=step if case.counts_steps else None, collective=first.collective, place=found.place
    )
