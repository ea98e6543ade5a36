"""The rule about a collective that one rank calls only while activation checkpointing recomputes a forward."""

from __future__ import annotations

from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, module_of, place_of
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.diagnosis.rules import calls_differ
from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.evidence.stacks import in_function, recomputed_frame
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.wait import WaitKind

_CAUSES = (Cause.RANK_CONDITIONAL_COLLECTIVE, Cause.RANK0_ONLY_COLLECTIVE, Cause.COLLECTIVE_ORDER_MISMATCH)


def _recomputing_rank(context: DiagnosisContext) -> tuple[int, Stack] | None:
    """Return the only rank that is in a collective of a recomputation, and its stack, or None."""
    stacks = {
        root.rank: stack
        for root in hung_roots(context)
        if root.rank in context.last_snapshot and (stack := rank_stack(context.last_snapshot[root.rank]))
    }
    in_backward = [rank for rank, stack in stacks.items() if in_function(stack.frames, "torch/autograd/graph.py")]
    if len(in_backward) != 1 or len(stacks) < len(context.last_snapshot):
        return None
    stack = stacks[in_backward[0]]
    waits = context.waits[in_backward[0]].kind is WaitKind.COLLECTIVE
    return (in_backward[0], stack) if waits and recomputed_frame(stack.frames) else None


@rule_if(_recomputing_rank)
def recomputed_collective(context: DiagnosisContext, rank: int, stack: Stack) -> Explanation | None:
    """Explain a hang in which one rank calls a collective that the other ranks did not call, in a recomputation."""
    explanation = calls_differ.calls_differ(context)
    if explanation is None or explanation.ranks != (rank,) or explanation.cause not in _CAUSES:
        return None
    frame, call = recomputed_frame(stack.frames), explanation.facts.get("own_call")
    others = tuple(other for other in context.last_snapshot if other != rank)
    if frame is None or call is None:
        return None
    return replace(
        explanation,
        facts={
            **explanation.facts,
            "variant": "recomputed",
            "recomputed_function": frame.function,
            "recomputed_at": place_of(context, None, frame),
            "last_module": module_of(context, rank) or "",
            "finished": others,
        },
    )
