"""The rules: one pure function a cause, from a case to a finding or nothing.

The first one of CAUSES that answers gives the cause. Rules work from mechanisms (who waits for whom, what differs
between ranks, who left first), not from the texts of known programs.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.judged.case import (
    Case,
    at,
    counted,
    finding,
    layer_of,
    ledger_proof,
    ranks_text,
    shorten,
    wait_place,
)
from harness.core.judged.causes_of_failure import bad_exit, crashed, early_exit, exception, killed, slow
from harness.core.judged.causes_of_hang import (
    backward_function_blocked,
    blocked_io,
    infinite_loop,
    lock_cycle,
    starved,
    stopped_process,
)
from harness.core.observed.evidence import Ending
from harness.core.place import Place
from harness.core.report import Finding, Status

Rule = Callable[[Case], "Finding | None"]


def _not_judged(case: Case) -> Finding | None:
    if case.judgement.status is not Status.ERROR:
        return None
    interrupted = case.evidence.ending in (Ending.INTERRUPTED, Ending.ABANDONED)
    return finding(
        "interrupted" if interrupted else "harness_error",
        case.judgement.error or "the run could not be judged",
        confidence=1.0,
        advice="Run it again with the command below."
        if interrupted
        else "Read test_execution.log; report this as a bug.",
        proof=("interrupted",) if case.evidence.ending is Ending.ABANDONED else (),
    )


def _rank_conditional_collective(case: Case) -> Finding | None:
    """A rank passed a call that the others made, and then some rank failed or waits for ever."""
    skipped = case.skipped
    if skipped is None or case.evidence.ending is Ending.DEADLINE:
        return None
    place = skipped.place
    counts = " · ".join(f"rank {rank} x{count}" for rank, count in skipped.counts)
    others = ranks_text([rank for rank, count in skipped.counts if rank != skipped.rank])
    return finding(
        "rank_conditional_collective",
        f"rank {skipped.rank} skipped {skipped.call.op}{at(place)} in step {skipped.step}; {others} called it"
        f" ({counts})",
        ranks=(skipped.rank,),
        place=place,
        confidence=0.95,
        proof=ledger_proof(case, skipped.rank),
        advice="Call the collective on every rank, in the same order: move it out of the condition, or contribute"
        " zeros where there is nothing to add.",
    )


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
        f"{outlived} outlived the run, ended by the harness: {shorten('; '.join(left))}",
        confidence=1.0,
        proof=("processes.jsonl",),
        advice="Join or end child processes before the program leaves.",
    )


CAUSES: tuple[Rule, ...] = (
    _not_judged,
    slow,
    exception,
    _rank_conditional_collective,
    early_exit,
    killed,
    crashed,
    bad_exit,
    stopped_process,
    backward_function_blocked,
    lock_cycle,
    infinite_loop,
    starved,
    blocked_io,
)
BESIDES: tuple[Rule, ...] = (_no_gradient, _orphan_process)
