"""Diagnosis: the cause of a verdict that is not PASS, the culprit, and everything else worth knowing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.case import Case
from nsa_harness.core.diagnosis.certainty import as_sure_as_proven
from nsa_harness.core.diagnosis.naming import meshes, with_coordinates
from nsa_harness.core.diagnosis.progress import step_in_progress
from nsa_harness.core.diagnosis.rules.phases import BESIDES, CAUSES, unknown
from nsa_harness.core.diagnosis.whereabouts import whereabouts
from nsa_harness.core.divergence.ledger import first_skipped
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.report import Culprit, Finding, Status
from nsa_harness.core.verdict.verdict import Judgement


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`cause` is the code of the first finding; None for PASS."""

    cause: str | None
    culprit: Culprit | None
    findings: tuple[Finding, ...]


def diagnose(evidence: Evidence, judgement: Judgement) -> Diagnosis:
    boards = {rank.rank: rank.board for rank in evidence.ranks if rank.board}
    case = Case(evidence=evidence, judgement=judgement, skipped=first_skipped(boards))
    main = None if judgement.status is Status.PASS else _first(case)
    besides = [finding for rule in BESIDES if (finding := rule(case))]
    places = meshes(evidence)
    findings = tuple(
        replace(one, claim=with_coordinates(one.claim, places)) for one in (*([main] if main else []), *besides)
    )
    return Diagnosis(cause=main.code if main else None, culprit=_culprit(case, main), findings=findings)


def _first(case: Case) -> Finding:
    answers = (rule(case) for rule in CAUSES)
    found = next((answer for answer in answers if answer is not None), None)
    return as_sure_as_proven(case, found) if found else unknown(case)


def _culprit(case: Case, main: Finding | None) -> Culprit | None:
    if main is None or main.code in ("interrupted", "harness_error"):
        return None
    rank = case.rank(main.ranks[0]) if main.ranks else None
    step, collective = whereabouts(case, main.code)
    if step is None and rank:
        step = step_in_progress(case, rank)
    return Culprit(ranks=main.ranks, step=step, collective=collective, place=main.place)
