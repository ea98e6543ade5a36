"""What one look says of each rank, in short: whether it moved since the look before, and on which line it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.core.judged.motion import only_another_line, rank_stack
from harness.core.judged.wait import Wait, WaitKind
from harness.core.judged.waitfor import wait_for
from harness.core.observed.evidence import RankSnapshot, Sample, Snapshot
from harness.core.observed.stacks import user_frame


def sampled(before: Snapshot | None, after: Snapshot, gone: Iterable[int], backend: str) -> Iterator[Sample]:
    """One sample a rank of `after`."""
    waits = {wait.rank: wait for wait in wait_for(before, after, gone, backend).waits} if before else {}
    earlier = {rank.rank: rank for rank in before.ranks} if before else {}
    elapsed_s = max(after.at_s - before.at_s, 1e-3) if before else 0.0
    for rank in after.ranks:
        yield _sample(waits.get(rank.rank), earlier.get(rank.rank), rank, after.at_s, elapsed_s)


def _sample(
    wait: Wait | None, earlier: RankSnapshot | None, rank: RankSnapshot, at_s: float, elapsed_s: float
) -> Sample:
    stack = rank_stack(rank)
    frames = stack.frames if stack else ()
    moves = wait is not None and wait.kind is WaitKind.NOTHING
    return Sample(
        rank=rank.rank,
        at_s=at_s,
        motion=str(wait.motion) if wait else "unseen",
        leaf=frames[0] if frames else None,
        user=user_frame(frames),
        cpu_s=rank.process.cpu_s if rank.process else None,
        another_line=moves and earlier is not None and only_another_line(earlier, rank, elapsed_s),
    )
