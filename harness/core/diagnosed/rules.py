"""The rules: one pure function a cause, from a case to a finding or nothing.

The first one of CAUSES that answers gives the cause. Rules work from mechanisms (who waits for whom, what differs
between ranks, who left first), not from the texts of known programs.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.diagnosed.case import (
    Case,
    at,
    counted,
    finding,
    hung_roots,
    layer_of,
    ledger_proof,
    shorten,
    wait_place,
)
from harness.core.diagnosed.naming import ranks_text
from harness.core.diagnosed.of_divergence import (
    collective_order_mismatch,
    cross_group_deadlock,
    dtype_mismatch,
    no_sync_mismatch,
    shape_mismatch,
    uneven_inputs,
    unseen_collective,
)
from harness.core.diagnosed.of_failure import bad_exit, crashed, early_exit, exception, killed, slow
from harness.core.diagnosed.of_group_wait import (
    group_creation_subset,
    p2p_unmatched,
    rendezvous_missing_rank,
    store_key_missing,
    transport,
)
from harness.core.diagnosed.of_hang import (
    backward_function_blocked,
    blocked_io,
    dataloader_worker_blocked,
    fork_lock,
    infinite_loop,
    lock_cycle,
    pipe_full,
    starved,
    stopped_process,
)
from harness.core.diagnosed.of_native import gil_held_native, native_busy_loop
from harness.core.judged.looked_at import still_moving
from harness.core.judged.wait import GROUP_KINDS, WaitKind
from harness.core.observed.evidence import Board, Call, Ending
from harness.core.parted.ledger import Skipped
from harness.core.place import Place
from harness.core.report import Finding, Status

Rule = Callable[[Case], "Finding | None"]


def _not_judged(case: Case) -> Finding | None:
    if case.judgement.status is not Status.ERROR:
        return None
    if case.evidence.ending is Ending.DETACHED:
        return _still_running(case)
    interrupted = case.evidence.ending in (Ending.INTERRUPTED, Ending.ABANDONED)
    return finding(
        "interrupted" if interrupted else "harness_error",
        case.judgement.error or "the run could not be judged",
        confidence=1.0,
        advice="Run it again with the command below."
        if interrupted
        else "Read test_execution.log; report this as a bug.",
        proof=("interrupted",) if case.evidence.ending is Ending.ABANDONED and not case.evidence.observed else (),
    )


def _still_running(case: Case) -> Finding:
    moving = still_moving(case.evidence)
    return finding(
        "still_running" if moving else "suspected",
        case.judgement.error or "",
        confidence=1.0,
        proof=("watch.jsonl",),
        advice="Nothing to do; attach again when it goes quiet."
        if moving
        else "Attach again with a longer --for; dumps/ shows where each rank stands.",
    )


def _retracted_hang(case: Case) -> Finding | None:
    """Only an observed job can move again after its proof: one of ours is ended there."""
    retracted = case.evidence.retracted
    if not retracted:
        return None
    last = retracted[-1]
    times = "" if len(retracted) == 1 else f" ({len(retracted)} times, this was the last)"
    return finding(
        "retracted_hang",
        f"proven to hang {last.at_s:.0f} s after the start ({last.kind}: {last.reason}), and it moved again after"
        f" {last.quiet_s:.0f} s{times}: that was no hang",
        confidence=1.0,
        proof=("watch.jsonl",),
        advice="Something outside the job released it. Raise limits.stall_s beyond the pause if it is meant to be.",
    )


def _rank_conditional_collective(case: Case) -> Finding | None:
    """A rank passed a call that the others made, and then some rank failed or waits for ever."""
    skipped = case.skipped
    if skipped is None or case.evidence.ending is Ending.DEADLINE or _held_up_elsewhere(case):
        return None
    place = skipped.place
    counts = " · ".join(f"rank {rank} x{count}" for rank, count in skipped.counts)
    others = ranks_text([rank for rank, count in skipped.counts if rank != skipped.rank])
    ambiguous = _or_was_finished(case, skipped)
    return finding(
        "rank_conditional_collective",
        f"rank {skipped.rank} skipped {skipped.call.op}{at(place)} in step {skipped.step}; {others} called it"
        f" ({counts}){ambiguous}",
        ranks=(skipped.rank,),
        place=place,
        confidence=0.75 if ambiguous else 0.95,
        proof=ledger_proof(case, skipped.rank),
        advice="Call the collective on every rank, in the same order: move it out of the condition, or contribute"
        " zeros where there is nothing to add.",
    )


def _held_up_elsewhere(case: Case) -> bool:
    """Every root waits for something else than a rank: it would wait there whatever it called before."""
    kinds = {root.kind for root in hung_roots(case)}
    return bool(kinds) and not kinds & {*GROUP_KINDS, WaitKind.GONE}


def _or_was_finished(case: Case, skipped: Skipped) -> str:
    """Whoever has done its last step and meets the others' next one looks the same as one that calls too much."""
    most = max(count for _, count in skipped.counts)
    callers = [rank for rank, count in skipped.counts if count == most]
    boards = [case.boards[rank] for rank in callers]
    stands_there = all(_stands_in(board, skipped.call) for board in boards)
    between_steps = all(board.training is not None and board.training.kind == "step" for board in boards)
    went_on = case.boards[skipped.rank].step > skipped.step
    if not (stands_there and between_steps and went_on):
        return ""
    return f"; or {ranks_text(callers)} had no step left to do"


