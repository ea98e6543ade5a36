"""Reduce the evidence of a run to its size limit.

Ranks with a thousand threads or very deep stacks would exceed the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from nsa_harness.core.evidence.coverage import files_of_some_ranks
from nsa_harness.core.evidence.evidence import (
    CREATIONS,
    ENTRANCE,
    Call,
    Evidence,
    Frame,
    RankEvidence,
    RankSnapshot,
    Snapshot,
    Stack,
    StatusFile,
)
from nsa_harness.core.evidence.flight import essential_collectives
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.stacks import is_library, is_poller, training_stack
from nsa_harness.core.report import Trouble

MAX_RANK_BYTES = 64 << 10  # size limit of a node's evidence, per rank
COVERAGE_LINES = 1500  # per rank
COVERAGE_BYTES = 32 << 10  # added to the size limit per rank with coverage
_REDUCED = "reduced to its bound: the files in dumps/ have all threads and frames"
_RECENT_CALLS = 16  # in a snapshot's status file
_IO_SYSCALLS = ("read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock", "wait4")


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """The maximum numbers of stacks, frames, calls and other items in reduced evidence."""

    stacks: int  # per process
    frames: int  # per stack
    tasks: int  # threads per process
    ends: int  # per process: open pipe ends, and as many sockets
    children: int  # child processes per rank
    calls: int  # per rank
    samples: int  # per rank
    snapshots: int
    text: int  # characters of a file name, a message or a line


# The next level is used if the evidence is still too large. The last level leaves about 15 KiB per rank.
LEVELS = (
    SizeLimits(stacks=48, frames=64, tasks=64, ends=64, children=16, calls=96, samples=100, snapshots=3, text=2000),
    SizeLimits(stacks=12, frames=32, tasks=24, ends=16, children=8, calls=48, samples=40, snapshots=2, text=500),
    SizeLimits(stacks=3, frames=12, tasks=8, ends=6, children=3, calls=16, samples=20, snapshots=2, text=160),
    SizeLimits(stacks=2, frames=8, tasks=4, ends=2, children=1, calls=8, samples=8, snapshots=2, text=100),
)


# Numbers of calls per rank, and of flight recorder entries per group, from which the largest that fits is stored.
HISTORIES = (1024, 768, 512, 256, 96)


def with_history(evidence: Evidence, calls: int) -> Evidence:
    """Return the evidence with each rank's history reduced to the latest `calls` calls."""
    return replace(evidence, ranks=tuple(rank_with_history(rank, calls) for rank in evidence.ranks))


def rank_with_history(rank: RankEvidence, calls: int) -> RankEvidence:
    """Return the evidence of a rank with its history reduced to the latest `calls` calls."""
    status_file = rank.status_file
    return replace(
        rank,
        status_file=replace(status_file, calls=_whole_steps(status_file.calls, calls)) if status_file else None,
        collectives=essential_collectives(rank.collectives, calls),
    )


# Bounds of the evidence of large jobs.
MAX_DETAILED_RANKS = 128  # ranks whose evidence is stored in evidence/
_MAX_CALLS = 1 << 18  # calls of all ranks together that a judgement looks at ...
_MIN_RANK_CALLS = 32  # ... but at least this many of each rank
_LARGE_SNAPSHOTS = (
    (4096, LEVELS[3]),
    (256, LEVELS[2]),
)  # with more ranks than this, a snapshot is reduced to the level


