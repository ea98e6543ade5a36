"""Early stopping of test runs whose ranks hang in the same way as in an earlier test run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.limits import OPEN_WAIT_FLOOR_S
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import StallEpisode, is_closed, snapshot_pair
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_graph_between

# The good control of a search measures Q, the longest time without progress in a healthy run of this program. Runs
# outside a bisection do not know Q, so they allow a wait of unknown length 300 s.
#   stall   3 Q, at least 2 s: after this time snapshots of the ranks are taken. A snapshot alone proves nothing.
#   early  10 Q, at least 10 s: after this time a probe is stopped if its wait is a proven hang. 10 s are five
#          snapshots, and longer than the pauses of a machine that runs several probes.
#   proof  20 Q, at least 60 s and at most 300 s: after this time a wait counts as a hang. It is twice as long as for an
#          early stop, and as long as a computation may stay on one line.
STALL_FACTOR, STALL_FLOOR_S = 3.0, 2.0
EARLY_FACTOR, EARLY_FLOOR_S = 10.0, 10.0
PROOF_FACTOR, PROOF_FLOOR_S = 20.0, 60.0


def stall_after_s(longest_quiet_s: float) -> float:
    """Return the seconds without progress after which snapshots are taken, given the longest of a healthy run."""
    return max(STALL_FLOOR_S, STALL_FACTOR * longest_quiet_s)


def early_after_s(longest_quiet_s: float) -> float:
    """Return the seconds without progress after which a hang seen before is stopped, given a healthy run's longest."""
    return max(EARLY_FLOOR_S, EARLY_FACTOR * longest_quiet_s)


def proof_after_s(longest_quiet_s: float) -> float:
    """Return the seconds without progress after which a wait counts as a hang, given a healthy run's longest."""
    return min(OPEN_WAIT_FLOOR_S, max(PROOF_FLOOR_S, PROOF_FACTOR * longest_quiet_s))


@dataclass(frozen=True, kw_only=True)
class RankWait:
    """A description of what one rank waits for, which can be compared between launches."""

    rank: int
    kind: WaitKind
    stack: tuple[str, ...]  # "train.py:13 step", innermost frame first, up to the outermost frame of the program


WaitSignature = tuple[RankWait, ...]  # one wait per rank, in order


@dataclass(frozen=True, kw_only=True)
class OpenWait:
    """A state in which the ranks of a test run wait, but which is not yet proven to be a hang."""

    signature: WaitSignature | None  # None: not every rank is known to wait
    no_progress_s: float  # time without progress so far
    # After this time without progress the hang is proven. None: never, because a sleep ends on its own.
    until_s: float | None
    limit: str  # the name of the limit that sets `until_s`


def open_wait(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    exited_ranks: Iterable[int] = (),
    ranks: int,
) -> OpenWait | None:
    """Return what the ranks of a running test run wait for, or None if they make progress."""
    pair = snapshot_pair(snapshots)
    if pair is None:
        return None
    graph = wait_graph_between(*pair, exited_ranks, backend)
    open_roots = [root for root in graph.roots if not is_closed(root, limits)]
    if graph.has_progress or not open_roots:
        return None
    episode = StallEpisode(snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s)
    quiet_s = min(episode.no_progress_s(root) for root in open_roots)
    left_of_roots = [episode.remaining_s(root) for root in open_roots]
    finite_left_s = [left_s for left_s in left_of_roots if left_s is not None]
    return OpenWait(
        signature=_signature(graph.waits, pair[1].ranks, ranks),
        no_progress_s=quiet_s,
        until_s=quiet_s + max(finite_left_s) if len(finite_left_s) == len(left_of_roots) else None,
        limit="busy_s" if any(_computes(root) for root in open_roots) else "open_wait_s",
    )


def seen_before(wait: OpenWait, proven_hangs: Collection[WaitSignature], longest_quiet_s: float | None) -> bool:
    """Return whether the ranks have long been blocked in the same way as in one of `proven_hangs`."""
    if longest_quiet_s is None or wait.until_s is None or wait.signature not in proven_hangs:
        return False
    return wait.no_progress_s >= early_after_s(longest_quiet_s)


def _signature(waits: Sequence[Wait], rank_snapshots: Sequence[RankSnapshot], ranks: int) -> WaitSignature | None:
    stacks = {rank.rank: stack.frames for rank in rank_snapshots if (stack := rank_stack(rank)) and stack.frames}
    blocked_waits = [
        wait for wait in waits if wait.rank in stacks and not _computes(wait) and wait.kind is not WaitKind.GONE
    ]
    if {wait.rank for wait in blocked_waits} != set(range(ranks)):
        return None
    waits_by_rank = sorted(blocked_waits, key=lambda wait: wait.rank)
    return tuple(RankWait(rank=wait.rank, kind=wait.kind, stack=_lines(stacks[wait.rank])) for wait in waits_by_rank)


def _computes(wait: Wait) -> bool:
    return wait.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(wait.computing)


def _lines(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return the lines of the program in a stack as strings, such as "train.py:13 step"."""
    # The frames outside the program depend on the launcher.
    program_depths = [number for number, frame in enumerate(frames, start=1) if _is_the_programs(frame)]
    return tuple(
        f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        for frame in frames[: max(program_depths, default=0) or None]
    )


def _is_the_programs(frame: Frame) -> bool:
    return not is_library(frame.file) and not frame.file.startswith("<")


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The wait of a bisection for a test run that makes no progress, with its reason and its remaining time."""

    no_progress_s: float  # time without progress so far
    until_s: float | None  # the probe ends after this time without progress; None: only when it makes progress again
    was_proven: bool  # an earlier probe has proven that this wait is a hang
    limit: str  # the limit that a user can lower to shorten the wait, if the hang must be proven

    @property
    def left_s(self) -> float:
        """The time in seconds until the wait ends, or 0 if it is unknown."""
        return 0.0 if self.until_s is None else self.until_s - self.no_progress_s


def waiting_for(wait: OpenWait, proven_hangs: Collection[WaitSignature], longest_quiet_s: float | None) -> Waiting:
    """Return the reason why a bisection still waits for a test run without progress, and the time left."""
    if longest_quiet_s is None or wait.signature not in proven_hangs:
        return Waiting(no_progress_s=wait.no_progress_s, until_s=wait.until_s, was_proven=False, limit=wait.limit)
    return Waiting(
        no_progress_s=wait.no_progress_s, until_s=early_after_s(longest_quiet_s), was_proven=True, limit=wait.limit
    )


@dataclass(kw_only=True)
class EarlyStop:
    """A callback at each snapshot that stops a run whose ranks wait as in a hang that was proven before."""

    probe_number: int
    ranks: int  # number of ranks
    longest_gap_s: float | None  # longest time without progress in the good control; None: never stop early
    proven_hangs: Collection[WaitSignature]
    report_wait: Callable[[int, Waiting | None], None]  # called with the number of the probe at each snapshot
    signature: WaitSignature | None = None  # the wait in the latest snapshot
    stopped_early: bool = False

    def __call__(self, snapshots: Sequence[Snapshot], samples: Sequence[Sample], **facts: Any) -> bool:
        now = open_wait(snapshots, samples, ranks=self.ranks, **facts)
        self.signature = now.signature if now else None
        self.stopped_early = now is not None and seen_before(now, self.proven_hangs, self.longest_gap_s)
        self.report_wait(self.probe_number, waiting_for(now, self.proven_hangs, self.longest_gap_s) if now else None)
        return self.stopped_early
