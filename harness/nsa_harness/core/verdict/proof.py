"""Decide whether a run without progress is proven to hang, and determine the kind of hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nsa_harness.core.evidence.evidence import ChildSample, Sample, Snapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import HangKind
from nsa_harness.core.verdict.motion import Motion, latest_end_s, leaf
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import WaitGraph, wait_graph_between

SETTLE_S = 1.5  # snapshots must be this far apart to show whether ranks make progress
# A computation is an endless loop if this many samples show at most this many lines.
LOOP_SAMPLES = 20
LOOP_LINES = 2
# A loop with a long body, or one that calls small functions, shows more lines. It needs more samples and more time.
LONG_LOOP_SAMPLES = 60
LONG_LOOP_LINES = 16
LONG_LOOP_USER_LINES = 8
LONG_LOOP_FACTOR = 2
POLLED = frozenset({WaitKind.SLEEP, WaitKind.LOCK, WaitKind.IO})
_LOOPS = frozenset({WaitKind.COMPUTE, WaitKind.COMPILE})
Computation = Sequence[Sample] | Sequence[ChildSample]  # samples of one process, oldest first


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A proof that a run cannot make any more progress, with the kind of hang and the reason."""

    kind: HangKind | None  # None if the files of a post-mortem do not show what blocked the ranks
    reason: str  # a sentence
    graph: WaitGraph
    is_closed: bool = False  # nothing can end the waits; otherwise they have only lasted too long


def prove(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    exited_ranks: Iterable[int] = (),
    attended: bool = False,
) -> Proof | None:
    """Return a proof that the run hangs, or None if it could still make progress.

    `snapshots` and `samples` were taken since the run stopped making progress, oldest first. Every value of `limits`
    must be set. `backend` decides whether a rank may keep a core busy while it waits for a device. `attended`: a person
    may be using a debugger in this run, so a wait at the prompt of a debugger proves nothing, however long it lasts.
    """
    pair = snapshot_pair(snapshots)
    if pair is None:
        return None
    before, after = pair
    graph = wait_graph_between(before, after, exited_ranks, backend)
    if graph.has_progress or not graph.roots:
        return None
    open_roots = [root for root in graph.roots if not is_closed(root, limits)]
    if not open_roots:
        reason = _closed_reason(graph, after.at_s - before.at_s)
        return Proof(kind=_closed_kind(graph.roots), reason=reason, graph=graph, is_closed=True)
    episode = StallEpisode(
        snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s, is_attended=attended
    )
    if not all(episode.is_endless(root) for root in open_roots):
        return None
    no_progress_s = min(episode.no_progress_s(root) for root in open_roots)
    looping_root = next((root for root in open_roots if _computes(root)), None)
    kind = HangKind.STOPPED if WaitKind.STOPPED in _deepest_kinds(open_roots) else HangKind.STARVED
    reason = f"an open wait of {no_progress_s:.0f} s"
    if looping_root is not None:
        lines = len(loop_lines(looping_root, samples))
        count = LOOP_SAMPLES if _all_loop(looping_root, samples) else LONG_LOOP_SAMPLES
        kind = HangKind.LIVELOCK
        reason = f"the same {'line' if lines == 1 else f'{lines} lines'} in {count} samples over {no_progress_s:.0f} s"
    elif all(episode.is_polling(root) for root in open_roots):
        kind, reason = HangKind.LIVELOCK, f"a polling loop on one line, for {no_progress_s:.0f} s"
    return Proof(kind=kind, reason=reason, graph=graph)


def snapshot_pair(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, Snapshot] | None:
    """Return the last snapshot after one at least SETTLE_S earlier, as (earlier, last), or None."""
    earlier = [snapshot for snapshot in snapshots[:-1] if snapshots[-1].at_s - snapshot.at_s >= SETTLE_S]
    return (earlier[-1], snapshots[-1]) if earlier else None


