"""Gradients that DDP waited for in vain: parameters that took no part in the loss, on all ranks or on some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.case import Case, Explanation, at, explained, layer_of
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import on_ranks
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.diagnosis.refused import hints_of, names_of, raised_so, ranks_of, refusal, step_of
from nsa_harness.core.evidence.evidence import Board, RankEvidence
from nsa_harness.core.evidence.stacks import in_function
from nsa_harness.core.place import Place
from nsa_harness.core.verdict.verdict import Failure

_SHOWN = 3
_UNSURE = 0.75  # the others may only have been late


@rule(Phase.FIRST_FAILURE, Cause.REENTRANT_NO_GRAD_INPUT, outranks=("rank_conditional_unused_params",))
def reentrant_no_grad_input(case: Case) -> Explanation | None:
    """What a reentrant checkpoint computed from inputs without a gradient never learns; DDP misses it a step later."""
    unfinished = raised_so(case, Cause.UNUSED_PARAMS)
    unfed = _unfed(case)
    if not unfinished or unfinished[0].rank not in unfed:
        return None
    place = unfed[unfinished[0].rank]
    used = [hint.frame.function for hint in hints_of(unfinished[0], "without gradient") if hint.frame]
    found = _left_without(
        case,
        unfinished,
        ranks_of(unfinished),
        f"a reentrant checkpoint{at(place)} got inputs of which none requires a gradient, so"
        f" {names_of(unfinished[0])} had none",
        cause=Cause.REENTRANT_NO_GRAD_INPUT,
        confidence=0.9 if used and set(used) == {place.function} else 0.75,
    )
    return replace(found, finding=replace(found.finding, place=_with_parameter(place, found.place)))


@rule(Phase.FIRST_FAILURE, Cause.NO_GRADIENT, outranks=("exception",))
def nothing_to_differentiate(case: Case) -> Explanation | None:
    """A backward pass from a tensor that no parameter leads to."""
    refused = raised_so(case, Cause.NO_GRADIENT)
    if not refused:
        return None
    return refusal(
        case,
        refused,
        f"the backward pass of {ranks_text(ranks_of(refused))} began at a tensor that no parameter that requires a"
        " gradient leads to",
        cause=Cause.NO_GRADIENT,
        confidence=0.85,
        advice="Look for what ended the graph: gradients switched off and not on again (set_grad_enabled, no_grad,"
        " inference_mode), detach or .item() before the loss, a model that is frozen whole.",
    )


@rule(Phase.SILENT, Cause.REENTRANT_NO_GRAD_INPUT, outranks=("no_gradient",))
def silent_checkpoint(case: Case) -> Explanation | None:
    """The same without DDP, which nobody notices: the parameters never have a gradient."""
    unfed = _unfed(case)
    without = {
        rank.rank: rank.looks.never
        for rank in case.evidence.ranks
        if rank.rank in unfed and rank.looks is not None and rank.looks.never
    }
    if not without or case.first_failure is not None:
        return None
    first = min(without)
    names = ", ".join(without[first][:_SHOWN])
    return explained(
        Cause.REENTRANT_NO_GRAD_INPUT,
        f"a reentrant checkpoint{at(unfed[first])} got inputs of which none requires a gradient, and parameters never"
        f" had one: {names}",
        ranks=tuple(sorted(without)),
        place=_with_parameter(unfed[first], Place(parameter=without[first][0])),
        confidence=0.85,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in sorted(without)),
    )


@rule(Phase.SILENT, Cause.FIND_UNUSED_NEEDLESS, outranks=("gradient_order_differs",))
def find_unused_needless(case: Case) -> Explanation | None:
    """torch says so itself, after the first step; what a later step leaves out it cannot know."""
    ranks = tuple(rank.rank for rank in case.evidence.ranks if any("find_unused" in words for words in rank.warned))
    if not ranks:
        return None
    return explained(
        Cause.FIND_UNUSED_NEEDLESS,
        "DDP was given find_unused_parameters=True and found nothing unused in its first step: it walks the graph in"
        " every step for that",
        ranks=ranks,
        confidence=0.7,
        proof=(f"rank{ranks[0]}/stderr.log",),
    )


@rule(Phase.SILENT, Cause.GRADIENT_ORDER_DIFFERS)
def gradient_order_differs(case: Case) -> Explanation | None:
    """A fact, and a sign that the ranks' graphs differ; the reduction itself keeps rank 0's order of buckets."""
    one = case.evidence.gradient_order
    if one is None:
        return None
    return explained(
        Cause.GRADIENT_ORDER_DIFFERS,
        f"in step {one.step} the gradients of rank {one.rank} arrived in another order than those of rank {one.other}:"
        f" number {one.position} was {one.name}, there {one.expected}",
        ranks=(one.rank,),
        place=_with_parameter(Place(), Place(parameter=one.name)),
        confidence=0.95,
        proof=(f"grad_order_rank{one.rank}.jsonl", f"grad_order_rank{one.other}.jsonl"),
    )


@rule(Phase.FIRST_FAILURE, Cause.RANK_CONDITIONAL_UNUSED_PARAMS, outranks=("unused_params",))
def rank_conditional_unused_params(case: Case) -> Explanation | None:
    """Some ranks computed no gradient for parameters for which the others did, and waited."""
    unfinished = raised_so(case, Cause.UNUSED_PARAMS)
    if not unfinished or not (differing := _differing(case, unfinished)):
        return None
    ranks, confidence = differing
    others = [rank.rank for rank in case.evidence.ranks if rank.rank not in ranks]
    did = "computed it and waited" if confidence > _UNSURE else "did not finish that step"
    waiting = f"; {ranks_text(others)} {did}" if others else ", each another"
    return _left_without(
        case,
        unfinished,
        ranks,
        f"{ranks_text(ranks)} computed no gradient for {names_of(unfinished[0])}",
        tail=waiting,
        cause=Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
        confidence=confidence,
        advice=Cause.UNUSED_PARAMS.row.advice,
    )


@rule(Phase.FIRST_FAILURE, Cause.UNUSED_PARAMS, outranks=("exception",))
def unused_params(case: Case) -> Explanation | None:
    unfinished = raised_so(case, Cause.UNUSED_PARAMS)
    if not unfinished:
        return None
    return _left_without(
        case,
        unfinished,
        tuple(rank.rank for rank in case.evidence.ranks),
        f"no rank computed a gradient for {names_of(unfinished[0])}",
        cause=Cause.UNUSED_PARAMS,
        confidence=0.95 if len(unfinished) == len(case.evidence.ranks) else 0.85,
    )


def _differing(case: Case, unfinished: Sequence[Failure]) -> tuple[tuple[int, ...], float] | None:
    """The ranks that lacked gradients which others had, and how sure that is; None where all lacked the same."""
    ranks = ranks_of(unfinished)
    others = [rank for rank in case.evidence.ranks if rank.rank not in ranks]
    if not others:
        missing = {frozenset(hint.name for hint in hints_of(one, "without gradient")) for one in unfinished}
        return (ranks, 0.9) if len(missing) > 1 else None
    step = step_of(case, unfinished[0])
    entered = max(_entered(rank) for rank in case.evidence.ranks if rank.rank in ranks)
    waited = [_waited(other) or (other.board is not None and other.board.enqueued > entered) for other in others]
    late = [other.board is not None and step is not None and _never_finished(other.board, step) for other in others]
    if not any(late):
        return None
    return ranks, 0.95 if all(waited) and all(late) else _UNSURE


def _waited(rank: RankEvidence) -> bool:
    """Its backward pass failed for want of a peer: DDP waits there only once it has every gradient of its own."""
    frames = rank.raised.frames if rank.raised else ()
    return in_function(frames, "torch/autograd/graph.py", ("_engine_run_backward",)) is not None


def _entered(rank: RankEvidence) -> int:
    """How many collectives it entered: the recorder at its exit knows those that the last beat did not see."""
    newest: dict[str, int] = {}
    for one in rank.collectives:
        newest[one.group] = max(one.seq, newest.get(one.group, 0))
    return max(sum(newest.values()), rank.board.enqueued if rank.board else 0)


def _never_finished(board: Board, step: int) -> bool:
    return board.step <= step and all(done < step for done, _ in board.steps_s)


def _left_without(
    case: Case,
    unfinished: Sequence[Failure],
    ranks: tuple[int, ...],
    claim: str,
    *,
    cause: Cause,
    confidence: float,
    advice: str | None = None,
    tail: str = "",
) -> Explanation:
    """Gradients that were missing: the line that uses the parameters, and how many there were a rank."""
    step = step_of(case, unfinished[0])
    counts = [(rank, f"{board.gradients[step]}") for rank, board in case.boards.items() if step in board.gradients]
    had = f" (gradients in step {step}: {on_ranks(counts)})" if counts else ""
    return refusal(
        case,
        unfinished,
        f"{claim} in step {step}{tail}{had}",
        cause=cause,
        ranks=ranks,
        confidence=confidence,
        advice=advice,
        step=step,
    )


def _unfed(case: Case) -> dict[int | None, Place]:
    return {rank: board.unfed_checkpoint for rank, board in case.boards.items() if board.unfed_checkpoint}


def _with_parameter(place: Place, parameter: Place | None) -> Place:
    name = parameter.parameter if parameter else None
    module = name.rpartition(".")[0] or None if name else None
    return replace(place, parameter=name, module=module, layer=layer_of(module))
