"""From suspicion to proof: when a quiet run may be called HANG, and of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.judged.motion import Motion
from harness.core.judged.waitfor import Wait, WaitFor, WaitKind, wait_for
from harness.core.observed.evidence import Sample, Snapshot
from harness.core.plan import Limits
from harness.core.report import HangKind

SETTLE_S = 1.5  # two looks closer than this show the same thing twice
LOOP_SAMPLES = 20
LOOP_LINES = 2


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Why this run moves no more."""

    kind: HangKind
    reason: str
    graph: WaitFor


def prove(
    snapshots: Sequence[Snapshot],
    samples: Sequence[Sample],
    *,
    last_progress_s: float,
    limits: Limits,
    gone: Iterable[int] = (),
) -> Proof | None:
    """The proof that this run hangs, or None while it may still move.

    `snapshots` are of one episode of suspicion, oldest first; `limits` are those in force, every one a number.
    """
    earlier = [one for one in snapshots[:-1] if snapshots[-1].at_s - one.at_s >= SETTLE_S]
    if not earlier:
        return None
    before, after = earlier[-1], snapshots[-1]
    graph = wait_for(before, after, gone)
    if graph.moved or not graph.roots:
        return None
    quiet_s = after.at_s - last_progress_s
    span_s = after.at_s - before.at_s
    open_roots = [root for root in graph.roots if not _closed(root, limits)]
    if not open_roots:
        return Proof(kind=_closed_kind(graph.roots), reason=_closed_reason(graph, span_s), graph=graph)
    if not all(_endless(root, samples, limits, quiet_s) for root in open_roots):
        return None
    looping = next((root for root in open_roots if root.kind is WaitKind.COMPUTE), None)
    if looping is None:
        return Proof(kind=HangKind.STARVED, reason=f"an open wait of {quiet_s:.0f} s", graph=graph)
    reason = f"the same {_lines(looping.rank, samples)} in {LOOP_SAMPLES} samples over {quiet_s:.0f} s"
    return Proof(kind=HangKind.LIVELOCK, reason=reason, graph=graph)


def loop_lines(rank: int, samples: Sequence[Sample]) -> set[tuple[str, int]]:
    """The innermost lines of the rank's last samples."""
    burning = [one for one in samples if one.rank == rank and one.motion == Motion.BURNING and one.leaf]
    return {(one.leaf.file, one.leaf.line) for one in burning[-LOOP_SAMPLES:] if one.leaf}


def _endless(root: Wait, samples: Sequence[Sample], limits: Limits, quiet_s: float) -> bool:
    """An open root that has shown for long enough that it does not end."""
    if root.kind is WaitKind.COMPUTE:
        return quiet_s >= _number(limits.busy_s) and _loops(root.rank, samples)
    return quiet_s >= _number(limits.open_wait_s) and not _wakes_in_time(root, limits)


def _loops(rank: int, samples: Sequence[Sample]) -> bool:
    burning = [one for one in samples if one.rank == rank and one.motion == Motion.BURNING]
    return len(burning) >= LOOP_SAMPLES and 1 <= len(loop_lines(rank, samples)) <= LOOP_LINES


def _lines(rank: int, samples: Sequence[Sample]) -> str:
    count = len(loop_lines(rank, samples))
    return "line" if count == 1 else f"{count} lines"


def _closed(root: Wait, limits: Limits) -> bool:
    if root.kind is WaitKind.SLEEP and root.until_s is not None and limits.deadline_s is not None:
        return root.until_s > limits.deadline_s
    return root.closed


def _wakes_in_time(root: Wait, limits: Limits) -> bool:
    if root.kind is not WaitKind.SLEEP or root.until_s is None:
        return False
    return limits.deadline_s is None or root.until_s <= limits.deadline_s


def _closed_kind(roots: Sequence[Wait]) -> HangKind:
    kinds = {root.kind for root in roots}
    if WaitKind.STOPPED in kinds:
        return HangKind.STOPPED
    return HangKind.STARVED if WaitKind.SLEEP in kinds else HangKind.DEADLOCK


def _closed_reason(graph: WaitFor, span_s: float) -> str:
    count = len(graph.waits)
    ranks = "one rank" if count == 1 else f"{count} ranks"
    return f"a closed wait of {ranks}; no mark, CPU or bytes in 2 samples {span_s:.0f} s apart"


def _number(limit_s: float | None) -> float:
    assert limit_s is not None, "limits in force are numbers"
    return limit_s
