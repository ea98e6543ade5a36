"""Waits: where the ranks of a probe stand, whether a search has seen that before, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.plan import Limits
from nsa_harness.core.search.effort import Stage
from nsa_harness.core.search.question import CONTROLS, PROOFS, CountsAs, Purpose, Round
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.core.verdict.limits import OPEN_WAIT_FLOOR_S
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import StallEpisode, closed, two_looks
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
    """What one rank stands in, as it would be seen again in another launch."""

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
    """Of so many ranks, with the arguments of `prove`; None before the second look, and while one of them moves."""
    looks = two_looks(snapshots)
    if looks is None:
        return None
    graph = wait_for(*looks, gone, backend)
    open_roots = [root for root in graph.roots if not closed(root, limits)]
    if graph.moved or not open_roots:
        return None
    episode = StallEpisode(snapshots=snapshots, samples=samples, limits=limits, last_progress_s=last_progress_s)
    quiet_s = min(episode.quiet_s(root) for root in open_roots)
    left = [episode.left_s(root) for root in open_roots]
    known_s = [one for one in left if one is not None]
    return Standing(
        signature=_signature(graph.waits, looks[1].ranks, ranks),
        quiet_s=quiet_s,
        until_s=quiet_s + max(known_s) if len(known_s) == len(left) else None,
        limit="busy_s" if any(_computes(root) for root in open_roots) else "open_wait_s",
    )


def seen_before(now: Standing, known: Collection[WaitSignature], longest_quiet_s: float | None) -> bool:
    """Every rank stands as in a probe that was proven to hang, and for longer than a sound run ever did nothing.

    `longest_quiet_s`: of the good control; None: nobody saw it. A sleep whose end is known is waited for.
    """
    if longest_quiet_s is None or now.until_s is None or now.signature not in known:
        return False
    return now.quiet_s >= early_after_s(longest_quiet_s)


def _signature(waits: Sequence[Wait], seen: Sequence[RankSnapshot], ranks: int) -> WaitSignature | None:
    stacks = {one.rank: stack.frames for one in seen if (stack := rank_stack(one)) and stack.frames}
    standing_still = [
        one for one in waits if one.rank in stacks and not _computes(one) and one.kind is not WaitKind.GONE
    ]
    if {one.rank for one in standing_still} != set(range(ranks)):
        return None
    ordered = sorted(standing_still, key=lambda one: one.rank)
    return tuple(RankWait(rank=one.rank, kind=one.kind, stack=_lines(stacks[one.rank])) for one in ordered)


def _computes(wait: Wait) -> bool:
    """It may be a long computation that is right: nothing tells it from one that never ends but its time."""
    return wait.kind in (WaitKind.COMPUTE, WaitKind.COMPILE) or bool(wait.computing)


def _lines(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Not what lies around the program, in which a fork and torchrun differ."""
    own = [number for number, frame in enumerate(frames, start=1) if _is_the_programs(frame)]
    return tuple(
        f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
        for frame in frames[: max(own, default=0) or None]
    )


def _is_the_programs(frame: Frame) -> bool:
    return not is_library(frame.file) and not frame.file.startswith("<") and "/fork_server/" not in frame.file


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Why a probe is waited for that does nothing, and until when, for whoever looks on."""

    quiet_s: float
    until_s: float | None  # of quiet; None: until it moves
    seen: bool  # this wait was proven to be a hang before
    limit: str  # which limit ends it sooner, where it has to be proven

    @property
    def left_s(self) -> float:
        return 0.0 if self.until_s is None else self.until_s - self.quiet_s


def waiting_for(now: Standing, known: Collection[WaitSignature], longest_quiet_s: float | None) -> Waiting:
    """With the arguments of `seen_before`."""
    if longest_quiet_s is None or now.signature not in known:
        return Waiting(quiet_s=now.quiet_s, until_s=now.until_s, seen=False, limit=now.limit)
    return Waiting(quiet_s=now.quiet_s, until_s=early_after_s(longest_quiet_s), seen=True, limit=now.limit)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Mean seconds of a probe, by how it ends."""

    good_s: float
    bad_s: float
    proof_s: float  # of a bad one that is waited for in full


def costs(probes: Sequence[ProbeReport], early_s: float | None) -> Costs | None:
    """None until both ends were seen. `early_s`: after how long a quiet one ends early; None: none does yet."""
    good = [one.wall_s for one in probes if one.counts_as is CountsAs.GOOD]
    early = [one.wall_s for one in probes if one.early]
    whole = [one.wall_s for one in probes if one.counts_as is CountsAs.BAD and not one.early]
    if not good or not whole:
        return None
    good_s, proof_s = _mean(good), _mean(whole)
    expected_s = proof_s if early_s is None else min(proof_s, good_s + early_s)
    return Costs(good_s=good_s, bad_s=_mean(early) if early else expected_s, proof_s=proof_s)


_RECHECKS = frozenset({Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
_SHAPE = frozenset({Purpose.ALONE, Purpose.ENDS_ONLY, Purpose.WITHOUT_MIDDLE, Purpose.ELSEWHERE, Purpose.REDUCE})
# Stages of `worst_case` in their order: for what they ask, how likely each of their probes is needed, how many are bad.
_STAGES: tuple[tuple[frozenset[str], frozenset[Purpose], float, float], ...] = (
    (frozenset({"controls"}), CONTROLS, 1.0, 0.5),
    (frozenset({"each value"}), frozenset({Purpose.EACH}), 1.0, 0.5),
    (frozenset({"gallop"}), frozenset({Purpose.GALLOP}), 0.5, 0.2),
    (frozenset({"edge", "right edge"}), frozenset({Purpose.RIGHT_EDGE}), 1.0, 0.5),
    (frozenset({"left edge"}), frozenset({Purpose.LEFT_EDGE}), 0.5, 0.5),  # a single culprit has none
    (frozenset({"shape"}), _SHAPE, 0.5, 0.5),
    (frozenset({"proof"}), PROOFS - _RECHECKS, 0.5, 0.0),  # beside the proof that it fails, which is never left out
    (frozenset({"controls again"}), _RECHECKS, 1.0, 0.5),
)


def time_left_s(
    stages: Sequence[Stage], probes: Sequence[ProbeReport], running: Round, each: Costs, repeat: int
) -> float:
    """Of the whole rest of the search: what is still to come, how likely that is, and what it takes.

    `repeat`: how often the answer is proven to fail, in full. The stages that only some searches come to are left out.
    """
    at = next((number for number, row in enumerate(_STAGES) if running.purpose in row[1]), 0)
    left_s = 0.0
    for number, (names, purposes, chance, bad) in enumerate(_STAGES):
        most = sum(stage.probes for stage in stages if stage.name in names and not stage.only_if)
        if number < at or most == 0:
            continue
        made = sum(one.purpose in purposes for one in probes)
        expected = max(chance * most - made, 0.0)
        if number == at:
            expected = max(expected, len(running.subsets), running.left + len(running.subsets) if running.left else 0)
        left_s += expected * (bad * each.bad_s + (1 - bad) * each.good_s)
    proven = sum(one.purpose is Purpose.PROOF_BAD for one in probes)
    return left_s + max(repeat - proven, 0) * each.proof_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