@dataclass(frozen=True, kw_only=True)
class StallEpisode:
    """The observations made since a run stopped making progress."""

    snapshots: Sequence[Snapshot]  # oldest first
    samples: Sequence[Sample]  # oldest first
    limits: Limits  # with every value set
    last_progress_s: float
    is_attended: bool = False  # a person may be using a debugger in this run

    @cached_property
    def _samples_of(self) -> dict[int, list[Sample]]:
        samples: dict[int, list[Sample]] = {}
        for sample in self.samples:
            samples.setdefault(sample.rank, []).append(sample)
        return samples

    def _own(self, root: Wait) -> Sequence[Sample]:
        """Return the samples of the waiting rank, oldest first."""
        return self._samples_of.get(root.rank, ())

    def is_endless(self, root: Wait) -> bool:
        """Return whether a rank's wait or computation has lasted so long that it is treated as endless."""
        if self._may_be_answered(root):
            return False
        no_progress_s = self.no_progress_s(root)
        if root.kind is WaitKind.COMPUTE or root.computing:
            busy_s = _number(self.limits.busy_s)
            if _all_loop(root, self._own(root)):
                return no_progress_s >= busy_s
            is_long_loop = all(
                _loops(computation) or _is_long_loop(computation) for computation in computations(root, self._own(root))
            )
            return no_progress_s >= LONG_LOOP_FACTOR * busy_s and is_long_loop
        if no_progress_s < _number(self.limits.open_wait_s):
            return False
        if root.kind is WaitKind.COMPILE:
            return _all_loop(root, self._own(root))
        return not self._wakes_in_time(root)

    def remaining_s(self, root: Wait) -> float | None:
        """Return the seconds until a rank's wait is treated as endless, or None if it never will be."""
        busy_s = _number(self.limits.busy_s)
        if root.kind is WaitKind.COMPUTE or root.computing:
            limit_s = busy_s if _all_loop(root, self._own(root)) else LONG_LOOP_FACTOR * busy_s
        elif self._wakes_in_time(root) or self._may_be_answered(root):
            return None
        else:
            limit_s = _number(self.limits.open_wait_s)
        return max(0.0, limit_s - self.no_progress_s(root))

    def no_progress_s(self, root: Wait) -> float:
        """Return the number of seconds during which neither the run nor the waiting rank has made progress."""
        motions = {Motion.MOVING} if _computes(root) else {Motion.MOVING, Motion.BURNING}
        times = (sample.at_s for sample in self._own(root) if sample.motion in motions and not sample.only_line_changed)
        return self.snapshots[-1].at_s - max([self.last_progress_s, *times])

    def is_polling(self, root: Wait) -> bool:
        """Return whether the rank polls: one sleep or timed wait after the other on the same line."""
        own = ((snapshot, snapshot.of_rank[root.rank]) for snapshot in self.snapshots if root.rank in snapshot.of_rank)
        waits = [(leaf(rank), latest_end_s(rank, snapshot.at_s)) for snapshot, rank in own]
        is_timed = bool(waits) and waits[-1][1] is not None
        waits += [(sample.leaf, sample.wakes_at_s) for sample in self._own(root)]
        now_s = self.snapshots[-1].at_s
        has_ended = (line == root.leaf and end_s is not None and end_s < now_s for line, end_s in waits)
        return root.kind in POLLED and is_timed and any(has_ended)

    def _may_be_answered(self, root: Wait) -> bool:
        return self.is_attended and bool(root.debugger)

    def _wakes_in_time(self, root: Wait) -> bool:
        """Return whether the rank's sleep, unless a poll's, ends before the deadline."""
        if root.until_s is None:
            return False
        in_time = self.limits.deadline_s is None or root.until_s <= self.limits.deadline_s
        return in_time and not (root.kind is WaitKind.SLEEP and self.is_polling(root))


