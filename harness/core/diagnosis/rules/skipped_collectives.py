"""What one rank left out, or did alone: rules over calls that some ranks made and others passed by.

Two ranks that differ in one call leave open which of them is wrong. What they did before decides, or else the claim
says both and is no more than likely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nsa_harness.core.diagnosis.case import Case, Explanation, at, explained, hung_roots, ledger_proof, shorten
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import (
    added_between_steps,
    apart,
    between_steps,
    counts_text,
    entered_place,
    entered_text,
    entry_of,
    entry_text,
    first_entries,
    flight_proof,
    parted,
    pending_place,
    reference,
    shown_later,
    undecided,
)
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.diagnosis.progress import late_for, left_before_it, stands_in, step_in_progress
from nsa_harness.core.divergence.divergence import Divergence, DivergenceKind, Entry
from nsa_harness.core.divergence.ledger import AbandonedBatch, SkippedCall, StepDifference, repeated
from nsa_harness.core.evidence.evidence import Board, Ending
from nsa_harness.core.report import CollectiveRef
from nsa_harness.core.verdict.wait import GROUP_KINDS, WaitKind

_ERROR = re.compile(r"error|exception|warn|skip", re.IGNORECASE)


@rule(RulePhase.RANKS_DIFFER, Cause.SWALLOWED_EXCEPTION, outranks=("uneven_inputs",))
def swallowed_exception(case: Case) -> Explanation | None:
    """A rank that is a batch short, and that began again in one of its steps."""
    if again := _went_round_again(case):
        return again
    if passed := _caught_and_passed(case):
        return passed
    found = case.abandoned_batch if parted(case) else None
    if found is None or case.step_difference is not None or _departed_before(case, found):
        return None
    caught = next((one for one in case.boards[found.rank].caught if one.step == found.step), None)
    why = f"{caught.type} was raised{at(caught.place)} and caught" if caught else _printed(case, found.rank)
    return explained(
        Cause.SWALLOWED_EXCEPTION,
        f"rank {found.rank} gave up a batch in step {found.step} and began again ({found.marks} marks of training"
        f" there, {found.usual} in its other steps){f': {why}' if why else ''}; so it came to its end while"
        f" {ranks_text(found.others)} had another step to do{shown_later(case)}",
        ranks=(found.rank,),
        place=caught.place if caught else None,
        step=found.step,
        collective=next((reference(entry) for entry in first_entries(case)), None),
        confidence=0.95 if caught else 0.85,
        proof=ledger_proof(case, found.rank),
    )


def _went_round_again(case: Case) -> Explanation | None:
    """It made the calls of its loop twice within a step that it never finished, and the others went on with theirs."""
    skipped = case.skipped
    if skipped is None or not _explains(case) or not repeated(case.boards, skipped):
        return None
    (rank,) = skipped.callers
    others = [other for other, _ in skipped.counts if other != rank]
    caught = next((one for one in case.boards[rank].caught if one.step in (skipped.step, skipped.step + 1)), None)
    why = f"{caught.type} was raised{at(caught.place)} and caught" if caught else _printed(case, rank)
    return explained(
        Cause.SWALLOWED_EXCEPTION,
        f"rank {rank} gave up a batch after step {skipped.step} and began again: it called"
        f" {skipped.call.op}{at(skipped.place)} once more, without an optimizer step between, while"
        f" {ranks_text(others)} went on to step {skipped.step + 1}{f': {why}' if why else ''}",
        ranks=(rank,),
        place=caught.place if caught else skipped.place,
        step=_step_of(case, skipped),
        collective=_collective(skipped),
        confidence=0.9 if caught else 0.8,
        proof=ledger_proof(case, rank),
    )


def _caught_and_passed(case: Case) -> Explanation | None:
    """An exception left a forward on the one rank, and it went on past a call that the others made in that step."""
    skipped = case.skipped
    if skipped is None or not _explains(case):
        return None
    caught = next((one for one in case.boards[skipped.rank].caught if one.step == skipped.step), None)
    others = [board for rank, board in case.boards.items() if rank != skipped.rank]
    if caught is None or any(one.type == caught.type for board in others for one in board.caught):
        return None
    return explained(
        Cause.SWALLOWED_EXCEPTION,
        f"rank {skipped.rank} raised {caught.type}{at(caught.place)} in step {skipped.step}, caught it and went on"
        f" without {skipped.call.op}{at(skipped.place)}, which the others called there",
        ranks=(skipped.rank,),
        place=caught.place,
        step=_step_of(case, skipped),
        collective=_collective(skipped),
        confidence=0.85,
        proof=ledger_proof(case, skipped.rank),
    )


def _printed(case: Case, rank: int) -> str:
    known = case.rank(rank)
    said = [line for line in known.error_lines if _ERROR.search(line)] if known else []
    return f'its stderr says "{shorten(said[-1])}"' if said else ""


def _departed_before(case: Case, found: AbandonedBatch) -> bool:
    """Calls were made unlike before that step already."""
    return case.skipped is not None and case.skipped.step < found.step


@rule(RulePhase.RANKS_DIFFER, Cause.RANK0_ONLY_COLLECTIVE, outranks=("rank_conditional_collective",))
def rank0_only_collective(case: Case) -> Explanation | None:
    """One rank makes a call that nobody else makes, at a place where nobody made it before."""
    skipped = case.skipped
    if skipped is None or not _explains(case):
        return _added_alone(case)
    if not _made_alone(case, skipped):
        return None
    alone, others = skipped.callers[0], [rank for rank, _ in skipped.counts if rank != skipped.callers[0]]
    open_end = _or_was_finished(case, skipped)
    of_two = f"; or {ranks_text(others)} left it out" if len(others) == 1 else ""
    return explained(
        Cause.RANK0_ONLY_COLLECTIVE,
        f"only rank {alone} called {skipped.call.op}{at(skipped.place)} in step {skipped.step}, which"
        f" {ranks_text(others)} never made there{of_two}{open_end}",
        ranks=(alone,),
        place=skipped.place,
        step=_step_of(case, skipped),
        collective=_collective(skipped),
        confidence=0.75 if of_two or open_end else 0.95,
        proof=ledger_proof(case, alone),
    )


def _made_alone(case: Case, skipped: SkippedCall) -> bool:
    """Of two ranks only the first can be told to be alone, after a step in which both did without the call."""
    lone = len(skipped.callers) == 1 and all(not count for rank, count in skipped.counts if rank != skipped.callers[0])
    if not lone or skipped.before:
        return False
    both_trained = all(case.boards[rank].steps_s for rank, _ in skipped.counts)
    return len(skipped.counts) > 2 or (skipped.callers[0] == 0 and both_trained)


def _added_alone(case: Case) -> Explanation | None:
    """The same below Python: a rank between two steps enters what it never did, and the others are in the next one."""
    found = _first_parted(case)
    rank = added_between_steps(case, found) if found is not None else None
    if found is None or rank is None:
        return None
    others = entered_text(case, [entry for entry in found.entries if entry.rank != rank])
    return explained(
        Cause.RANK0_ONLY_COLLECTIVE,
        f"only rank {rank} entered {entry_text(case, entry_of(found, rank))} between its steps, which no step before"
        f" had; {others} as before",
        ranks=(rank,),
        place=entered_place(case, entry_of(found, rank)),
        confidence=0.85,
        proof=flight_proof(case, [rank]),
    )


@rule(RulePhase.RANKS_DIFFER, Cause.RANK_CONDITIONAL_COLLECTIVE, outranks=("unseen_collective",))
def rank_conditional_collective(case: Case) -> Explanation | None:
    """A rank passed a call that the others made, and then some rank failed or waits for ever."""
    skipped = case.skipped
    if skipped is None or not _explains(case):
        return None
    place = skipped.place
    others = ranks_text([rank for rank, _ in skipped.counts if rank != skipped.rank])
    open_end = _or_was_finished(case, skipped) or _or_called_too_much(skipped)
    return explained(
        Cause.RANK_CONDITIONAL_COLLECTIVE,
        f"rank {skipped.rank} skipped {skipped.call.op}{at(place)} in step {skipped.step}; {others} called it"
        f" ({' · '.join(f'rank {rank} x{count}' for rank, count in skipped.counts)}){open_end}",
        ranks=(skipped.rank,),
        place=place,
        step=_step_of(case, skipped),
        collective=_collective(skipped),
        confidence=0.75 if open_end else 0.95,
        proof=ledger_proof(case, skipped.rank),
        advice="Call the collective on every rank, in the same order: move it out of the condition, or contribute"
        " zeros where there is nothing to add.",
    )


def _explains(case: Case) -> bool:
    """The run did not merely end at its deadline, and some root waits for a rank: else it would wait anyway."""
    kinds = {root.kind for root in hung_roots(case)}
    if left_before_it(case) or late_for(case):
        return False
    return case.evidence.ending is not Ending.DEADLINE and (not kinds or bool(kinds & {*GROUP_KINDS, WaitKind.GONE}))


def _or_was_finished(case: Case, skipped: SkippedCall) -> str:
    """Whoever has done its last step and meets the others' next one looks the same as one that calls too much."""
    boards = [case.boards[rank] for rank in skipped.callers]
    stands_there = all(stands_in(board, skipped.call) for board in boards)
    went_on = case.boards[skipped.rank].step > skipped.step
    if not (stands_there and all(between_steps(board) for board in boards) and went_on):
        return ""
    return f"; or {ranks_text(skipped.callers)} had no step left to do"


