"""Proof of a hang: when a run without progress may be called HANG, and of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import ChildSample, Sample, Snapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import HangKind
from nsa_harness.core.verdict.motion import Motion, leaf, nap
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import WaitFor, wait_for

SETTLE_S = 1.5  # two snapshots closer than this show the same moment
LOOP_SAMPLES = 20
LOOP_LINES = 2
# A loop with a long body, or one that calls small functions, needs more samples and twice the time.
TURN_SAMPLES = 60
TURN_LINES = 16
TURN_USER_LINES = 8
TURN_TIMES = 2
_LOOPS = frozenset({WaitKind.COMPUTE, WaitKind.COMPILE})
Computation = Sequence[Sample] | Sequence[ChildSample]  # samples of one process, oldest first


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The reason why this run can make no more progress."""

    kind: HangKind | None  # None: a post-mortem shows that the run was blocked, but not always in what
    reason: str
    graph: WaitFor


def prove(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    gone: Iterable[int] = (),
) -> Proof | None:
    """Return the proof that this run hangs, or None while it may still move.

    `snapshots` belong to one stall episode, oldest first. `limits` are those in force, with every value set. `backend`
    decides whether ranks keep a core busy while they wait for a device.
    """
    looks = snapshot_pair(snapshots)
    if looks is None:
        return None
    before, after = looks
    graph = wait_for(before, after, gone, backend)
    if graph.moved or not graph.roots:
        return None
    open_roots = [root for root in graph.roots if not closed(root, limits)]
    if not open_roots:
        reason = _closed_reason(graph, after.at_s - before.at_s)
        return Proof(kind=_closed_kind(graph.roots), reason=reason, graph=graph)
    episode = StallEpisode(snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s)
    if not all(episode.endless(root) for root in open_roots):
        return None
    quiet_s = min(episode.no_progress_s(root) for root in open_roots)
    looping = next((root for root in open_roots if _computes(root)), None)
    kind, reason = HangKind.STARVED, f"an open wait of {quiet_s:.0f} s"
    if looping is not None:
        count = len(loop_lines(looping, samples))
        shown = LOOP_SAMPLES if _all_loop(looping, samples) else TURN_SAMPLES
        kind = HangKind.LIVELOCK
        reason = f"the same {'line' if count == 1 else f'{count} lines'} in {shown} samples over {quiet_s:.0f} s"
    elif all(episode.sleeps_again(root) for root in open_roots):
        kind, reason = HangKind.LIVELOCK, f"a polling loop on one line, for {quiet_s:.0f} s"
    return Proof(kind=kind, reason=reason, graph=graph)


def snapshot_pair(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, Snapshot] | None:
    """Return the last snapshot, and the latest earlier one that is far enough away to show motion."""
    earlier = [snapshot for snapshot in snapshots[:-1] if snapshots[-1].at_s - snapshot.at_s >= SETTLE_S]
    return (earlier[-1], snapshots[-1]) if earlier else None


@dataclass(frozen=True, kw_only=True)
class StallEpisode:
    """The observations since the run stopped making progress."""

    snapshots: Sequence[Snapshot]
    samples: Sequence[Sample]
    limits: Limits
    last_progress_s: float

    def endless(self, root: Wait) -> bool:
        """Return an open root that has shown for long enough that it does not end."""
        quiet_s = self.no_progress_s(root)
        if root.kind is WaitKind.COMPUTE or root.computing:
            busy_s = _number(self.limits.busy_s)
            if _all_loop(root, self.samples):
                return quiet_s >= busy_s
            turns = all(
                _loops(computation) or _is_short_loop(computation) for computation in computations(root, self.samples)
            )
            return quiet_s >= TURN_TIMES * busy_s and turns
        if quiet_s < _number(self.limits.open_wait_s):
            return False
        if root.kind is WaitKind.COMPILE:
            return _all_loop(root, self.samples)
        return not self._wakes_in_time(root)

    def left_s(self, root: Wait) -> float | None:
        """Return the seconds until that would be long enough; None for a sleep that ends in time."""
        busy_s = _number(self.limits.busy_s)
        if root.kind is WaitKind.COMPUTE or root.computing:
            limit_s = busy_s if _all_loop(root, self.samples) else TURN_TIMES * busy_s
        elif self._wakes_in_time(root):
            return None
        else:
            limit_s = _number(self.limits.open_wait_s)
        return max(0.0, limit_s - self.no_progress_s(root))

    def no_progress_s(self, root: Wait) -> float:
        """Return the seconds since the run's last progress and since this rank last moved a byte or computed."""
        stirring = {Motion.MOVING} if _computes(root) else {Motion.MOVING, Motion.BURNING}
        times = (
            sample.at_s
            for sample in self.samples
            if sample.rank == root.rank and sample.motion in stirring and not sample.another_line
        )
        return self.snapshots[-1].at_s - max([self.last_progress_s, *times])

    def sleeps_again(self, root: Wait) -> bool:
        """Whether the rank slept on this line before, that sleep has ended, and it sleeps there again."""
        looks = (rank for look in self.snapshots for rank in look.ranks if rank.rank == root.rank)
        seen = [(leaf(rank), nap(rank)) for rank in looks]
        seen += [(sample.leaf, sample.wakes_at_s) for sample in self.samples if sample.rank == root.rank]
        now_s = self.snapshots[-1].at_s
        before = (line == root.leaf and end_s is not None and end_s < now_s for line, end_s in seen)
        return root.kind is WaitKind.SLEEP and any(before)

    def _wakes_in_time(self, root: Wait) -> bool:
        """Whether a sleep ends before the deadline. A sleep that follows another one on the same line is a loop."""
        if root.until_s is None:
            return False
        in_time = self.limits.deadline_s is None or root.until_s <= self.limits.deadline_s
        return in_time and not self.sleeps_again(root)


