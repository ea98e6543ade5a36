"""What is said of a run as a whole: that it was not judged, that it moved again, what outlived it, what was seen."""

from __future__ import annotations

from nsa_harness.core.diagnosis.case import Case, Explanation, counted, explained, shorten, wait_place
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import still_moving


@rule(Phase.NOT_JUDGED, Cause.INTERRUPTED, Cause.HARNESS_ERROR, Cause.STILL_RUNNING, Cause.SUSPECTED)
def not_judged(case: Case) -> Explanation | None:
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


@rule(Phase.SILENT, Cause.RETRACTED_HANG, outranks=("find_unused_needless",))
def retracted_hang(case: Case) -> Explanation | None:
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


@rule(Phase.FALLBACK, Cause.UNKNOWN)
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


@rule(Phase.SILENT, Cause.ORPHAN_PROCESS, outranks=("retracted_hang",))
def orphan_process(case: Case) -> Explanation | None:
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
