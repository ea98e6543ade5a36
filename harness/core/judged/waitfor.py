"""Who waits for whom: what each rank stands in, whether it can still come, and who is at the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.core.judged.motion import Motion, motion, rank_stack
from harness.core.observed.evidence import Call, Collective, Frame, RankSnapshot, Snapshot, Stack, Task
from harness.core.observed.stacks import in_function, user_frame

_TORCH_DISTRIBUTED = "torch/distributed/"
_CHECKPOINT = "torch/distributed/checkpoint/"  # reads and writes files, which may be slow, and waits for no rank
_LIBRARY_POLLERS = ("/harness/probe/", "tqdm/_monitor.py", "torch/utils/data/_utils/pin_memory.py")
_LIBRARY_THREADS = ("gloo", "pt_", "cuda", "nccl", "jemalloc")
_BLOCKING_IO = {"read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock"}
_CHILD_CALLS = {"wait4", "waitid"}
_SLEEPS = {"clock_nanosleep", "nanosleep"}
_IO_CALLS = {
    "read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "accept4", "openat", "flock",
    "fsync", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "ioctl",
}  # fmt: skip


class WaitKind(StrEnum):
    COLLECTIVE = "collective"
    TRANSPORT = "transport"  # every rank is in the same collective, and it does not end
    LOCK = "lock"
    SLEEP = "sleep"
    CHILD = "child"
    IO = "io"
    COMPUTE = "compute"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    NOTHING = "nothing"  # it moves


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What one rank stands in. `closed`: it cannot come, whatever time passes, unless another rank moves."""

    rank: int
    motion: Motion
    kind: WaitKind
    stands_in: str
    peers: tuple[int, ...]  # the ranks it waits for
    closed: bool
    until_s: float | None  # end of a sleep, where readable
    leaf: Frame | None
    user: Frame | None
    collective: Collective | None
    call: Call | None
    in_backward: bool


@dataclass(frozen=True, kw_only=True)
class WaitFor:
    """The graph over all ranks of one moment."""

    waits: tuple[Wait, ...]
    roots: tuple[Wait, ...]  # waits for no rank, or member of a cycle

    @property
    def moved(self) -> bool:
        return any(wait.motion is Motion.MOVING for wait in self.waits)

    @property
    def closed(self) -> bool:
        """Every root waits for something that cannot come."""
        return bool(self.roots) and all(root.closed for root in self.roots)


def wait_for(before: Snapshot, after: Snapshot, gone: Iterable[int] = ()) -> WaitFor:
    """The wait-for graph at `after`; `before` shows what moved since. `gone`: ranks whose process has ended."""
    earlier = {rank.rank: rank for rank in before.ranks}
    elapsed_s = max(after.at_s - before.at_s, 1e-3)
    left = set(gone)
    waits = [
        _wait(earlier.get(rank.rank), rank, after.ranks, elapsed_s, left)
        for rank in after.ranks
        if rank.rank not in left
    ]
    waits += [_gone(rank) for rank in sorted(left)]
    return WaitFor(waits=tuple(waits), roots=_roots(waits))


def _wait(
    before: RankSnapshot | None, rank: RankSnapshot, everyone: Sequence[RankSnapshot], elapsed_s: float, gone: set[int]
) -> Wait:
    moved = motion(before, rank, elapsed_s)
    stack = rank_stack(rank)
    frames = stack.frames if stack else ()
    kind, peers, collective, call = WaitKind.NOTHING, (), None, None  # type: tuple[WaitKind, tuple[int, ...], Collective | None, Call | None]
    if moved is Motion.STOPPED:
        kind = WaitKind.STOPPED
    elif moved is Motion.GONE:
        kind = WaitKind.GONE
    elif moved is not Motion.MOVING and (found := _collective_wait(rank, frames, everyone, gone, moved)):
        kind, peers, collective, call = found
        moved = Motion.WAITING  # NCCL spins while it waits
    elif moved is Motion.BURNING:
        kind = WaitKind.COMPUTE
    elif moved is Motion.WAITING:
        kind = _host_wait(rank, stack)
    task = _task(rank, stack)
    return Wait(
        rank=rank.rank,
        motion=moved,
        kind=kind,
        stands_in=_stands_in(kind, frames, collective, call, task),
        peers=peers,
        closed=bool(peers) if kind is WaitKind.COLLECTIVE else _closed(kind, rank, stack, task),
        until_s=task.wakes_at_s if task and kind is WaitKind.SLEEP else None,
        leaf=frames[0] if frames else None,
        user=user_frame(frames),
        collective=collective,
        call=call,
        in_backward=in_function(frames, "torch/autograd/graph.py") is not None,
    )


