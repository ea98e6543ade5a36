"""Stall note: where a suspected run is stuck before a hang is proven, what may end it, and when it would be a HANG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.live import FirstSnapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.motion import Motion, rank_stack, task_of
from nsa_harness.core.verdict.proof import StallEpisode, closed, snapshot_pair
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_for


@dataclass(frozen=True, kw_only=True)
class StalledRanks:
    """Ranks that are in the same state on the same line."""

    ranks: tuple[int, ...]
    does: str  # "makes progress", "computes", "is blocked"
    blocked_in: str
    line: Frame | None
    target: str  # the file or address of the call
    child_pid: int | None  # the child process in which the line is
    peers: tuple[int, ...]  # ranks that they wait for


@dataclass(frozen=True, kw_only=True)
class StallNote:
    """The waits of a run that is suspected, but not proven, to hang. `texts/sentences.py` puts it into words."""

    stalled: tuple[StalledRanks, ...]
    moving: tuple[int, ...]  # ranks that still make progress, which may end the stall
    open_waits: tuple[WaitKind, ...]  # waits that may still end; if there are none, the next snapshot may prove a HANG
    left_s: float | None  # time until the verdict would be HANG; None: it would not become one in this state


def stall_note(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    gone: Iterable[int] = (),
    attended: bool = False,
) -> StallNote | None:
    """Return the stall note from the arguments of `prove`, or None before the second snapshot."""
    looks = snapshot_pair(snapshots)
    if looks is None:
        return None
    graph = wait_for(*looks, gone, backend)
    same: dict[StalledRanks, list[int]] = {}
    for wait in graph.waits:
        same.setdefault(_stalled(wait), []).append(wait.rank)
    stalled = tuple(replace(row, ranks=tuple(ranks)) for row, ranks in same.items())
    moving = tuple(wait.rank for wait in graph.waits if wait.motion is Motion.MOVING)
    if moving:
        return StallNote(stalled=stalled, moving=moving, open_waits=(), left_s=None)
    episode = StallEpisode(
        snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s, attended=attended
    )
    still_open = [root for root in graph.roots if not closed(root, limits)]
    left = [episode.left_s(root) for root in still_open]
    return StallNote(
        stalled=stalled,
        moving=(),
        open_waits=tuple(root.kind for root in still_open),
        left_s=None if not left or None in left else max(left_s for left_s in left if left_s is not None),
    )


def _stalled(wait: Wait) -> StalledRanks:
    inside = wait.child.deepest if wait.child else wait
    does = (
        "makes progress"
        if wait.motion is Motion.MOVING
        else "computes"
        if wait.kind is WaitKind.COMPUTE
        else "is blocked"
    )
    return StalledRanks(
        ranks=(),
        does=does,
        blocked_in=wait.blocked_in if does == "is blocked" else "",
        line=inside.user or wait.user,
        target=inside.target,
        child_pid=wait.child.deepest.pid if wait.child else None,
        peers=wait.peers,
    )


def first_look(look: Snapshot, backend: str, gone: Iterable[int] = ()) -> tuple[FirstSnapshot, ...]:
    """Return the call in which each rank is at one moment. Ranks in the same call on the same line share a row.

    A single snapshot cannot show progress, so each rank counts as blocked unless its thread is running.
    """
    waits = {wait.rank: wait for wait in wait_for(look, look, gone, backend).waits}
    rows: dict[tuple[str, str, str], list[RankSnapshot]] = {}
    for rank in look.ranks:
        line = waits[rank.rank].user if rank.rank in waits else None
        place = f"{line.file.rpartition('/')[2]}:{line.line}" if line else ""
        blocked_in = "running" if _runs(rank) or rank.rank not in waits else waits[rank.rank].blocked_in
        rows.setdefault((blocked_in, place, line.function if line else ""), []).append(rank)
    return tuple(
        FirstSnapshot(
            ranks=tuple(rank.rank for rank in ranks),
            blocked_in=blocked_in,
            place=place,
            function=function,
            idle_s=min((idle for rank in ranks if (idle := _idle_s(rank)) is not None), default=None),
            cpu_s=max((rank.process.cpu_s for rank in ranks if rank.process), default=None),
            age_s=look.at_s,
        )
        for (blocked_in, place, function), ranks in rows.items()
    )


def _runs(rank: RankSnapshot) -> bool:
    task = task_of(rank, rank_stack(rank))
    return task is not None and (task.state == "R" or task.syscall == "running")


def _idle_s(rank: RankSnapshot) -> float | None:
    task = task_of(rank, rank_stack(rank))
    return task.idle_s if task else None
