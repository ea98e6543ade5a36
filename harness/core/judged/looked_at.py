"""What can be said of a job that was only looked at and runs on: it moves, or it is suspected."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.judged.limits import last_progress_s
from harness.core.judged.motion import Motion
from harness.core.judged.proof import LOOP_LINES
from harness.core.observed.evidence import Evidence, RankSnapshot, Sample

_MOVED_LOOKS = 2  # one moved byte may be a library's heartbeat


def moving_ranks(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Ranks that moved between looks, or computed on more lines than a loop has."""
    return tuple(rank for rank in sorted({one.rank for one in samples}) if _moves(rank, samples))


def still_moving(evidence: Evidence) -> list[int]:
    """Ranks that moved while they were looked at."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    return sorted({*moving_ranks(evidence.samples), *_marked(last, evidence)})


def looked_at(evidence: Evidence) -> str:
    """One sentence, which begins with MOVING or SUSPECT."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    blind = [rank.rank for rank in last if rank.board is None]
    missing = f"; ranks {_listed(blind)} have no probe, so no step, module or collective of theirs is known"
    moving = still_moving(evidence)
    if moving:
        return f"MOVING: ranks {_listed(moving)} move{missing if blind else ''}"
    if not last:
        return "SUSPECT: no rank could be looked at"
    states = ", ".join(f"rank {rank.rank} {_last_motion(rank.rank, evidence.samples)}" for rank in last)
    return f"SUSPECT: nothing moves, and it is not proven that nothing can: {states}{missing if blind else ''}"


def _moves(rank: int, samples: Sequence[Sample]) -> bool:
    own = [one for one in samples if one.rank == rank]
    moved = [one for one in own if one.motion == Motion.MOVING]
    lines = {(one.leaf.file, one.leaf.line) for one in own if one.motion == Motion.BURNING and one.leaf}
    return len(moved) >= _MOVED_LOOKS or len(lines) > LOOP_LINES


def _marked(last: Sequence[RankSnapshot], evidence: Evidence) -> set[int]:
    """Ranks whose board has a mark of the time since the first look."""
    begun_s = evidence.samples[0].at_s if evidence.samples else evidence.ended_s
    return {rank.rank for rank in last if rank.board and last_progress_s(rank.board) > begun_s}


def _last_motion(rank: int, samples: Sequence[Sample]) -> str:
    return next((one.motion for one in reversed(samples) if one.rank == rank), "unseen")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
