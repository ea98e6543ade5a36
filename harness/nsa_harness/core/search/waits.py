"""Waits of a probe: where its ranks are blocked, whether the search has seen that before, and how long it waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.limits import OPEN_WAIT_FLOOR_S
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import StallEpisode, closed, snapshot_pair
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_for

# What a search learns from its good control, which shows how long this program does nothing while all is well (Q). Any
# other run has to guess that, and grants an open wait 300 s.
#   stall   3 Q, at least 2 s: from then on the ranks are looked at. A look proves nothing alone.
#   early  10 Q, at least 10 s: a wait that was proven once in full. 10 times is what any run grants an open wait; 10 s
#          are five looks, and more than the pauses of a machine that has several probes beside each other.
#   proof  20 Q, at least 60 s, and never more than any other run: twice as patient as an early end, and as long as a
#          computation may stand on one line.
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
    """What one rank is blocked in, as it would be seen again in another launch."""

    rank: int
    kind: WaitKind
    stack: tuple[str, ...]  # "train.py:13 step", innermost first, up to the program's own outermost line


WaitSignature = tuple[RankWait, ...]  # of every rank, in order


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A probe in an open wait: nothing proves that it never ends."""

    signature: WaitSignature | None  # None: not every rank is known to wait
    quiet_s: float
    until_s: float | None  # so long a quiet proves the hang; None: none does, as a sleep ends in time
    limit: str  # which limit that is


def standing(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    backend: str,
    gone: Iterable[int] = (),
    ranks: int,
) -> Standing | None:
    """Return the open wait of a probe; None: there is no second snapshot yet, or a rank makes progress."""
    looks = snapshot_pair(snapshots)
    if looks is None:
        return None
    graph = wait_for(*looks, gone, backend)
    open_roots = [root for root in graph.roots if not closed(root, limits)]
    if graph.moved or not open_roots:
        return None
    episode = StallEpisode(snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s)
    quiet_s = min(episode.no_progress_s(root) for root in open_roots)
    left = [episode.left_s(root) for root in open_roots]
    known_s = [one for one in left if one is not None]
    return Standing(
        signature=_signature(graph.waits, looks[1].ranks, ranks),
        quiet_s=quiet_s,
        until_s=quiet_s + max(known_s) if len(known_s) == len(left) else None,
        limit="busy_s" if any(_computes(root) for root in open_roots) else "open_wait_s",
    )


def seen_before(now: Standing, known: Collection[WaitSignature], longest_quiet_s: float | None) -> bool:
    """Whether every rank is blocked as in a proven hang, for longer than a sound run ever made no progress.

    `longest_quiet_s`: of the good control; None: nobody saw it. A sleep whose end is known is waited for.
    """
    if longest_quiet_s is None or now.until_s is None or now.signature not in known:
        return False
    return now.quiet_s >= early_after_s(longest_quiet_s)


def _signature(waits: Sequence[Wait], seen: Sequence[RankSnapshot], ranks: int) -> WaitSignature | None:
    stacks = {one.rank: stack.frames for one in seen if (stack := rank_stack(one)) and stack.frames}
    standing_still = [
        wait for wait in waits if wait.rank in stacks and not _computes(wait) and wait.kind is not WaitKind.GONE
    ]
    if {one.rank for one in standing_still} != set(range(ranks)):
        return None
    ordered = sorted(standing_still, key=lambda one: one.rank)
    return tuple(RankWait(rank=one.rank, kind=one.kind, stack=_lines(stacks[one.rank])) for one in ordered)


def _computes(wait: Wait) -> bool:
    """Whether the rank may be in a long computation that is right: only its time tells it from an endless one."""
    return wait.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(wait.computing)


def _lines(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return the lines of the program without what is around it, in which a fork and torchrun differ."""
    own = [number for number, frame in enumerate(frames, start=1) if _is_the_programs(frame)]
    return tuple(
        f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        for frame in frames[: max(own, default=0) or None]
    )


def _is_the_programs(frame: Frame) -> bool:
    return not is_library(frame.file) and not frame.file.startswith("<") and "/fork_server/" not in frame.file


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The reason why a probe without progress is waited for, and until when."""

    quiet_s: float
    until_s: float | None  # of quiet; None: until it moves
    seen: bool  # this wait was proven to be a hang before
    limit: str  # which limit ends it sooner, where it has to be proven

    @property
    def left_s(self) -> float:
        return 0.0 if self.until_s is None else self.until_s - self.quiet_s


def waiting_for(now: Standing, known: Collection[WaitSignature], longest_quiet_s: float | None) -> Waiting:
    """Return why the probe is waited for. Takes the arguments of `seen_before`."""
    if longest_quiet_s is None or now.signature not in known:
        return Waiting(quiet_s=now.quiet_s, until_s=now.until_s, seen=False, limit=now.limit)
    return Waiting(quiet_s=now.quiet_s, until_s=early_after_s(longest_quiet_s), seen=True, limit=now.limit)


@dataclass(kw_only=True)
class EarlyStop:
    """The rule that ends one probe before its verdict."""

    n: int
    ranks: int
    quiet_s: float | None  # the longest of the good control; None: it is waited for until it is judged
    known: Collection[WaitSignature]
    tell: Callable[[int, Waiting | None], None]
    signature: WaitSignature | None = None  # of the last look
    early: bool = False

    def __call__(self, snapshots: Sequence[Snapshot], samples: Sequence[Sample], **facts: Any) -> bool:
        now = standing(snapshots, samples, ranks=self.ranks, **facts)
        self.signature = now.signature if now else None
        self.early = now is not None and seen_before(now, self.known, self.quiet_s)
        self.tell(self.n, waiting_for(now, self.known, self.quiet_s) if now else None)
        return self.early