def _gone(rank: int) -> Wait:
    return Wait(
        rank=rank,
        motion=Motion.GONE,
        kind=WaitKind.GONE,
        stands_in="has left",
        peers=(),
        closed=True,
        until_s=None,
        leaf=None,
        user=None,
        collective=None,
        call=None,
        in_backward=False,
    )


def _collective_wait(
    rank: RankSnapshot, frames: Sequence[Frame], everyone: Sequence[RankSnapshot], gone: set[int], moved: Motion
) -> tuple[WaitKind, tuple[int, ...], Collective | None, Call | None] | None:
    """The collective this rank waits in, and the ranks that have not come to it; None where it waits elsewhere."""
    pending = next((one for one in rank.collectives if not one.retired), None)
    call = next((one for one in reversed(rank.board.calls) if one.left_s is None), None) if rank.board else None
    inside = bool(frames) and _TORCH_DISTRIBUTED in frames[0].file and _CHECKPOINT not in frames[0].file
    absent = _absent(pending, rank, everyone, gone) if pending else ()
    in_engine = bool(frames) and frames[0].function == "_engine_run_backward"
    handle = bool(frames) and not inside and not in_engine  # the user's own `work.wait()`, or something else entirely
    # DDP waits below the engine, and without a probe nobody says for what.
    unrecorded = in_engine and rank.board is None
    if inside or (unrecorded and moved is Motion.WAITING) or (call is not None and not frames):
        pass
    elif pending is None or moved is Motion.BURNING or (handle and not absent):
        return None
    others = tuple(one.rank for one in everyone if one.rank != rank.rank)
    if pending is None:
        return WaitKind.COLLECTIVE, tuple(sorted({*others, *gone})), None, call
    if not absent:
        return WaitKind.TRANSPORT, others, pending, call
    return WaitKind.COLLECTIVE, absent, pending, call


def _absent(
    pending: Collective, rank: RankSnapshot, everyone: Sequence[RankSnapshot], gone: set[int]
) -> tuple[int, ...]:
    """The ranks that have not entered `pending`, or entered something else in its place."""
    missing = set(gone)
    for peer in everyone:
        if peer.rank == rank.rank or peer.rank in gone:
            continue
        in_group = {one.seq: one for one in peer.collectives if one.group == pending.group}
        if not in_group and pending.group != "0" and peer.collectives:
            continue  # not a member of this group, as far as anyone has seen
        newest = max(in_group, default=0)
        same = in_group.get(pending.seq)
        if newest < pending.seq or (same is not None and not _matches(pending, same)):
            missing.add(peer.rank)
    return tuple(sorted(missing))


def _matches(one: Collective, other: Collective) -> bool:
    return (one.op, one.sizes, one.dtypes) == (other.op, other.sizes, other.dtypes)


def _host_wait(rank: RankSnapshot, stack: Stack | None) -> WaitKind:
    task = _task(rank, stack)
    name = task.syscall if task else ""
    if name in _SLEEPS:
        return WaitKind.SLEEP
    if name in _CHILD_CALLS:
        return WaitKind.CHILD
    if name == "futex":
        return WaitKind.LOCK
    if name in _IO_CALLS:
        return WaitKind.IO
    return WaitKind.UNKNOWN