def history_calls(ranks: int) -> int:
    """Return how many of the latest calls of each rank are judged in a job with this number of ranks."""
    return max(_MIN_RANK_CALLS, min(HISTORIES[0], _MAX_CALLS // max(1, ranks)))


def bounded_snapshot(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as it is stored. If there are many ranks, each keeps what matters most for the verdict.

    The size of a reduced snapshot is at most about 10 KB per rank with up to 4096 ranks, and 7 KB with more.
    """
    limits = next((limits for ranks, limits in _LARGE_SNAPSHOTS if len(snapshot.ranks) > ranks), None)
    if limits is None:
        return snapshot
    return replace(snapshot, ranks=tuple(_rank_snapshot(rank, limits) for rank in snapshot.ranks))


def typical_ranks(evidence: Evidence, count: int) -> frozenset[int]:
    """Return at most `count` ranks that together show what the ranks of a job were doing.

    Ranks that ended alike, or stand in the same call on the same line, are one class. One rank of each class comes
    first, then a second one of each, and so on; of these the smaller classes come first.
    """
    classes: dict[tuple[object, ...], list[int]] = {}
    for rank in evidence.ranks:
        classes.setdefault(_class_of(rank), []).append(rank.rank)
    in_order = sorted((at, len(ranks), rank) for ranks in classes.values() for at, rank in enumerate(sorted(ranks)))
    return frozenset(rank for _, _, rank in in_order[:count])


def _class_of(rank: RankEvidence) -> tuple[object, ...]:
    call = rank.status_file.calls[-1] if rank.status_file and rank.status_file.calls else None
    return (
        rank.pid is None,
        rank.status_file is None,
        (rank.exit.status, rank.exit.during_teardown) if rank.exit else None,
        rank.exception.type if rank.exception else None,
        (call.op, call.place, call.left_s is None) if call else None,
        rank.status_file.step if rank.status_file else None,
    )


def only_ranks(evidence: Evidence, ranks: frozenset[int]) -> Evidence:
    """Return the evidence of these ranks only, with a note about the others."""
    snapshots = (
        replace(snapshot, ranks=tuple(rank for rank in snapshot.ranks if rank.rank in ranks))
        for snapshot in evidence.snapshots
    )
    return replace(
        evidence,
        ranks=tuple(rank for rank in evidence.ranks if rank.rank in ranks),
        exits=tuple(exit for exit in evidence.exits if exit.rank is None or exit.rank in ranks),
        snapshots=tuple(snapshots),
        samples=tuple(sample for sample in evidence.samples if sample.rank in ranks),
        trouble=(*evidence.trouble, Trouble(what="evidence", why=_REDUCED)),
    )


def with_short_coverage(evidence: Evidence) -> Evidence:
    """Return the evidence with at most `COVERAGE_LINES` lines in the coverage of each rank."""
    coverages = [rank.coverage for rank in evidence.ranks if rank.coverage is not None]
    if all(len(coverage.entries) <= COVERAGE_LINES for coverage in coverages):
        return evidence
    files = files_of_some_ranks(coverages)
    shorter = [rank.coverage and rank.coverage.only_files(files) for rank in evidence.ranks]
    trouble = evidence.trouble
    if any(coverage is not None and len(coverage.entries) > COVERAGE_LINES for coverage in shorter):
        shorter = [None] * len(shorter)
        trouble = (*trouble, Trouble(what="coverage", why=f"more than {COVERAGE_LINES} lines"))
    ranks = (replace(rank, coverage=coverage) for rank, coverage in zip(evidence.ranks, shorter, strict=True))
    return replace(evidence, ranks=tuple(ranks), trouble=trouble)


def _whole_steps(calls: tuple[Call, ...], most: int) -> tuple[Call, ...]:
    """Return at most `most` of the latest calls, in complete steps, or all of a single step that began earlier."""
    latest = calls[-most:]
    before = calls[-most - 1].step if len(calls) > most else None
    return tuple(call for call in latest if call.step != before) or latest


def without_finished_calls(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with only the latest finished calls and steps; status files have the others too."""
    ranks = (replace(rank, status_file=_with_recent_calls(rank.status_file, _RECENT_CALLS)) for rank in snapshot.ranks)
    return replace(snapshot, ranks=tuple(ranks))


def _with_recent_calls(status_file: StatusFile | None, count: int) -> StatusFile | None:
    """Return the status file with only the latest `count` finished calls and steps."""
    if status_file is None:
        return None
    latest = {call.number for call in [call for call in status_file.calls if call.left_s is not None][-count:]}
    numbers = {*latest, *(call.number for call in status_file.calls[:1])}
    calls = (
        call
        for call in status_file.calls
        if call.left_s is None or call.op in {ENTRANCE, *CREATIONS} or call.number in numbers
    )
    return replace(status_file, calls=tuple(calls), steps_s=status_file.steps_s[-count:])


def reduce_evidence(evidence: Evidence, limits: SizeLimits) -> Evidence:
    """Return the evidence within `limits`, with what matters most for the verdict, and a note in `trouble`."""
    cut = Trouble(what="evidence", why=_REDUCED)
    snapshots = (
        replace(snapshot, ranks=tuple(_rank_snapshot(rank, limits) for rank in snapshot.ranks), communicators=())
        for snapshot in evidence.snapshots[-limits.snapshots :]
    )
    return replace(
        evidence,
        ranks=tuple(_rank(rank, limits) for rank in evidence.ranks),
        snapshots=tuple(snapshots),
        samples=evidence.samples[-limits.samples * max(1, evidence.world_size) :],
        trouble=(*evidence.trouble, cut),
    )


def _rank(rank: RankEvidence, limits: SizeLimits) -> RankEvidence:
    exception = rank.exception
    if exception is not None:
        chain = (
            replace(error, message=error.message[: limits.text], frames=error.frames[: limits.frames])
            for error in exception.chain
        )
        exception = replace(
            exception,
            message=exception.message[: limits.text],
            frames=exception.frames[: limits.frames],
            chain=tuple(chain),
        )
    return replace(
        rank,
        exception=exception,
        status_file=_status_file(rank.status_file, limits),
        collectives=rank.collectives[-limits.calls :],
        death_stacks=_stacks(rank.death_stacks, limits),
        error_lines=tuple(line[: limits.text] for line in rank.error_lines),
        health=_health_samples(rank.health, limits),
    )


def _health_samples(samples: HealthSamples | None, limits: SizeLimits) -> HealthSamples | None:
    if samples is None:
        return None
    replicas = tuple(
        replace(
            replica,
            samples=replica.samples[-limits.calls :],
            names=tuple((first[-limits.text :], last[-limits.text :]) for first, last in replica.names),
        )
        for replica in samples.replicas
    )
    return replace(samples, memory=samples.memory[-limits.calls :], replicas=replicas)


def _status_file(status_file: StatusFile | None, limits: SizeLimits) -> StatusFile | None:
    if status_file is None:
        return None
    return replace(status_file, calls=status_file.calls[-limits.calls :], steps_s=status_file.steps_s[-limits.calls :])


def _rank_snapshot(rank: RankSnapshot, limits: SizeLimits) -> RankSnapshot:
    event_tids = [event.tid for event in rank.status_file.events] if rank.status_file else []
    child_limits = replace(limits, stacks=min(limits.stacks, 3))
    children = tuple(
        _threads(child, rank.child_stacks.get(child.pid, ()), (), child_limits)
        for child in rank.children[: limits.children]
    )
    process, stacks = _threads(rank.process, rank.stacks, event_tids, limits) if rank.process else (None, ())
    return replace(
        rank,
        process=process,
        children=tuple(child for child, _ in children),
        stacks=stacks,
        child_stacks={child.pid: stacks for child, stacks in children if child.pid in rank.child_stacks},
        status_file=_with_recent_calls(rank.status_file, limits.calls),
        collectives=rank.collectives[-limits.calls :],
    )


def _threads(
    process: Process, stacks: Sequence[Stack], event_tids: Iterable[int], limits: SizeLimits
) -> tuple[Process, tuple[Stack, ...]]:
    """Return the process and its stacks, of which at most `limits.stacks` are kept."""
    training = training_stack(stacks, process.pid, event_tids)
    waits_for_lock = {task.tid for task in process.tasks if task.syscall == "futex" and task.timed is False}
    others = [stack for stack in stacks if stack is not training]
    others.sort(key=lambda stack: (is_poller(stack), stack.tid in waits_for_lock))
    kept_stacks = [*([training] if training else []), *others][: limits.stacks]
    kept_tids = {stack.tid for stack in kept_stacks}
    dropped_tids = {stack.tid for stack in stacks if stack.frames and stack.tid not in kept_tids}
    tasks = tuple(task for task in process.tasks if task.tid not in dropped_tids)
    tids = [stack.tid for stack in kept_stacks]
    return _process(replace(process, tasks=tasks), tids, limits), _stacks(kept_stacks, limits)


def _stacks(stacks: Iterable[Stack], limits: SizeLimits) -> tuple[Stack, ...]:
    return tuple(
        replace(stack, thread=stack.thread[:80], frames=_frames(stack, limits), native=stack.native[:8])
        for stack in islice(stacks, limits.stacks)
    )


def _frames(stack: Stack, limits: SizeLimits) -> tuple[Frame, ...]:
    """Return the stack's innermost frames and as many outer ones of the program as `limits` allows."""
    inner, outer = stack.frames[: limits.frames // 2], stack.frames[limits.frames // 2 :]
    own = [frame for frame in outer if not is_library(frame.file)]
    rest = limits.frames - len(inner) - len(own)
    outer_kept = own if rest < len(outer) - len(own) else outer
    return tuple(
        replace(frame, file=frame.file[-limits.text :], function=frame.function[: limits.text])
        for frame in (*inner, *outer_kept)[: 2 * limits.frames]
    )


def _process(process: Process, tids: Iterable[int | None], limits: SizeLimits) -> Process:
    """Return the process with only as many threads and sockets as `limits` allows."""
    leading = {process.pid, *tids}

    def rank_of(task: Task) -> tuple[bool, bool, float]:
        return task.tid not in leading, not (task.state in "RD" or task.syscall in _IO_SYSCALLS), -task.cpu_s

    tasks = sorted(process.tasks, key=rank_of)[: limits.tasks]
    waited_for = [
        socket for socket in process.sockets if any(task.target == f"socket:[{socket.inode}]" for task in tasks)
    ]
    return replace(
        process,
        tasks=tuple(replace(task, target=task.target[: limits.text]) for task in tasks),
        open_ends=tuple(end[-limits.text :] for end in process.open_ends[: limits.ends]),
        sockets=(*waited_for, *(socket for socket in process.sockets if socket not in waited_for))[: limits.ends],
    )