def _or_called_too_much(skipped: SkippedCall) -> str:
    """Callers that are no majority, of a call that the one who left it out has never made."""
    others = len(skipped.counts) - len(skipped.callers)
    if skipped.rank in skipped.before or len(skipped.callers) > others:
        return ""
    return f"; or {ranks_text(skipped.callers)} called it where nobody else does"


def _step_of(case: Case, skipped: SkippedCall) -> int:
    """Whoever still stands in the call knows by its lines whether that is the end of a step or the next one's start."""
    ranks = (case.rank(rank) for rank in skipped.callers)
    standing = [rank for rank in ranks if rank and rank.board and stands_in(rank.board, skipped.call)]
    steps = {step_in_progress(case, rank) for rank in standing} - {None}
    return skipped.step + 1 if steps == {skipped.step + 1} else skipped.step


def _collective(skipped: SkippedCall) -> CollectiveRef:
    return CollectiveRef(group=skipped.call.group, seq=None, op=skipped.call.op)


@rule(RulePhase.RANKS_DIFFER, Cause.RANK_CONDITIONAL_COLLECTIVE)
def unseen_collective(case: Case) -> Explanation | None:
    """The same as a skipped call, for collectives that are not called from Python: DDP's buckets, FSDP."""
    if not parted(case):
        return None
    if case.step_difference is not None:
        return _fewer_in_step(case, case.step_difference)
    found = _first_parted(case)
    if found is None:
        return None
    ahead = case.ahead_in(found)
    ranks = ahead or found.differ
    why = f"; {ranks_text(ahead)} went on to what comes later in the steps before" if ahead else ""
    return explained(
        Cause.RANK_CONDITIONAL_COLLECTIVE,
        f"the ranks parted at collective #{found.seq} of group {found.group}: {entered_text(case, found.entries)}"
        f"{why or undecided(found.differ, found.entries)}",
        ranks=ranks,
        place=entered_place(case, entry_of(found, ranks[0])),
        collective=next((reference(entry) for entry in first_entries(case)), None),
        confidence=0.9 if len(ranks) < len(found.entries) else 0.8,
        proof=flight_proof(case, ranks),
        advice="One of them left out, or added, a collective that the others did not: look for a branch on the rank or"
        " on its data above the named lines. Collectives without a line of their own belong to DDP or FSDP.",
    )


