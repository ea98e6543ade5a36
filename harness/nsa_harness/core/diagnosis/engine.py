"""Diagnosis: the cause of a verdict that is not PASS, the culprit, and findings that are noted with any verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa_harness.core.collectives.divergence import divergence
from nsa_harness.core.diagnosis.caveats import with_caveat, with_reason
from nsa_harness.core.diagnosis.context import DiagnosisContext, meshes, step_in_progress
from nsa_harness.core.diagnosis.explanation import Explanation, Rule
from nsa_harness.core.diagnosis.rules import CAUSES, NOTED, RULES, RulePhase
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.outcome.wording import Meshes
from nsa_harness.core.report import Culprit, Divergence, Status
from nsa_harness.core.verdict.verdict import Judgement


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`cause` is the code of the first explanation; None for PASS. `texts/sentences.py` puts it into words."""

    cause: str | None
    culprit: Culprit | None
    explanations: tuple[Explanation, ...]
    divergence: Divergence | None  # None for a PASS, and where the ranks diverge in no collective
    meshes: Meshes  # the coordinates of ranks, for the sentences
    counts_steps: bool  # the number of a step means something to the reader


def diagnose(evidence: Evidence, judgement: Judgement, own_rules: tuple[Rule, ...] = ()) -> Diagnosis:
    """Return the first answer of the rules of causes, and every answer of the rules that are noted with any verdict.

    `own_rules` are those of the program that ran. Their findings are noted too.
    """
    context = DiagnosisContext(evidence=evidence, judgement=judgement)
    rules = {**RULES, RulePhase.PROGRAM: own_rules}
    first = None
    if judgement.status is not Status.PASS:
        # The last rule of the fallback, `unknown`, answers for every run.
        first = next(answer for phase in CAUSES for rule in rules[phase] if (answer := rule(context)) is not None)
    noted = [answer for phase in NOTED for rule in rules[phase] if (answer := rule(context)) is not None]
    main = [_with_proof(context, with_reason(with_caveat(context, first), noted))] if first else []
    culprit = _culprit(context, first)
    # Without a real difference, the report shows a rank that was only late.
    differences = [context.difference, *context.differences] if first else []
    difference = next(filter(None, differences), None)
    return Diagnosis(
        cause=first.cause.value if first else None,
        culprit=culprit,
        explanations=(*main, *noted),
        divergence=divergence(difference, context.timelines, culprit.ranks if culprit else ()) if difference else None,
        meshes=meshes(evidence),
        counts_steps=context.counts_steps,
    )


def _with_proof(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation. If it names no proof, its proof becomes the stack dumps of the last snapshot."""
    concerned = explanation.ranks or tuple(context.last_snapshot)
    dumps = (context.last_snapshot[rank].proof for rank in concerned if rank in context.last_snapshot)
    return explanation if explanation.proof else replace(explanation, proof=tuple(path for path in dumps if path))


def _culprit(context: DiagnosisContext, first: Explanation | None) -> Culprit | None:
    if first is None or not first.cause.row.blames:
        return None
    step = first.step
    rank = context.rank(first.ranks[0]) if first.ranks else None
    if step is None and rank:
        step = step_in_progress(context, rank)
    return Culprit(
        ranks=first.ranks,
        step=step if context.counts_steps else None,
        collective=first.collective,
        place=first.place,
    )
