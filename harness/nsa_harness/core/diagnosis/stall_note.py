"""A note on a suspected hang, which says what each rank is waiting for while no hang is proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.live import FirstSnapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.motion import Motion, rank_stack, task_of
from nsa_harness.core.verdict.proof import StallEpisode, is_closed, snapshot_pair
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_graph_between


@dataclass(frozen=True, kw_only=True)
class StalledRanks:
    """A group of ranks that are in the same state on the same line."""

    ranks: tuple[int, ...]
    state: str  # "makes progress", "computes" or "is blocked"
    blocked_in: str
    line: Frame | None
    target: str  # file or address that the system call uses
    child_pid: int | None  # child process that contains `line`; None: the rank itself
    peers: tuple[int, ...]  # ranks for which these ranks wait


@dataclass(frozen=True, kw_only=True)
class StallNote:
    """The state of a run that is suspected to hang, without proof."""

    stalled_ranks: tuple[StalledRanks, ...]
    moving_ranks: tuple[int, ...]  # ranks that still make progress, so the stall may end
    open_waits: tuple[WaitKind, ...]  # waits that may still end; if empty, the next snapshot may prove a hang
    left_s: float | None  # seconds until the verdict becomes HANG; None: it never does in this state


def stall_note(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    exited_ranks: Iterable[int] = (),
    attended: bool = False,
) -> StallNote | None:
    """Return a description of a suspected hang, or None if there are fewer than two snapshots."""
    pair = snapshot_pair(snapshots)
    if pair is None:
        return None
    graph = wait_graph_between(*pair, exited_ranks, backend)
    ranks_by_state: dict[StalledRanks, list[int]] = {}
    for wait in graph.waits:
        ranks_by_state.setdefault(_describe_wait(wait), []).append(wait.rank)
    stalled_ranks = tuple(replace(row, ranks=tuple(ranks)) for row, ranks in ranks_by_state.items())
    moving_ranks = tuple(wait.rank for wait in graph.waits if wait.motion is Motion.MOVING)
    if moving_ranks:
        return StallNote(stalled_ranks=stalled_ranks, moving_ranks=moving_ranks, open_waits=(), left_s=None)
    episode = StallEpisode(
        snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s, is_attended=attended
    )
    open_roots = [root for root in graph.roots if not is_closed(root, limits)]
    times_s = [episode.remaining_s(root) for root in open_roots]
    return StallNote(
        stalled_ranks=stalled_ranks,
        moving_ranks=(),
        open_waits=tuple(root.kind for root in open_roots),
        left_s=None if not times_s or None in times_s else max(time_s for time_s in times_s if time_s is not None),
    )


def _describe_wait(wait: Wait) -> StalledRanks:
    """Return the state of a waiting rank without the number of the rank, so that equal states can be merged."""
    deepest = wait.child.deepest if wait.child else wait
    without_progress = "computes" if wait.kind is WaitKind.COMPUTE else "is blocked"
    state = "makes progress" if wait.motion is Motion.MOVING else without_progress
    if wait.kind is WaitKind.STOPPED:
        state = "is stopped by a signal"
    return StalledRanks(
        ranks=(),
        state=state,
        blocked_in=wait.blocked_in if state == "is blocked" else "",
        line=deepest.user_frame or wait.user_frame,
        target=deepest.target,
        child_pid=wait.child.deepest.pid if wait.child else None,
        peers=wait.peers,
    )


def first_snapshot(snapshot: Snapshot, backend: str, exited_ranks: Iterable[int] = ()) -> tuple[FirstSnapshot, ...]:
    """Return a description of each rank's activity in the first snapshot of a run.

    Ranks that are in the same call on the same line are merged. One snapshot cannot show progress, so a rank counts as
    blocked unless its training thread is running.
    """
    waits = {wait.rank: wait for wait in wait_graph_between(snapshot, snapshot, exited_ranks, backend).waits}
    rows: dict[tuple[str, str, str], list[RankSnapshot]] = {}
    for rank in snapshot.ranks:
        line = waits[rank.rank].user_frame if rank.rank in waits else None
        place = f"{line.file.rpartition('/')[2]}:{line.line}" if line else ""
        blocked_in = "running" if _is_running(rank) or rank.rank not in waits else waits[rank.rank].blocked_in
        rows.setdefault((blocked_in, place, line.function if line else ""), []).append(rank)
    return tuple(
        FirstSnapshot(
            ranks=tuple(rank.rank for rank in ranks),
            blocked_in=blocked_in,
            place=place,
            function=function,
            idle_s=min((idle for rank in ranks if (idle := _idle_s(rank)) is not None), default=None),
            cpu_s=max((rank.process.cpu_s for rank in ranks if rank.process), default=None),
            age_s=snapshot.at_s,
        )
        for (blocked_in, place, function), ranks in rows.items()
    )


def _is_running(rank: RankSnapshot) -> bool:
    task = task_of(rank, rank_stack(rank))
    return task is not None and (task.state == "R" or task.syscall == "running")


def _idle_s(rank: RankSnapshot) -> float | None:
    task = task_of(rank, rank_stack(rank))
    return task.idle_s if task else None
