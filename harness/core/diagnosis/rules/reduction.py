"""A rank that came out of its backward pass while the others wait in theirs for its gradients."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.diagnosis.case import Case, Explanation, at, explained
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import entered_place, flight_proof, parted
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.divergence.divergence import Divergence, Entry, Kind
from nsa_harness.core.evidence.evidence import Board


@dataclass(frozen=True, kw_only=True)
class _Early:
    """Who left the backward pass of `step`, and who waits in it."""

    step: int
    left: tuple[Entry, ...]
    inside: tuple[Entry, ...]
    skipped_part: bool  # those that left went through less of the model than in their steps before


@rule(
    Phase.RANKS_DIFFER,
    Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
    Cause.NO_SYNC_MISMATCH,
    outranks=("collective_order_mismatch",),
)
def left_backward_early(case: Case) -> Explanation | None:
    """DDP reduces what every parameter has given. Whoever leaves without that left a part out, or reduced nothing."""
    found = next((one for one in case.analysis.divergences if one.kind is Kind.OPERATION), None)
    early = _early(case, found) if found is not None and parted(case) else None
    if early is None:
        return None
    ranks = tuple(entry.rank for entry in early.left)
    inside = ranks_text([entry.rank for entry in early.inside])
    went = f"{early.left[0].collective.op}{at(entered_place(case, early.left[0]))}"
    either = ("a part of the model was left out there", "no_sync was on there, or nothing required a gradient")
    likely, other = either if early.skipped_part else either[::-1]
    return explained(
        Cause.RANK_CONDITIONAL_UNUSED_PARAMS if early.skipped_part else Cause.NO_SYNC_MISMATCH,
        f"{ranks_text(ranks)} came out of the backward pass of step {early.step} and entered {went}, while {inside}"
        f" still wait{'s' if len(early.inside) == 1 else ''} in it for gradients: {likely}, or {other}",
        ranks=ranks,
        place=entered_place(case, early.inside[0]),
        step=early.step,
        confidence=0.8,
        proof=flight_proof(case, [*ranks, *(entry.rank for entry in early.inside)]),
        advice="Use the same parameters on every rank (add 0 * output.sum() for a part that is skipped), and enter and"
        " leave no_sync in the same steps; find_unused_parameters=True lets DDP go on without the gradients.",
    )


def _early(case: Case, found: Divergence) -> _Early | None:
    left = tuple(entry for entry in found.entries if entry.call is not None)
    inside = tuple(entry for entry in found.entries if entry.call is None and _in_backward(case.boards.get(entry.rank)))
    if not left or not inside or len(left) + len(inside) < len(found.entries):
        return None
    step = case.boards[inside[0].rank].step
    usual = [_usual_position(case.boards.get(entry.rank), entry) for entry in left]
    if any(entry.call is None or entry.call.step != step for entry in left) or None in usual:
        return None
    less = [entry.call is not None and entry.call.position < (at or 0) for entry, at in zip(left, usual, strict=True)]
    return _Early(step=step, left=left, inside=inside, skipped_part=all(less))


def _in_backward(board: Board | None) -> bool:
    return board is not None and board.training is not None and board.training.kind == "backward"


def _usual_position(board: Board | None, entry: Entry) -> int | None:
    """How much training lay before this call in the steps before; None where the rank never made it."""
    call = entry.call
    if board is None or call is None:
        return None
    same = (one for one in board.calls if (one.op, one.place) == (call.op, call.place))
    return min((one.position for one in same if one.step < call.step), default=None)
