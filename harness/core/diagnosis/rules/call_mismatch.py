"""Why ranks wait for each other: rules over calls that do not go together, from recorders, calls and step ledgers.

None of them answers where something else explains the run: a rank that failed by itself, or that waits for no rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import Case, Explanation, at, explained, place_of
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.entries import (
    added_between_steps,
    apart,
    backward_place,
    call_proof,
    call_reference,
    classes,
    counts_text,
    entered_place,
    entered_text,
    entry_of,
    entry_text,
    first_entries,
    flight_proof,
    number_text,
    on_ranks,
    parted,
    pending_place,
    reference,
    shown_later,
    undecided,
)
from nsa_harness.core.diagnosis.naming import ranks_text
from nsa_harness.core.diagnosis.phases import RulePhase, rule
from nsa_harness.core.diagnosis.progress import in_one_function, parting_frames, step_of_entry
from nsa_harness.core.divergence.divergence import Divergence, DivergenceKind, Entry, Link, changed_order, elements
from nsa_harness.core.divergence.ledger import SkippedCall
from nsa_harness.core.divergence.mismatch import CallMismatch
from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.report import CollectiveRef, Place

_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"})
_LINKS = 4  # of a cycle, that a sentence names


@rule(
    RulePhase.RANKS_DIFFER,
    Cause.COLLECTIVE_ORDER_MISMATCH,
    Cause.RANK_CONDITIONAL_COLLECTIVE,
    outranks=("rank0_only_collective",),
)
def collective_order_mismatch(case: Case) -> Explanation | None:
    mismatch = case.call_mismatch if parted(case) else None
    if mismatch is None or mismatch.kind is not DivergenceKind.OPERATION:
        return None
    if mismatch.skipped:
        return _skipped(case, mismatch)
    by_text = classes([(rank, f"{call.op}{at(call.place)}") for rank, call in mismatch.calls])
    calls = ", ".join(f"{ranks} called {text}" for ranks, text in by_text)
    return explained(
        Cause.COLLECTIVE_ORDER_MISMATCH,
        f"the ranks call different collectives at the same point of step {mismatch.step}{number_text(case, mismatch)}:"
        f" {calls}{undecided(mismatch.differ, mismatch.calls)}",
        ranks=mismatch.differ,
        place=mismatch.call(mismatch.differ[0]).place,
        step=mismatch.step,
        collective=call_reference(case, mismatch, mismatch.differ[0]),
        confidence=0.95,
        proof=(*call_proof(case, mismatch.differ), *flight_proof(case, mismatch.differ)),
        advice="Make every rank call the same collectives in the same order: look for a branch or an iteration over a"
        " set or dict that differs between ranks above the named lines.",
    )


def _skipped(case: Case, mismatch: CallMismatch) -> Explanation:
    """The ranks that kept to their order of the steps before tell which call the others left out."""
    rank, call = next((rank, call) for rank, call in mismatch.calls if rank not in mismatch.differ)
    instead = mismatch.call(mismatch.differ[0])
    above = _line_above(case, rank, mismatch.differ[0]) if instead.place != call.place else None
    if above is not None:
        return _other_order(case, mismatch, above)
    return explained(
        Cause.RANK_CONDITIONAL_COLLECTIVE,
        f"{ranks_text(mismatch.differ)} skipped {call.op}{at(call.place)} in step {mismatch.step}"
        f"{number_text(case, mismatch)}, which rank {rank} called, and went on to {instead.op}{at(instead.place)},"
        " which comes later in other steps; or it makes both in another order",
        ranks=mismatch.differ,
        place=call.place,
        step=mismatch.step,
        collective=call_reference(case, mismatch, rank),
        confidence=0.8,
        proof=(*call_proof(case, mismatch.differ), *flight_proof(case, mismatch.differ)),
        advice="Call the collective on every rank. Below FSDP that means: run the same layers on every rank.",
    )


def _other_order(case: Case, mismatch: CallMismatch, above: Frame) -> Explanation:
    """Both calls are made from one line: it goes through them one after the other, here in another order."""
    by_text = classes([(rank, f"{call.op}{at(call.place)}") for rank, call in mismatch.calls])
    calls = ", ".join(f"{ranks} called {text}" for ranks, text in by_text)
    place = place_of(case, mismatch.differ[0], above)
    return explained(
        Cause.COLLECTIVE_ORDER_MISMATCH,
        f"{ranks_text(mismatch.differ)} came to another collective first than in its steps before, in step"
        f" {mismatch.step}{number_text(case, mismatch)}: {calls}, all from"
        f" one line above{at(place)}, so that what it goes through has another order there, or lacks an item",
        ranks=mismatch.differ,
        place=place,
        step=mismatch.step,
        collective=call_reference(case, mismatch, mismatch.differ[0]),
        confidence=0.75,
        proof=(*call_proof(case, mismatch.differ), *flight_proof(case, mismatch.differ)),
        advice="Go through the collectives in an order that is the same on every rank: sort the keys of a dict or the"
        " items of a set before the loop, and let no rank leave an item out.",
    )


def _line_above(case: Case, rank: int, other: int) -> Frame | None:
    """From the outside in, where the stacks are alike up to a line from which they go into different functions."""
    alike, apart = parting_frames(case, rank, other)
    if not alike or apart is None or in_one_function(*apart):
        return None
    return alike[-1]


@rule(RulePhase.RANKS_DIFFER, Cause.CROSS_GROUP_DEADLOCK, outranks=("no_sync_mismatch",))
def cross_group_deadlock(case: Case) -> Explanation | None:
    cycle = case.analysis.cycle if parted(case) else ()
    if not cycle or (case.skipped is not None and not _one_point([link.entry for link in cycle])):
        return None
    links = [_link_text(case, link) for link in cycle]
    everyone = tuple(sorted(link.entry.rank for link in cycle))
    other = tuple(rank for rank in everyone if (board := case.boards.get(rank)) and changed_order(board))
    ranks = other or everyone
    why = f"; {ranks_text(other)} took another order before" if 0 < len(other) < len(everyone) else ""
    began = step_of_entry(case, cycle[0].entry)
    step = "" if began is None else f" in step {began}"
    return explained(
        Cause.CROSS_GROUP_DEADLOCK,
        f"{len(everyone)} ranks wait for each other in different groups{step}:"
        f" {', '.join(links[:_LINKS])}{f' and {len(links) - _LINKS} more' if len(links) > _LINKS else ''}{why}",
        ranks=ranks,
        place=_crossing(case, ranks, everyone)
        or entered_place(case, next(link.entry for link in cycle if link.entry.rank in ranks)),
        step=began,
        collective=reference(cycle[0].entry),
        parties=everyone,
        confidence=0.95,
        proof=flight_proof(case, everyone),
    )


def _crossing(case: Case, ranks: Sequence[int], everyone: Sequence[int]) -> Place | None:
    """The line of the function in which a rank that took another order parts from one that did not."""
    others = [rank for rank in everyone if rank not in ranks]
    _, apart = parting_frames(case, ranks[0], others[0]) if others else ((), None)
    return place_of(case, ranks[0], apart[0]) if apart and in_one_function(*apart) else None


@rule(RulePhase.RANKS_DIFFER, Cause.NO_SYNC_MISMATCH, outranks=("swallowed_exception",))
def no_sync_mismatch(case: Case) -> Explanation | None:
    """A step in which some rank reduced less than the others, with its gradients there."""
    found = case.step_difference if parted(case) else None
    if found is None:
        return _other_accumulation(case)
    if found.called or found.op not in _REDUCTIONS or not found.alone or found.without_gradients:
        return None
    ranks = apart(found)
    return explained(
        Cause.NO_SYNC_MISMATCH,
        f"{ranks_text(ranks)} reduced gradients otherwise than the rest in step {found.step} ({found.op} of group"
        f" {found.group}: {counts_text(found.counts)}); from there on reductions of different steps were paired"
        f"{shown_later(case)}",
        ranks=ranks,
        place=backward_place(case) or pending_place(case, ranks),
        step=found.step,
        collective=CollectiveRef(group=found.group, seq=None, op=found.op),
        confidence=0.95,
        proof=("step_ledger.txt",),
        advice="Enter no_sync, and leave it, in the same steps on every rank. The gradients are wrong from that step"
        " on: do not go on from a checkpoint written after it.",
    )


def _other_accumulation(case: Case) -> Explanation | None:
    """As many reductions a step on every rank, but of another number of batches."""
    found = case.other_pace if parted(case) and case.analysis.divergences else None
    if found is None or (case.skipped is not None and not _at_the_end(case, case.skipped)):
        return None
    marks = ", ".join(f"{text} on {ranks}" for ranks, text in classes([(rank, str(n)) for rank, n in found.marks]))
    return explained(
        Cause.NO_SYNC_MISMATCH,
        f"the ranks take another number of batches to a step: {marks} marks of training in each{shown_later(case)}",
        ranks=found.ranks,
        place=pending_place(case, found.ranks),
        confidence=0.8,
        proof=call_proof(case, found.ranks),
        advice="Accumulate as many batches on every rank before gradients are reduced: compare the setting between"
        " ranks, and what decides when a step is done.",
    )


def _at_the_end(case: Case, skipped: SkippedCall) -> bool:
    """Whoever called it has ended training: that the others did not come to it yet follows from that."""
    return all(
        (board.training is not None and board.training.kind not in ("forward", "backward", "optimizer"))
        for rank, board in case.boards.items()
        if rank in skipped.callers
    )


@rule(RulePhase.RANKS_DIFFER, Cause.UNEVEN_INPUTS, outranks=("shape_mismatch",))
def uneven_inputs(case: Case) -> Explanation | None:
    finished = case.out_of_batches if parted(case) else None
    difference = case.step_difference
    if finished is None or (difference is not None and difference.step <= finished.step):
        return None
    instead = [f"{call.op}{at(call.place)}" for _, call in finished.calls[:1]]
    place = finished.calls[0][1].place if finished.calls else None
    waiting = entered_text(case, [entry for entry in first_entries(case) if entry.rank in finished.others])
    return explained(
        Cause.UNEVEN_INPUTS,
        f"{ranks_text(finished.ranks)} ran out of batches after step {finished.step}"
        f"{f' and entered {instead[0]}' if instead else ' and ended'}; {ranks_text(finished.others)} went on to step"
        f" {finished.step + 1}{f': {waiting}' if waiting else ''}",
        ranks=finished.ranks,
        place=place,
        step=finished.step + 1,  # that the others are in: the first one for which this rank had nothing
        collective=next((reference(entry) for entry in first_entries(case)), None),
        confidence=0.9,
        proof=("step_ledger.txt", *call_proof(case, finished.ranks)),
    )


@rule(RulePhase.RANKS_DIFFER, Cause.SHAPE_MISMATCH, outranks=("dtype_mismatch",))
def shape_mismatch(case: Case) -> Explanation | None:
    return _mismatch(case, DivergenceKind.SHAPE)


@rule(RulePhase.RANKS_DIFFER, Cause.DTYPE_MISMATCH, outranks=("root_mismatch",))
def dtype_mismatch(case: Case) -> Explanation | None:
    return _mismatch(case, DivergenceKind.DTYPE)


@rule(RulePhase.RANKS_DIFFER, Cause.ROOT_MISMATCH, outranks=("left_backward_early",))
def root_mismatch(case: Case) -> Explanation | None:
    """One broadcast, gather or the like, whose ranks name different ranks as its root."""
    mismatch = case.call_mismatch if parted(case) else None
    if mismatch is None or mismatch.kind is not DivergenceKind.ROOT:
        return None
    roots = on_ranks([(rank, f"rank {call.peer}{at(call.place)}") for rank, call in mismatch.calls])
    return explained(
        Cause.ROOT_MISMATCH,
        f"{mismatch.calls[0][1].op}{number_text(case, mismatch)} in step {mismatch.step} has another root: {roots}"
        f"{undecided(mismatch.differ, mismatch.calls)}",
        ranks=mismatch.differ,
        place=mismatch.call(mismatch.differ[0]).place,
        step=mismatch.step,
        collective=call_reference(case, mismatch, mismatch.differ[0]),
        confidence=0.95,
        proof=call_proof(case, [rank for rank, _ in mismatch.calls]),
    )


def _mismatch(case: Case, kind: DivergenceKind) -> Explanation | None:
    if not parted(case):
        return None
    mismatch = case.call_mismatch
    if mismatch is not None and mismatch.kind is kind:
        return _other_sizes(case, mismatch)
    found = case.analysis.divergences[0] if case.analysis.divergences else None
    if found is None or found.kind is not kind or any(entry.call for entry in found.entries):
        return None
    if case.skipped is not None or case.ahead_in(found) or added_between_steps(case, found) is not None:
        return None  # one of them left something out, or added it: these are not the same collective
    return _other_sizes_below(case, found)


def _other_sizes(case: Case, mismatch: CallMismatch) -> Explanation:
    first = mismatch.calls[0][1]
    sizes = [
        (rank, f"{_payload(mismatch.kind, call.elements, call.dtype)}{at(call.place)}") for rank, call in mismatch.calls
    ]
    return explained(
        Cause.SHAPE_MISMATCH if mismatch.kind is DivergenceKind.SHAPE else Cause.DTYPE_MISMATCH,
        f"{first.op}{number_text(case, mismatch)} in step {mismatch.step} has {on_ranks(sizes)}"
        f"{undecided(mismatch.differ, mismatch.calls)}",
        ranks=mismatch.differ,
        place=mismatch.call(mismatch.differ[0]).place,
        step=mismatch.step,
        collective=call_reference(case, mismatch, mismatch.differ[0]),
        confidence=0.95,
        proof=call_proof(case, [rank for rank, _ in mismatch.calls]),
    )


def _other_sizes_below(case: Case, found: Divergence) -> Explanation:
    sizes = [(entry.rank, _entry_payload(case, found.kind, entry)) for entry in found.entries]
    return explained(
        Cause.SHAPE_MISMATCH if found.kind is DivergenceKind.SHAPE else Cause.DTYPE_MISMATCH,
        f"{found.entries[0].collective.op} #{found.seq} of group {found.group}, below DDP or FSDP, has"
        f" {on_ranks(sizes)}{undecided(found.differ, found.entries)}",
        ranks=found.differ,
        place=entered_place(case, entry_of(found, found.differ[0])),
        collective=reference(found.entries[0]),
        confidence=0.9,
        proof=flight_proof(case, found.differ),
    )


def _one_point(entries: Sequence[Entry]) -> bool:
    """Every entry was called from Python at the same point of the same step: none has passed another's."""
    points = {(entry.call.step, entry.call.position) if entry.call else None for entry in entries}
    return len(points) == 1 and None not in points


def _payload(kind: DivergenceKind, count: int, dtype: str) -> str:
    return dtype if kind is DivergenceKind.DTYPE else f"{count} elements"


def _entry_payload(case: Case, kind: DivergenceKind, entry: Entry) -> str:
    one = entry.collective
    return f"{_payload(kind, sum(elements(one)), '/'.join(one.dtypes))}{at(entered_place(case, entry))}"


def _link_text(case: Case, link: Link) -> str:
    never = any(
        group == link.entry.collective.group and link.waits_for in ranks for group, ranks in case.analysis.never_entered
    )
    who = f"rank {link.waits_for}{', which never entered that group' if never else ''}"
    return f"rank {link.entry.rank} waits in {entry_text(case, link.entry)} for {who}"