def _first_parted(case: Case) -> Divergence | None:
    if not parted(case):
        return None
    return next((one for one in case.analysis.divergences if one.kind is not DivergenceKind.MISSING), None)


def _fewer_in_step(case: Case, found: StepDifference) -> Explanation:
    ranks = apart(found)
    why = ": fewer gradients there than on the others" if found.without_gradients else ""
    return explained(
        Cause.RANK_CONDITIONAL_COLLECTIVE,
        f"{ranks_text(ranks)} entered {found.op} of group {found.group} in step {found.step} otherwise than the rest"
        f" ({counts_text(found.counts)}){why}{shown_later(case)}",
        ranks=ranks,
        place=pending_place(case, ranks),
        step=found.step,
        collective=CollectiveRef(group=found.group, seq=None, op=found.op),
        confidence=0.9,
        proof=("step_ledger.txt", *flight_proof(case, ranks)),
        advice="Run the same forward and backward on every rank: look for a branch on the rank or its data, or for an"
        " exception that was caught, in the named step.",
    )


@dataclass(frozen=True, kw_only=True)
class _Early:
    """Who left the backward pass of `step`, and who waits in it."""

    step: int
    left: tuple[Entry, ...]
    inside: tuple[Entry, ...]
    skipped_part: bool  # those that left went through less of the model than in their steps before


@rule(
    RulePhase.RANKS_DIFFER,
    Cause.RANK_CONDITIONAL_UNUSED_PARAMS,
    Cause.NO_SYNC_MISMATCH,
    outranks=("collective_order_mismatch",),
)
def left_backward_early(case: Case) -> Explanation | None:
    """DDP reduces what every parameter has given. Whoever leaves without that left a part out, or reduced nothing."""
    found = next((one for one in case.analysis.divergences if one.kind is DivergenceKind.OPERATION), None)
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