def computations(root: Wait, samples: Sequence[Sample]) -> tuple[Computation, ...]:
    """Return the recent samples of each process that is computing for a rank."""
    burning = _burning(root.rank, samples)
    if not root.computing:
        return (tuple(sample for sample in burning if not sample.child_samples),)
    child_samples = [child for sample in burning for child in sample.child_samples]
    return tuple(tuple(sample for sample in child_samples if sample.pid == child.pid) for child in root.computing)


def loop_lines(root: Wait, samples: Sequence[Sample]) -> set[tuple[str, int]]:
    """Return the innermost lines, as (file, line), on which the rank was recently computing."""
    return {line for computation in computations(root, samples) for line in _last_lines(computation)}


def _last_lines(computation: Computation) -> set[tuple[str, int]]:
    leaves = [sample.leaf for sample in computation if sample.leaf]
    return {(leaf.file, leaf.line) for leaf in leaves[-LOOP_SAMPLES:]}


def _computes(root: Wait) -> bool:
    return root.kind in _LOOPS or bool(root.computing)


def _burning(rank: int, samples: Sequence[Sample]) -> list[Sample]:
    """Return a rank's latest samples, as far back as it only computed."""
    own = [sample for sample in samples if sample.rank == rank]
    moves = (
        number
        for number, sample in enumerate(own, start=1)
        if sample.motion == Motion.MOVING and not sample.only_line_changed
    )
    since = max(moves, default=0)
    return [sample for sample in own[since:] if sample.motion == Motion.BURNING]


def _all_loop(root: Wait, samples: Sequence[Sample]) -> bool:
    return all(_loops(computation) for computation in computations(root, samples))


def _loops(computation: Computation) -> bool:
    """Return whether the last samples of a computation show an endless loop over one or two lines."""
    return len(computation) >= LOOP_SAMPLES and 1 <= len(_last_lines(computation)) <= LOOP_LINES


def _is_long_loop(computation: Computation) -> bool:
    """Return whether the latest samples all show the same user function and only a few of its lines."""
    last = computation[-LONG_LOOP_SAMPLES:]
    users = {sample.user_frame for sample in last}
    functions = {(user.file, user.function) if user else None for user in users}
    leaves = {(sample.leaf.file, sample.leaf.line) if sample.leaf else None for sample in last}
    few = len(users) <= LONG_LOOP_USER_LINES and len(leaves) <= LONG_LOOP_LINES
    return len(last) == LONG_LOOP_SAMPLES and len(functions) == 1 and not {None} & (functions | leaves) and few


def is_closed(root: Wait, limits: Limits) -> bool:
    """Return whether nothing can end the wait of a rank before the deadline."""
    late = root.until_s is not None and limits.deadline_s is not None and root.until_s > limits.deadline_s
    return late or root.is_closed


def _closed_kind(roots: Sequence[Wait]) -> HangKind:
    """Return the kind of a hang in which no wait can end, which is STARVED if a sleep lasts past the deadline."""
    kinds = _deepest_kinds(roots)
    if WaitKind.STOPPED in kinds:
        return HangKind.STOPPED
    if any(root.kind is WaitKind.SLEEP and root.is_closed for root in roots):
        return HangKind.LIVELOCK
    late = any(root.until_s is not None for root in roots)
    return HangKind.STARVED if late or WaitKind.SLEEP in kinds else HangKind.DEADLOCK


def _deepest_kinds(roots: Sequence[Wait]) -> set[WaitKind]:
    return {root.child.deepest.kind if root.child else root.kind for root in roots}


def _closed_reason(graph: WaitGraph, span_s: float) -> str:
    count = len(graph.waits)
    wait = "one rank waits" if count == 1 else f"{count} ranks wait"
    return f"{wait}, and nobody is left to end that; no progress, CPU time or I/O in two samples {span_s:.0f} s apart"


def _number(limit_s: float | None) -> float:
    assert limit_s is not None, "limits in force are numbers"
    return limit_s
