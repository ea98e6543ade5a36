"""What people are told besides the verdict: where each rank stood, what was checked, what is ruled out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.core.diagnosed.case import counted
from harness.core.diagnosed.naming import Meshes, coordinates, meshes, rank_names
from harness.core.judged.verdict import Judgement, how_it_ended
from harness.core.judged.wait import Wait, WaitKind
from harness.core.observed.evidence import Ending, Evidence, RankEvidence
from harness.core.report import Culprit, Standing, Status, Verdict, Vital

_DTYPES = {"torch.float32": "fp32", "torch.float64": "fp64", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def own_exit(rank: RankEvidence) -> int | None:
    return rank.exit.status if rank.exit and not rank.exit.by_us else None


def checked(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Only what was really looked at and found in order."""
    losses = [rank.last_loss for rank in evidence.ranks]
    if losses and all(loss is not None and math.isfinite(loss) for loss in losses):
        yield "losses finite on every rank"
    traced = [rank.traces for rank in evidence.ranks]
    if traced and all(trace.missing == 0 for trace in traced):
        yield f"{traced[0].arrived} of {traced[0].arrived} gradients on every rank"
    boards = [rank.board for rank in evidence.ranks]
    counted = [board for board in boards if board is not None]
    complete = len({board.enqueued for board in counted}) == 1 and all(b.enqueued == b.completed for b in counted)
    if len(counted) == len(boards) and complete and counted[0].enqueued:
        yield f"{counted[0].completed} of {counted[0].enqueued} collectives completed, the same on every rank"
    if verdict.status is not Status.HANG and all(own_exit(rank) == 0 for rank in evidence.ranks):
        yield "every rank exited 0"
    is_over = evidence.ending is not Ending.NOT_LAUNCHED and not _runs_on(evidence)
    if is_over and not evidence.leftovers and not evidence.undead:
        yield "no process left"


def _runs_on(evidence: Evidence) -> bool:
    """Somebody else's job, which we have left as it is."""
    return evidence.ending is Ending.DETACHED or (evidence.observed and not evidence.teardown_s)


_FILES = frozenset({WaitKind.IO, WaitKind.FILE_LOCK, WaitKind.LOADER, WaitKind.CHILD, WaitKind.PIPE})


def ruled_out(evidence: Evidence, judgement: Judgement) -> Iterator[str]:
    if judgement.status is not Status.HANG or judgement.proof is None:
        return
    kinds = {wait.kind for wait in judgement.proof.graph.waits}
    if not kinds & {WaitKind.COMPUTE, WaitKind.COMPILE}:
        yield "slow (no rank computes)"
    if WaitKind.TRANSPORT not in kinds:
        yield "network (the ranks are not all in the same collective)"
    if not kinds & _FILES:
        yield "data and files (no rank stands in a read or write)"
    if not any(rank.raised for rank in evidence.ranks):
        yield "errors (no rank raised, none died)"


def standings(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> Iterator[Standing]:
    if judgement.proof is None:
        if judgement.status is not Status.PASS:
            yield from (_last_standing(evidence, rank, culprit) for rank in evidence.ranks)
        return
    places = meshes(evidence)
    for wait in sorted(judgement.proof.graph.waits, key=lambda wait: wait.rank):
        yield Standing(
            rank=wait.rank,
            stands_in=wait.stands_in,
            waits_for=_waits_for(wait, places),
            quiet_s=_quiet_s(evidence, wait.rank),
            culprit=_blamed(wait.rank, culprit),
            coordinates=coordinates(wait.rank, places),
        )


_OUTSIDE = {
    WaitKind.STORE: "a key of the store",
    WaitKind.FILE_LOCK: "another process",
    WaitKind.PIPE: "a reader of the pipe",
    WaitKind.LOADER: "a data loader worker",
    WaitKind.COMPILE: "nobody",
    WaitKind.COMPUTE: "nobody",
    WaitKind.GONE: "nobody",
    WaitKind.LOCK: "its own process",
    WaitKind.STOPPED: "SIGCONT",
    WaitKind.SLEEP: "the clock",
    WaitKind.CHILD: "a child process",
}


def _last_standing(evidence: Evidence, rank: RankEvidence, culprit: Culprit | None) -> Standing:
    mark = rank.board.training or rank.board.newest if rank.board else None
    place = f"{mark.kind} {mark.name}".strip() if mark else "no mark was written"
    left = rank.exit is not None and not rank.exit.by_us
    return Standing(
        rank=rank.rank,
        stands_in=f"{how_it_ended(rank.exit.status)} · last in {place}" if rank.exit and left else place,
        waits_for="",
        quiet_s=None if left else _quiet_s(evidence, rank.rank),
        culprit=_blamed(rank.rank, culprit),
        coordinates=coordinates(rank.rank, meshes(evidence)),
    )


def _waits_for(wait: Wait, places: Meshes) -> str:
    if wait.peers:
        return rank_names(wait.peers, places)
    if wait.child is not None:
        return f"process {wait.child.deepest.pid}"
    return _OUTSIDE.get(wait.kind, "outside the job")


def _quiet_s(evidence: Evidence, rank: int) -> float | None:
    board = next((one.board for one in evidence.ranks if one.rank == rank), None)
    if board is None or board.newest is None:
        return None
    return max(0.0, evidence.ended_s - board.newest.at_s)


def _blamed(rank: int, culprit: Culprit | None) -> bool:
    return culprit is not None and rank in culprit.ranks


def vital(rank: RankEvidence) -> Vital:
    traces = rank.traces
    gradients = None if traces.arrived is None else f"{traces.arrived} of {traces.arrived + (traces.missing or 0)}"
    return Vital(
        rank=rank.rank,
        loss=rank.last_loss,
        gradients=gradients,
        buckets=_buckets(traces.buckets),
        longest_quiet_s=max(rank.board.gaps_s.values(), default=None) if rank.board else None,
        peak_rss_bytes=rank.peak_rss_bytes,
    )


def _buckets(buckets: Sequence[tuple[int, str]]) -> str | None:
    if not buckets:
        return None
    elements = sum(count for count, _ in buckets)
    dtype = Counter(name for _, name in buckets).most_common(1)[0][0]
    return f"{len(buckets)} · {elements / 1e6:.1f} M {_DTYPES.get(dtype, dtype)}"


def ended(evidence: Evidence) -> str:
    if evidence.ending is Ending.NOT_LAUNCHED:
        return "nothing was started"
    left = f"{counted(len(evidence.undead), 'process', 'processes')} left" if evidence.undead else "no process left"
    if _runs_on(evidence):
        return "not by us: it runs on" if evidence.ending is Ending.DETACHED else "not by us"
    if evidence.ending is Ending.EXITED and not evidence.leftovers:
        return f"by itself, {left}"
    return f"TERM, {evidence.teardown_s:.1f} s, {left}"
