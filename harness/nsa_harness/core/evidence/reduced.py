"""Reduce evidence to its size limit, for ranks with a thousand threads or very deep stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

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
_RECENT_CALLS = 16  # in a snapshot's status file
_MAY_ACT = ("read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock", "wait4")


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """How much evidence one level of reduction leaves."""

    stacks: int
    frames: int
    tasks: int
    ends: int  # open pipe ends and sockets, each
    children: int
    calls: int
    samples: int  # per rank
    snapshots: int
    text: int  # characters of a file name, a message, a line


# The next level applies if the evidence is still too large; the last one leaves about 15 KiB per rank.
LEVELS = (
    SizeLimits(stacks=48, frames=64, tasks=64, ends=64, children=16, calls=96, samples=100, snapshots=3, text=2000),
    SizeLimits(stacks=12, frames=32, tasks=24, ends=16, children=8, calls=48, samples=40, snapshots=2, text=500),
    SizeLimits(stacks=3, frames=12, tasks=8, ends=6, children=3, calls=16, samples=20, snapshots=2, text=160),
    SizeLimits(stacks=2, frames=8, tasks=4, ends=2, children=1, calls=8, samples=8, snapshots=2, text=100),
)


# Numbers of calls to store per rank if they fit, and of recorder entries per group.
HISTORIES = (1024, 768, 512, 256, 96)


def with_history(evidence: Evidence, calls: int) -> Evidence:
    """Return the evidence with at most the latest `calls` calls and recorder entries of each rank.

    The calls begin with a whole step.
    """
    ranks = (
        replace(
            rank,
            status_file=replace(rank.status_file, calls=_whole_steps(rank.status_file.calls, calls))
            if rank.status_file
            else None,
            collectives=essential_collectives(rank.collectives, calls),
        )
        for rank in evidence.ranks
    )
    return replace(evidence, ranks=tuple(ranks))


def _whole_steps(calls: tuple[Call, ...], most: int) -> tuple[Call, ...]:
    """Return the latest calls from the start of a step; if they all belong to one step, all of them."""
    latest = calls[-most:]
    before = calls[-most - 1].step if len(calls) > most else None
    return tuple(call for call in latest if call.step != before) or latest


def without_finished_calls(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without finished calls and steps that the rank's final status file has too."""
    ranks = (replace(rank, status_file=_with_recent_calls(rank.status_file, _RECENT_CALLS)) for rank in snapshot.ranks)
    return replace(snapshot, ranks=tuple(ranks))


def _with_recent_calls(board: StatusFile | None, count: int) -> StatusFile | None:
    """Return the status file with fewer calls and steps.

    The last `count` finished calls stay, and every call that the proof of a wait needs: the first call, creations of
    groups, and open calls.
    """
    if board is None:
        return None
    finished = {call.number for call in [call for call in board.calls if call.left_s is not None][-count:]}
    numbers = {*finished, *(call.number for call in board.calls[:1])}
    calls = (
        call
        for call in board.calls
        if call.left_s is None or call.op in {ENTRANCE, *CREATIONS} or call.number in numbers
    )
    return replace(board, calls=tuple(calls), steps_s=board.steps_s[-count:])


def reduce_evidence(evidence: Evidence, keep: SizeLimits) -> Evidence:
    """Return the evidence with at most as many items as `keep` allows, and a note of that in `trouble`.

    The items that the verdict needs most are dropped last.
    """
    cut = Trouble(what="evidence", why="reduced to its bound: the files in dumps/ have all threads and frames")
    snapshots = (
        replace(snapshot, ranks=tuple(_rank_snapshot(rank, keep) for rank in snapshot.ranks))
        for snapshot in evidence.snapshots[-keep.snapshots :]
    )
    return replace(
        evidence,
        ranks=tuple(_rank(rank, keep) for rank in evidence.ranks),
        snapshots=tuple(snapshots),
        samples=evidence.samples[-keep.samples * max(1, evidence.world_size) :],
        trouble=(*evidence.trouble, cut),
    )


def _rank(rank: RankEvidence, keep: SizeLimits) -> RankEvidence:
    raised = rank.exception
    if raised is not None:
        chain = (
            replace(error, message=error.message[: keep.text], frames=error.frames[: keep.frames])
            for error in raised.chain
        )
        raised = replace(
            raised, message=raised.message[: keep.text], frames=raised.frames[: keep.frames], chain=tuple(chain)
        )
    return replace(
        rank,
        exception=raised,
        status_file=_board(rank.status_file, keep),
        collectives=rank.collectives[-keep.calls :],
        death_stacks=_stacks(rank.death_stacks, keep),
        error_lines=tuple(line[: keep.text] for line in rank.error_lines),
        health=_health_samples(rank.health, keep),
    )


