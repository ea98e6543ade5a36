"""Evidence within its bound: what is left out first where a rank has a thousand threads, or stacks without end."""

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
from nsa_harness.core.evidence.flight import essential
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.stacks import is_library, is_poller, training_stack
from nsa_harness.core.report import Trouble

MAX_RANK_BYTES = 64 << 10  # of a node's evidence, for each of its ranks
_RECENT_CALLS = 16  # of a snapshot's board
_MAY_ACT = ("read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock", "wait4")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How much of everything stays."""

    stacks: int
    frames: int
    tasks: int
    ends: int  # holds and sockets, each
    children: int
    calls: int
    samples: int  # of each rank
    snapshots: int
    text: int  # of a file name, a message, a line


# Each level is tried where the one before is still too much; the last one leaves about 15 KiB a rank.
LEVELS = (
    Keep(stacks=48, frames=64, tasks=64, ends=64, children=16, calls=96, samples=100, snapshots=3, text=2000),
    Keep(stacks=12, frames=32, tasks=24, ends=16, children=8, calls=48, samples=40, snapshots=2, text=500),
    Keep(stacks=3, frames=12, tasks=8, ends=6, children=3, calls=16, samples=20, snapshots=2, text=160),
    Keep(stacks=2, frames=8, tasks=4, ends=2, children=1, calls=8, samples=8, snapshots=2, text=100),
)


# How many calls of a rank are kept where they fit, and of each group as many entries of the recorder.
HISTORIES = (1024, 768, 512, 256, 96)


def with_history(evidence: Evidence, calls: int) -> Evidence:
    """With the newest calls of each rank alone, from the beginning of a step on, and what the recorder has of them."""
    ranks = (
        replace(
            rank,
            board=replace(rank.board, calls=_whole_steps(rank.board.calls, calls)) if rank.board else None,
            collectives=essential(rank.collectives, calls),
        )
        for rank in evidence.ranks
    )
    return replace(evidence, ranks=tuple(ranks))


def _whole_steps(calls: tuple[Call, ...], most: int) -> tuple[Call, ...]:
    """Of a single step the newest."""
    kept = calls[-most:]
    before = calls[-most - 1].step if len(calls) > most else None
    return tuple(one for one in kept if one.step != before) or kept


def brief(snapshot: Snapshot) -> Snapshot:
    """A snapshot without the finished calls and steps that the rank's own board tells after the run."""
    ranks = (replace(rank, board=_recent(rank.board, _RECENT_CALLS)) for rank in snapshot.ranks)
    return replace(snapshot, ranks=tuple(ranks))


def _recent(board: StatusFile | None, count: int) -> StatusFile | None:
    """The last finished calls, and what waits rest on: the first call, the making of groups, all that is still open."""
    if board is None:
        return None
    finished = {call.number for call in [one for one in board.calls if one.left_s is not None][-count:]}
    kept = {*finished, *(call.number for call in board.calls[:1])}
    calls = (
        call for call in board.calls if call.left_s is None or call.op in {ENTRANCE, *CREATIONS} or call.number in kept
    )
    return replace(board, calls=tuple(calls), steps_s=board.steps_s[-count:])


def reduced(evidence: Evidence, keep: Keep) -> Evidence:
    """The same evidence with less of what is long; what the verdict rests on goes last, and it is said in `trouble`."""
    said = Trouble(what="evidence", why="reduced to its bound: the files in dumps/ have all threads and frames")
    snapshots = (
        replace(one, ranks=tuple(_rank_snapshot(rank, keep) for rank in one.ranks))
        for one in evidence.snapshots[-keep.snapshots :]
    )
    return replace(
        evidence,
        ranks=tuple(_rank(rank, keep) for rank in evidence.ranks),
        snapshots=tuple(snapshots),
        samples=evidence.samples[-keep.samples * max(1, evidence.world_size) :],
        trouble=(*evidence.trouble, said),
    )