def _stands_in(board: Board, call: Call) -> bool:
    last = board.calls[-1] if board.calls else None
    return last is not None and last.left_s is None and (last.op, last.place) == (call.op, call.place)


def unknown(case: Case) -> Finding:
    seen = [failure.text for failure in case.judgement.failures]
    seen += [f"rank {root.rank} stands in {root.stands_in}" for root in case.roots]
    ranks = sorted(
        {*(f.rank for f in case.judgement.failures[:1] if f.rank is not None), *(r.rank for r in case.roots)}
    )
    return finding(
        "unknown",
        "no rule names the cause; seen: " + ("; ".join(seen) or "nothing"),
        ranks=tuple(ranks),
        place=wait_place(case, case.roots[0]) if case.roots else None,
        confidence=0.3,
        proof=("output.log",),
        advice="Read output.log and dumps/ from the earliest line on.",
    )


def _no_gradient(case: Case) -> Finding | None:
    missing = sorted({name for rank in case.evidence.ranks for name in rank.traces.missing_parameters})
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    ranks = tuple(rank.rank for rank in case.evidence.ranks if rank.traces.missing_parameters)
    return finding(
        "no_gradient",
        f"{counted(len(missing), 'parameter')} received no gradient: {shown}",
        ranks=ranks,
        place=Place(parameter=missing[0], module=missing[0].rpartition(".")[0] or None, layer=layer_of(missing[0])),
        confidence=1.0,
        proof=("traces.log",),
        advice="Frozen on purpose, or not reached by the loss; under DDP the second kind needs find_unused_parameters"
        " or a term of zero.",
    )


def _orphan_process(case: Case) -> Finding | None:
    left = case.evidence.leftovers
    if not left:
        return None
    outlived = counted(len(left), "process", "processes")
    return finding(
        "orphan_process",
        f"{outlived} outlived the run, {'left alone' if case.evidence.observed else 'ended by the harness'}:"
        f" {shorten('; '.join(left))}",
        confidence=1.0,
        proof=("processes.jsonl",),
        advice="Join or end child processes before the program leaves.",
    )


CAUSES: tuple[Rule, ...] = (
    _not_judged,
    slow,
    rendezvous_missing_rank,
    exception,
    group_creation_subset,
    p2p_unmatched,
    store_key_missing,
    cross_group_deadlock,
    no_sync_mismatch,
    uneven_inputs,
    shape_mismatch,
    dtype_mismatch,
    collective_order_mismatch,
    _rank_conditional_collective,
    unseen_collective,
    early_exit,
    killed,
    crashed,
    bad_exit,
    gil_held_native,
    native_busy_loop,
    stopped_process,
    dataloader_worker_blocked,
    fork_lock,
    pipe_full,
    backward_function_blocked,
    lock_cycle,
    infinite_loop,
    starved,
    blocked_io,
    transport,
)
BESIDES: tuple[Rule, ...] = (_no_gradient, _orphan_process, _retracted_hang)
