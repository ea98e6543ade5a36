"""The diagnosis engine: runs the rules, and returns the cause, the culprit and further findings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nsa_harness.core.collectives.divergence import divergence
from nsa_harness.core.diagnosis.caveats import with_caveat, with_reason
from nsa_harness.core.diagnosis.context import DiagnosisContext, meshes, step_in_progress
from nsa_harness.core.diagnosis.explanation import Explanation, Rule
from nsa_harness.core.diagnosis.parting import with_parting
from nsa_harness.core.diagnosis.rules import CAUSES, NOTED, RULES, RulePhase
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.outcome.wording import Meshes
from nsa_harness.core.report import Culprit, Divergence, Status
from nsa_harness.core.verdict.verdict import Judgement


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of a diagnosis: the cause, the culprit and the explanations."""

    cause: str | None  # code of the first explanation; None for a PASS
    culprit: Culprit | None
    explanations: tuple[Explanation, ...]
    divergence: Divergence | None  # None for a PASS, or if the ranks diverge in no collective
    meshes: Meshes  # device mesh coordinates of the ranks
    counts_steps: bool  # the status files count training steps, so step numbers are reported
    context: DiagnosisContext | None = field(default=None, compare=False, repr=False)  # with what it has derived


def diagnose(evidence: Evidence, judgement: Judgement, own_rules: tuple[Rule, ...] = ()) -> Diagnosis:
    """Return the diagnosis of a run. `own_rules` come with the program and add findings, whatever the verdict."""
    context = DiagnosisContext(evidence=evidence, judgement=judgement)
    rules = {**RULES, RulePhase.PROGRAM: own_rules}
    first = None
    if judgement.status is not Status.PASS:
        # The last fallback rule, `unknown`, explains every run, so `next` always finds an explanation.
        first = next(
            explanation for phase in CAUSES for rule in rules[phase] if (explanation := rule(context)) is not None
        )
    side_findings = [
        explanation for phase in NOTED for rule in rules[phase] if (explanation := rule(context)) is not None
    ]
    first = with_parting(context, with_caveat(context, first)) if first else None
    main_finding = [_with_proof(context, with_reason(first, side_findings))] if first else []
    culprit = _culprit(context, first)
    # If no rank made a different call, the report shows the ranks that were late, and first the culprit.
    late = sorted(context.differences, key=lambda one: not (culprit and set(culprit.ranks) & set(one.ranks)))
    difference = next(filter(None, [context.difference, *late]), None) if first else None
    return Diagnosis(
        cause=first.cause.value if first else None,
        culprit=culprit,
        explanations=tuple(_with_node(context, one) for one in (*main_finding, *side_findings)),
        divergence=divergence(difference, context.timelines, culprit.ranks if culprit else ()) if difference else None,
        meshes=meshes(evidence),
        counts_steps=context.counts_steps,
        context=context,
    )


def _with_proof(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation. If it cites no proof, cite the stack dumps of its ranks."""
    ranks = explanation.ranks or tuple(context.last_snapshot)
    dumps = (context.last_snapshot[rank].proof for rank in ranks if rank in context.last_snapshot)
    return explanation if explanation.proof else replace(explanation, proof=tuple(path for path in dumps if path))


_NODE_FILES = ("processes.jsonl", "watch.jsonl")


def _with_node(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation. If each node of the job has its own journals, cite those of the explanation's ranks."""
    nodes = [context.evidence.nodes[rank] for rank in explanation.ranks if rank in context.evidence.nodes]
    if not nodes or not set(_NODE_FILES).intersection(explanation.proof):
        return explanation
    prefixes = [f"nodes/{node}/" for node in dict.fromkeys(nodes)]
    proof = (
        path if path not in _NODE_FILES else f"{prefix}{path}" for path in explanation.proof for prefix in prefixes
    )
    return replace(explanation, proof=tuple(dict.fromkeys(proof)))


def _culprit(context: DiagnosisContext, first: Explanation | None) -> Culprit | None:
    """Return the culprit named by the explanation, or None if it names none."""
    if first is None or not first.cause.row.has_culprit:
        return None
    step = first.step
    rank = context.rank(first.ranks[0]) if first.ranks else None
    if step is None and rank:
        step = step_in_progress(context, rank)
    return Culprit(
        ranks=first.ranks, step=step if context.counts_steps else None, collective=first.collective, place=first.place
    )