def computations(root: Wait, samples: Sequence[Sample]) -> tuple[Computation, ...]:
    """Return the samples in which the rank, or each process it waits for, computed since it last moved otherwise."""
    seen = _burning(root.rank, samples)
    if not root.computing:
        return (tuple(one for one in seen if not one.below),)
    below = [child for one in seen for child in one.below]
    return tuple(tuple(one for one in below if one.pid == child.pid) for child in root.computing)


def loop_lines(root: Wait, samples: Sequence[Sample]) -> set[tuple[str, int]]:
    """Return the innermost lines of the last samples that computed."""
    return {line for computation in computations(root, samples) for line in _last_lines(computation)}


def _last_lines(seen: Computation) -> set[tuple[str, int]]:
    known = [one.leaf for one in seen if one.leaf]
    return {(leaf.file, leaf.line) for leaf in known[-LOOP_SAMPLES:]}


def _computes(root: Wait) -> bool:
    return root.kind in _LOOPS or bool(root.computing)


def _burning(rank: int, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples in which the rank computed since it last moved in any other way."""
    own = [sample for sample in samples if sample.rank == rank]
    moves = (number for number, one in enumerate(own, start=1) if one.motion == Motion.MOVING and not one.another_line)
    moved = max(moves, default=0)
    return [one for one in own[moved:] if one.motion == Motion.BURNING]


def _all_loop(root: Wait, samples: Sequence[Sample]) -> bool:
    return all(_loops(computation) for computation in computations(root, samples))


def _loops(seen: Computation) -> bool:
    return len(seen) >= LOOP_SAMPLES and 1 <= len(_last_lines(seen)) <= LOOP_LINES


def _is_short_loop(seen: Computation) -> bool:
    """Whether every sample shows one function of the user, few of its lines, and few lines of its callees."""
    last = seen[-TURN_SAMPLES:]
    users = {one.user for one in last}
    functions = {(user.file, user.function) if user else None for user in users}
    leaves = {(one.leaf.file, one.leaf.line) if one.leaf else None for one in last}
    few = len(users) <= TURN_USER_LINES and len(leaves) <= TURN_LINES
    return len(last) == TURN_SAMPLES and len(functions) == 1 and not {None} & (functions | leaves) and few


def closed(root: Wait, limits: Limits) -> bool:
    """Return the wait, closed if its sleep, or that of the child it waits for, ends after the deadline."""
    late = root.until_s is not None and limits.deadline_s is not None and root.until_s > limits.deadline_s
    return late or root.closed


def _closed_kind(roots: Sequence[Wait]) -> HangKind:
    kinds = {root.child.deepest.kind if root.child else root.kind for root in roots}
    if WaitKind.STOPPED in kinds:
        return HangKind.STOPPED
    if any(root.kind is WaitKind.SLEEP and root.closed for root in roots):
        return HangKind.LIVELOCK
    late = any(root.until_s is not None for root in roots)
    return HangKind.STARVED if late or WaitKind.SLEEP in kinds else HangKind.DEADLOCK


def _closed_reason(graph: WaitFor, span_s: float) -> str:
    count = len(graph.waits)
    wait = "one rank waits" if count == 1 else f"{count} ranks wait"
    return f"{wait}, and nobody is left to end that; no progress, CPU time or I/O in two samples {span_s:.0f} s apart"


def _number(limit_s: float | None) -> float:
    assert limit_s is not None, "limits in force are numbers"
    return limit_s