def _health_samples(samples: HealthSamples | None, keep: SizeLimits) -> HealthSamples | None:
    """Return the latest samples. Totals, such as parameters without gradients, stay complete."""
    if samples is None:
        return None
    replicas = tuple(
        replace(
            replica,
            samples=replica.samples[-keep.calls :],
            names=tuple((first[-keep.text :], last[-keep.text :]) for first, last in replica.names),
        )
        for replica in samples.replicas
    )
    return replace(samples, memory=samples.memory[-keep.calls :], replicas=replicas)


def _board(board: StatusFile | None, keep: SizeLimits) -> StatusFile | None:
    if board is None:
        return None
    return replace(board, calls=board.calls[-keep.calls :], steps_s=board.steps_s[-keep.calls :])


def _rank_snapshot(rank: RankSnapshot, keep: SizeLimits) -> RankSnapshot:
    marking = [mark.tid for mark in rank.status_file.events] if rank.status_file else []
    below = replace(keep, stacks=min(keep.stacks, 3))
    children = tuple(
        _threads(child, rank.child_stacks.get(child.pid, ()), (), below) for child in rank.children[: keep.children]
    )
    process, stacks = _threads(rank.process, rank.stacks, marking, keep) if rank.process else (None, ())
    return replace(
        rank,
        process=process,
        children=tuple(child for child, _ in children),
        stacks=stacks,
        child_stacks={child.pid: stacks for child, stacks in children if child.pid in rank.child_stacks},
        status_file=_with_recent_calls(rank.status_file, keep.calls),
        collectives=rank.collectives[-keep.calls :],
    )


def _threads(
    process: Process, stacks: Sequence[Stack], marking: Iterable[int], keep: SizeLimits
) -> tuple[Process, tuple[Stack, ...]]:
    """Return the process and its stacks with at most `keep.stacks` stacks.

    The training thread comes first, then threads that may still run, because they decide whether a wait is closed. A
    dropped stack takes its thread along: a thread without a Python stack would count as a library's thread.
    """
    training = training_stack(stacks, process.pid, marking)
    parked = {task.tid for task in process.tasks if task.syscall == "futex" and task.timed is False}
    others = [stack for stack in stacks if stack is not training]
    others.sort(key=lambda stack: (is_poller(stack), stack.tid in parked))
    chosen = [*([training] if training else []), *others][: keep.stacks]
    kept_tids = {stack.tid for stack in chosen}
    left_out = {stack.tid for stack in stacks if stack.frames and stack.tid not in kept_tids}
    tasks = tuple(task for task in process.tasks if task.tid not in left_out)
    return _process(replace(process, tasks=tasks), [stack.tid for stack in chosen], keep), _stacks(chosen, keep)


def _stacks(stacks: Iterable[Stack], keep: SizeLimits) -> tuple[Stack, ...]:
    """Return the stacks with the innermost frames of each."""
    return tuple(
        replace(stack, thread=stack.thread[:80], frames=_frames(stack, keep), native=stack.native[:8])
        for stack in islice(stacks, keep.stacks)
    )


def _frames(stack: Stack, keep: SizeLimits) -> tuple[Frame, ...]:
    """Return the innermost frames, which show the wait, and then the program's frames; drop library frames first."""
    inner, outer = stack.frames[: keep.frames // 2], stack.frames[keep.frames // 2 :]
    own = [frame for frame in outer if not is_library(frame.file)]
    rest = keep.frames - len(inner) - len(own)
    outer_kept = own if rest < len(outer) - len(own) else outer
    return tuple(
        replace(frame, file=frame.file[-keep.text :], function=frame.function[: keep.text])
        for frame in (*inner, *outer_kept)[: 2 * keep.frames]
    )


def _process(process: Process, tids: Iterable[int | None], keep: SizeLimits) -> Process:
    """Return the process with fewer threads: those of the stacks first, then those that may act, then by CPU time."""
    leading = {process.pid, *tids}

    def rank_of(task: Task) -> tuple[bool, bool, float]:
        return task.tid not in leading, not (task.state in "RD" or task.syscall in _MAY_ACT), -task.cpu_s

    tasks = sorted(process.tasks, key=rank_of)[: keep.tasks]
    waited_for = [
        socket for socket in process.sockets if any(task.target == f"socket:[{socket.inode}]" for task in tasks)
    ]
    return replace(
        process,
        tasks=tuple(replace(task, target=task.target[: keep.text]) for task in tasks),
        open_ends=tuple(end[-keep.text :] for end in process.open_ends[: keep.ends]),
        sockets=(*waited_for, *(socket for socket in process.sockets if socket not in waited_for))[: keep.ends],
    )