def _rank(rank: RankEvidence, keep: Keep) -> RankEvidence:
    raised = rank.raised
    if raised is not None:
        chain = (
            replace(one, message=one.message[: keep.text], frames=one.frames[: keep.frames]) for one in raised.chain
        )
        raised = replace(
            raised, message=raised.message[: keep.text], frames=raised.frames[: keep.frames], chain=tuple(chain)
        )
    return replace(
        rank,
        raised=raised,
        board=_board(rank.board, keep),
        collectives=rank.collectives[-keep.calls :],
        death_stacks=_stacks(rank.death_stacks, keep),
        error_lines=tuple(line[: keep.text] for line in rank.error_lines),
        looks=_looks(rank.looks, keep),
    )


def _looks(looks: HealthSamples | None, keep: Keep) -> HealthSamples | None:
    """The newest: what they tell together, broken or never, stands beside them."""
    if looks is None:
        return None
    replicas = tuple(
        replace(
            one,
            looks=one.looks[-keep.calls :],
            names=tuple((first[-keep.text :], last[-keep.text :]) for first, last in one.names),
        )
        for one in looks.replicas
    )
    return replace(looks, memory=looks.memory[-keep.calls :], replicas=replicas)


def _board(board: StatusFile | None, keep: Keep) -> StatusFile | None:
    if board is None:
        return None
    return replace(board, calls=board.calls[-keep.calls :], steps_s=board.steps_s[-keep.calls :])


def _rank_snapshot(rank: RankSnapshot, keep: Keep) -> RankSnapshot:
    marking = [mark.tid for mark in rank.board.marks] if rank.board else []
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
        child_stacks={child.pid: found for child, found in children if child.pid in rank.child_stacks},
        board=_recent(rank.board, keep.calls),
        collectives=rank.collectives[-keep.calls :],
    )


def _threads(
    process: Process, stacks: Sequence[Stack], marking: Iterable[int], keep: Keep
) -> tuple[Process, tuple[Stack, ...]]:
    """The thread that trains, then those that may act: whether a wait is closed rests on them.

    A thread of Python's whose stack is left out is left out as a thread too: it would look like one of a library's.
    """
    training = training_stack(stacks, process.pid, marking)
    parked = {one.tid for one in process.tasks if one.syscall == "futex" and one.timed is False}
    others = [one for one in stacks if one is not training]
    others.sort(key=lambda one: (is_poller(one), one.tid in parked))
    chosen = [*([training] if training else []), *others][: keep.stacks]
    known = {one.tid for one in chosen}
    left_out = {one.tid for one in stacks if one.frames and one.tid not in known}
    tasks = tuple(one for one in process.tasks if one.tid not in left_out)
    return _process(replace(process, tasks=tasks), [one.tid for one in chosen], keep), _stacks(chosen, keep)


def _stacks(stacks: Iterable[Stack], keep: Keep) -> tuple[Stack, ...]:
    """The innermost frames of each."""
    return tuple(
        replace(one, thread=one.thread[:80], frames=_frames(one, keep), native=one.native[:8])
        for one in islice(stacks, keep.stacks)
    )


def _frames(stack: Stack, keep: Keep) -> tuple[Frame, ...]:
    """The innermost ones tell what it waits for, and the program's own where it came from; libraries in between go."""
    inner, outer = stack.frames[: keep.frames // 2], stack.frames[keep.frames // 2 :]
    own = [frame for frame in outer if not is_library(frame.file)]
    rest = keep.frames - len(inner) - len(own)
    kept = own if rest < len(outer) - len(own) else outer
    return tuple(
        replace(frame, file=frame.file[-keep.text :], function=frame.function[: keep.text])
        for frame in (*inner, *kept)[: 2 * keep.frames]
    )


def _process(process: Process, tids: Iterable[int | None], keep: Keep) -> Process:
    """The threads of the stacks and those that may still act come first, then those that computed most."""
    leading = {process.pid, *tids}

    def rank_of(task: Task) -> tuple[bool, bool, float]:
        return task.tid not in leading, not (task.state in "RD" or task.syscall in _MAY_ACT), -task.cpu_s

    tasks = sorted(process.tasks, key=rank_of)[: keep.tasks]
    waited_for = [one for one in process.sockets if any(task.target == f"socket:[{one.inode}]" for task in tasks)]
    return replace(
        process,
        tasks=tuple(replace(task, target=task.target[: keep.text]) for task in tasks),
        holds=tuple(end[-keep.text :] for end in process.holds[: keep.ends]),
        sockets=(*waited_for, *(one for one in process.sockets if one not in waited_for))[: keep.ends],
    )
