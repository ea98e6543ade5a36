"""Diagnosis: the cause of a verdict that is not PASS, the culprit, and everything else worth knowing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.diagnosed.case import Case, Explanation
from harness.core.diagnosed.certainty import as_sure_as_proven
from harness.core.diagnosed.naming import meshes, with_coordinates
from harness.core.diagnosed.progress import step_in_progress
from harness.core.diagnosed.rules import beside, cause_of
from harness.core.judged.verdict import Judgement
from harness.core.observed.evidence import Evidence
from harness.core.parted.ledger import first_skipped
from harness.core.report import Culprit, Finding, Status


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`cause` is the code of the first finding; None for PASS."""

    cause: str | None
    culprit: Culprit | None
    findings: tuple[Finding, ...]


def diagnose(evidence: Evidence, judgement: Judgement) -> Diagnosis:
    boards = {rank.rank: rank.board for rank in evidence.ranks if rank.board}
    case = Case(evidence=evidence, judgement=judgement, skipped=first_skipped(boards))
    first = None if judgement.status is Status.PASS else cause_of(case)
    main = as_sure_as_proven(case, first) if first else None
    besides = [one.finding for one in beside(case)]
    places = meshes(evidence)
    findings = tuple(
        replace(one, claim=with_coordinates(one.claim, places)) for one in (*([main] if main else []), *besides)
    )
    return Diagnosis(cause=main.code if main else None, culprit=_culprit(case, first), findings=findings)


def _culprit(case: Case, first: Explanation | None) -> Culprit | None:
    if first is None or not first.cause.row.blames:
        return None
    found, step = first.finding, first.step
    rank = case.rank(found.ranks[0]) if found.ranks else None
    if step is None and rank:
        step = step_in_progress(case, rank)
    return Culprit(ranks=found.ranks, step=step, collective=first.collective, place=found.place)
