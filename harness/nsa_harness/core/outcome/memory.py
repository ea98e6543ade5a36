"""The memory of each rank at several moments of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_harness.core.evidence.evidence import Evidence, RankEvidence, RankSnapshot
from nsa_harness.core.evidence.host import Gpu
from nsa_harness.core.report import MemoryAt, Status
from nsa_harness.core.verdict.verdict import Judgement


def memory_at(evidence: Evidence, judgement: Judgement) -> Iterator[MemoryAt]:
    """Yield the memory usage of each rank at several moments during the run."""
    for rank in evidence.ranks:
        yield from (
            MemoryAt(
                rank=rank.rank,
                moment=event.moment,
                step=event.step if event.moment == "dump" else None,
                rss_bytes=event.rss_bytes,
                allocated_bytes=event.allocated_bytes,
                reserved_bytes=event.reserved_bytes,
                allocator_step=None,
                device_bytes=None,
            )
            for event in rank.memory
            if event.moment != "last"
        )
    if judgement.status is not Status.PASS and evidence.snapshots:
        snapshot = evidence.snapshots[-1]
        ranks = {rank.rank: rank for rank in evidence.ranks}
        yield from (
            _memory_at_end(snapshot_rank, ranks.get(snapshot_rank.rank), snapshot.gpus)
            for snapshot_rank in snapshot.ranks
            if snapshot_rank.process
        )


def _memory_at_end(snapshot_rank: RankSnapshot, rank: RankEvidence | None, gpus: Sequence[Gpu]) -> MemoryAt:
    """Return the memory usage of a rank when the last snapshot was taken."""
    last = rank.memory[-1] if rank and rank.memory else None
    sample = rank.health.memory[-1] if rank and rank.health and rank.health.memory else None
    has_report = last is not None and last.allocated_bytes is not None
    used = [gpu.used_by[snapshot_rank.pid] for gpu in gpus if snapshot_rank.pid in gpu.used_by]
    allocated_bytes = last.allocated_bytes if last and has_report else sample.gpu_bytes if sample else None
    step = last.step if last and has_report else sample.step if sample else None
    return MemoryAt(
        rank=snapshot_rank.rank,
        moment="end",
        step=None,
        rss_bytes=snapshot_rank.process.rss_bytes if snapshot_rank.process else None,
        allocated_bytes=allocated_bytes,
        reserved_bytes=last.reserved_bytes if last and has_report else None,
        allocator_step=step if allocated_bytes is not None else None,
        device_bytes=sum(used) if used else None,
    )
