"""The waits of a probe: where its ranks are blocked, whether that was proven to hang before, and when to stop."""

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

# The good control of a search shows Q, the longest time without progress in a sound run of this program. All other runs
# must guess Q, and allow an open wait 300 s.
#   stall   3 Q, at least 2 s: when snapshots of the ranks start. A snapshot alone proves nothing.
#   early  10 Q, at least 10 s: when a wait that was proven in full before ends a probe. All runs allow an open wait ten
#          times Q; 10 s are five snapshots, and longer than the pauses of a machine that runs several probes.
#   proof  20 Q, at least 60 s, and never more than in other runs: twice as long as an early end, and as long as a
#          computation may stay on one line.
STALL_FACTOR, STALL_FLOOR_S = 3.0, 2.0
EARLY_FACTOR, EARLY_FLOOR_S = 10.0, 10.0
PROOF_FACTOR, PROOF_FLOOR_S = 20.0, 60.0


def stall_after_s(longest_quiet_s: float) -> float:
    return max(STALL_FLOOR_S, STALL_FACTOR * longest_quiet_s)


def early_after_s(longest_quiet_s: float) -> float:
    return max(EARLY_FLOOR_S, EARLY_FACTOR * longest_quiet_s)


def proof_after_s(longest_quiet_s: float) -> float:
    return min(OPEN_WAIT_FLOOR_S, max(PROOF_FLOOR_S, PROOF_FACTOR * longest_quiet_s))


@dataclass(frozen=True, kw_only=True)
class RankWait:
    """The wait of one rank, in a form that is equal in every launch."""

    rank: int
    kind: WaitKind
    stack: tuple[str, ...]  # "train.py:13 step", innermost first, up to the program's own outermost line


WaitSignature = tuple[RankWait, ...]  # one wait per rank, in order


@dataclass(frozen=True, kw_only=True)
class OpenWait:
    """The state of a probe whose ranks wait, while nothing proves yet that the wait never ends."""

    signature: WaitSignature | None  # None: not every rank is known to wait
    no_progress_s: float  # time without progress
    until_s: float | None  # this much time without progress proves the hang; None: no time does, because a sleep ends
    limit: str  # the limit that sets `until_s`


def open_wait(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    gone: Iterable[int] = (),
    ranks: int,
) -> OpenWait | None:
    """Return the open wait of a running probe, to compare it with waits that were proven to hang.

    None: there is no second snapshot yet, a rank makes progress, or every wait is proven to be endless.
    """
    pair = snapshot_pair(snapshots)
    if pair is None:
        return None
    graph = wait_graph_between(*pair, gone, backend)
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
    """Whether every rank is blocked as in a `known` hang, for much longer than a sound run ever made no progress.

    `longest_quiet_s`: the longest time without progress in the good control; None: not observed. A sleep whose end is
    known is never cut short.
    """
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
    """Whether the rank may be in a sound long computation, which only time distinguishes from an endless one."""
    return wait.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(wait.computing)


def _lines(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return the program's lines without the outer frames, in which a fork and torchrun differ."""
    program_depths = [number for number, frame in enumerate(frames, start=1) if _is_the_programs(frame)]
    return tuple(
        f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        for frame in frames[: max(program_depths, default=0) or None]
    )


def _is_the_programs(frame: Frame) -> bool:
    return not is_library(frame.file) and not frame.file.startswith("<") and "/fork_server/" not in frame.file


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The reason why the search still waits for a probe without progress, and until when."""

    no_progress_s: float  # time without progress so far
    until_s: float | None  # time without progress at which it ends; None: until the probe makes progress
    was_proven: bool  # this wait was proven to be a hang before
    limit: str  # the limit that a user can lower to end it sooner, if the hang has to be proven

    @property
    def left_s(self) -> float:
        return 0.0 if self.until_s is None else self.until_s - self.no_progress_s


def waiting_for(wait: OpenWait, proven_hangs: Collection[WaitSignature], longest_quiet_s: float | None) -> Waiting:
    """Return why the search still waits for the probe. Takes the arguments of `seen_before`."""
    if longest_quiet_s is None or wait.signature not in proven_hangs:
        return Waiting(no_progress_s=wait.no_progress_s, until_s=wait.until_s, was_proven=False, limit=wait.limit)
    return Waiting(
        no_progress_s=wait.no_progress_s, until_s=early_after_s(longest_quiet_s), was_proven=True, limit=wait.limit
    )


@dataclass(kw_only=True)
class EarlyStop:
    """The rule that ends one probe before its verdict, if its ranks wait as in a proven hang."""

    probe_number: int  # number of the probe
    ranks: int
    longest_gap_s: float | None  # the good control's longest time without progress; None: the probe runs to its verdict
    proven_hangs: Collection[WaitSignature]
    report_wait: Callable[[int, Waiting | None], None]  # called at each snapshot
    signature: WaitSignature | None = None  # from the last snapshot
    stopped_early: bool = False

    def __call__(self, snapshots: Sequence[Snapshot], samples: Sequence[Sample], **facts: Any) -> bool:
        now = open_wait(snapshots, samples, ranks=self.ranks, **facts)
        self.signature = now.signature if now else None
        self.stopped_early = now is not None and seen_before(now, self.proven_hangs, self.longest_gap_s)
        self.report_wait(self.probe_number, waiting_for(now, self.proven_hangs, self.longest_gap_s) if now else None)
        return self.stopped_early