def _task(rank: RankSnapshot, stack: Stack | None) -> Task | None:
    if rank.process is None:
        return None
    wanted = stack.tid if stack and stack.tid else rank.pid
    return next((task for task in rank.process.tasks if task.tid == wanted), None)


def _closed(kind: WaitKind, rank: RankSnapshot, stack: Stack | None, task: Task | None) -> bool:
    """Closed by itself. A wait for ranks is closed by its peers, which `_roots` decides."""
    if kind in (WaitKind.STOPPED, WaitKind.GONE):
        return True
    if kind is not WaitKind.LOCK or task is None or task.timed is not False or stack is None:
        return False
    return not _could_be_released(rank, stack)


def _could_be_released(rank: RankSnapshot, waiting: Stack) -> bool:
    """Some other thread of the process, or another process that shares the lock, may still release it."""
    if in_function(waiting.frames, "multiprocessing/synchronize.py") is not None:
        return True
    tasks = {task.tid: task for task in rank.process.tasks} if rank.process else {}
    in_python = {stack.tid for stack in rank.stacks if stack.frames}
    native = (task for tid, task in tasks.items() if tid not in in_python)
    python = (stack for stack in rank.stacks if stack is not waiting and stack.frames)
    return any(_may_act(stack, tasks) for stack in python) or any(_natively_busy(task) for task in native)


def _natively_busy(task: Task) -> bool:
    """A thread of a C++ library that runs, or stands in a read or write that can end, may be what is waited for.

    One that only polls (epoll, timed waits) is a library's loop: gloo, autograd and allocators all keep some.
    """
    if task.comm.startswith(_LIBRARY_THREADS):
        return False
    return task.state in "RD" or task.syscall in _BLOCKING_IO


def _may_act(stack: Stack, tasks: Mapping[int, Task]) -> bool:
    """A thread that does not wait for a lock itself, and is not a library's own poller, may do anything."""
    if any(poller in frame.file for frame in stack.frames for poller in _LIBRARY_POLLERS):
        return False
    task = tasks.get(stack.tid) if stack.tid else None
    return task is None or task.syscall != "futex" or task.timed is not False


def _roots(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """The waits that others hang on: those for no rank, and the cycles that no wait leads out of."""
    by_rank = {wait.rank: wait for wait in waits}
    reached = {wait.rank: _reached(wait.rank, by_rank) for wait in waits}
    roots = (wait for wait in waits if all(wait.rank in reached[rank] for rank in reached[wait.rank]))
    return tuple(sorted(roots, key=lambda wait: bool(wait.peers)))


def _reached(start: int, by_rank: Mapping[int, Wait]) -> set[int]:
    """The ranks that this one waits for, directly or not, and itself."""
    seen: set[int] = set()
    queue = [start]
    while queue:
        rank = queue.pop()
        if rank not in seen and rank in by_rank:
            seen.add(rank)
            queue += by_rank[rank].peers
    return seen


def _stands_in(
    kind: WaitKind, frames: Sequence[Frame], collective: Collective | None, call: Call | None, task: Task | None
) -> str:
    if kind in (WaitKind.COLLECTIVE, WaitKind.TRANSPORT):
        if collective is not None:
            return f"{collective.op} #{collective.seq}"
        return call.op if call else (frames[0].function if frames else "a collective")
    user = user_frame(frames)
    where = f" in {user.function}" if user else ""
    words = {
        WaitKind.LOCK: "a lock",
        WaitKind.SLEEP: "a sleep",
        WaitKind.CHILD: "a wait for a child process",
        WaitKind.IO: f"{task.syscall if task else 'io'}",
        WaitKind.COMPUTE: "a computation",
        WaitKind.STOPPED: "stopped by a signal",
        WaitKind.GONE: "has left",
        WaitKind.NOTHING: "moving",
        WaitKind.UNKNOWN: "a wait of unknown kind",
    }
    return words[kind] + where
