"""The rules: one pure function a cause, from a case to a finding or nothing.

The first one of CAUSES that answers gives the cause. Rules work from mechanisms (who waits for whom, what differs
between ranks, who left first), not from the texts of known programs.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.diagnosed.case import (
    Case,
    Explanation,
    counted,
    explained,
    layer_of,
    shorten,
    wait_place,
)
from harness.core.diagnosed.causes import Cause
from harness.core.diagnosed.of_autograd import (
    checkpoint_recompute_mismatch,
    inplace_modification,
    model_mismatch,
    ready_twice,
    static_graph_changed,
)
from harness.core.diagnosed.of_divergence import (
    cross_group_deadlock,
    dtype_mismatch,
    no_sync_mismatch,
    root_mismatch,
    shape_mismatch,
    uneven_inputs,
)
from harness.core.diagnosed.of_ending import cuda_assert, cuda_oom, host_oom, infra, shutdown_hang
from harness.core.diagnosed.of_failure import bad_exit, came_too_late, crashed, early_exit, exception, killed, slow
from harness.core.diagnosed.of_gradients import (
    find_unused_needless,
    gradient_order_differs,
    nothing_to_differentiate,
    rank_conditional_unused_params,
    reentrant_no_grad_input,
    silent_checkpoint,
    unused_params,
)
from harness.core.diagnosed.of_group_wait import (
    group_creation_subset,
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
from harness.core.diagnosed.of_left_out import (
    rank0_only_collective,
    rank_conditional_collective,
    swallowed_exception,
    unseen_collective,
)
from harness.core.diagnosed.of_native import gil_held_native, native_busy_loop
from harness.core.diagnosed.of_order import collective_order_mismatch
from harness.core.diagnosed.of_reduction import left_backward_early
from harness.core.diagnosed.of_silence import (
    dirty_exit,
    gate_collapse,
    memory_growth,
    nan,
    never_a_gradient,
    replica_divergence,
)
from harness.core.diagnosed.of_threads import livelock, open_thread_wait, pool_worker_lost, thread_died
from harness.core.diagnosed.of_transfer import p2p_unmatched
from harness.core.judged.looked_at import still_moving
from harness.core.observed.evidence import Ending
from harness.core.place import Place
from harness.core.report import Status

Rule = Callable[[Case], "Explanation | None"]


def _not_judged(case: Case) -> Explanation | None:
    if case.judgement.status is not Status.ERROR:
        return None
    if case.evidence.ending is Ending.DETACHED:
        return _still_running(case)
    interrupted = case.evidence.ending in (Ending.INTERRUPTED, Ending.ABANDONED)
    return explained(
        Cause.INTERRUPTED if interrupted else Cause.HARNESS_ERROR,
        case.judgement.error or "the run could not be judged",
        confidence=1.0,
        proof=("interrupted",) if case.evidence.ending is Ending.ABANDONED and not case.evidence.observed else (),
    )


def _still_running(case: Case) -> Explanation:
    moving = still_moving(case.evidence)
    return explained(
        Cause.STILL_RUNNING if moving else Cause.SUSPECTED,
        case.judgement.error or "",
        confidence=1.0,
        proof=("watch.jsonl",),
    )


def _retracted_hang(case: Case) -> Explanation | None:
    """Only an observed job can move again after its proof: one of ours is ended there."""
    retracted = case.evidence.retracted
    if not retracted:
        return None
    last = retracted[-1]
    times = "" if len(retracted) == 1 else f" ({len(retracted)} times, this was the last)"
    return explained(
        Cause.RETRACTED_HANG,
        f"proven to hang {last.at_s:.0f} s after the start ({last.kind}: {last.reason}), and it moved again after"
        f" {last.quiet_s:.0f} s{times}: that was no hang",
        confidence=1.0,
        proof=("watch.jsonl",),
    )


def unknown(case: Case) -> Explanation:
    seen = [failure.text for failure in case.judgement.failures]
    seen += [f"rank {root.rank} stands in {root.stands_in}" for root in case.roots]
    ranks = sorted(
        {*(f.rank for f in case.judgement.failures[:1] if f.rank is not None), *(r.rank for r in case.roots)}
    )
    return explained(
        Cause.UNKNOWN,
        "no rule names the cause; seen: " + ("; ".join(seen) or "nothing"),
        ranks=tuple(ranks),
        place=wait_place(case, case.roots[0]) if case.roots else None,
        confidence=0.3,
        proof=("output.log",),
    )


def _no_gradient(case: Case) -> Explanation | None:
    missing = sorted({name for rank in case.evidence.ranks for name in rank.traces.missing_parameters})
    if not missing:
        return never_a_gradient(case)
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    ranks = tuple(rank.rank for rank in case.evidence.ranks if rank.traces.missing_parameters)
    return explained(
        Cause.NO_GRADIENT,
        f"{counted(len(missing), 'parameter')} received no gradient: {shown}",
        ranks=ranks,
        place=Place(parameter=missing[0], module=missing[0].rpartition(".")[0] or None, layer=layer_of(missing[0])),
        confidence=1.0,
        proof=("traces.log",),
        advice="Frozen on purpose, or not reached by the loss; under DDP the second kind needs find_unused_parameters"
        " or a term of zero.",
    )


def _orphan_process(case: Case) -> Explanation | None:
    left = case.evidence.leftovers
    if not left:
        return None
    outlived = counted(len(left), "process", "processes")
    return explained(
        Cause.ORPHAN_PROCESS,
        f"{outlived} outlived the run, {'left alone' if case.evidence.observed else 'ended by the harness'}:"
        f" {shorten('; '.join(left))}",
        confidence=1.0,
        proof=("processes.jsonl",),
    )


CAUSES: tuple[Rule, ...] = (
    _not_judged,
    slow,
    came_too_late,
    rendezvous_missing_rank,
    host_oom,
    cuda_oom,
    cuda_assert,
    infra,
    static_graph_changed,
    reentrant_no_grad_input,
    rank_conditional_unused_params,
    unused_params,
    ready_twice,
    checkpoint_recompute_mismatch,
    inplace_modification,
    model_mismatch,
    nothing_to_differentiate,
    exception,
    group_creation_subset,
    p2p_unmatched,
    store_key_missing,
    cross_group_deadlock,
    no_sync_mismatch,
    swallowed_exception,
    uneven_inputs,
    shape_mismatch,
    dtype_mismatch,
    root_mismatch,
    left_backward_early,
    collective_order_mismatch,
    rank0_only_collective,
    rank_conditional_collective,
    unseen_collective,
    early_exit,
    killed,
    crashed,
    bad_exit,
    stopped_process,
    gil_held_native,
    native_busy_loop,
    shutdown_hang,
    thread_died,
    dataloader_worker_blocked,
    fork_lock,
    pipe_full,
    backward_function_blocked,
    lock_cycle,
    infinite_loop,
    pool_worker_lost,
    open_thread_wait,
    livelock,
    starved,
    blocked_io,
    transport,
)
BESIDES: tuple[Rule, ...] = (
    nan,
    replica_divergence,
    silent_checkpoint,
    _no_gradient,
    memory_growth,
    gate_collapse,
    dirty_exit,
    _orphan_process,
    _retracted_hang,
    find_unused_needless,
    gradient_order_differs,
)
