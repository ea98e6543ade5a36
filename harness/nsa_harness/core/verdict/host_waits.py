"""Waits of a process for its host: locks, pipes, files, connections, children, workers, the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.pools import awaits_result, awaits_task, is_worker, serves_pool
from nsa_harness.core.evidence.stacks import in_function, is_poller, training_stack, user_frame
from nsa_harness.core.source_code.loops import only_looks, only_reports
from nsa_harness.core.verdict.motion import BUSY_SHARE, SLEEPS, STARVED_SHARE, Motion, carried, cpu_share
from nsa_harness.core.verdict.wait import OF_MOTION, ChildWait, WaitKind, WaitState

_LIBRARY_THREADS = ("gloo", "pt_", "cuda", "nccl", "jemalloc")
WAKES = 2  # from one sleep line, to no effect: a third sleep there is one of a poller
_BLOCKING_IO = {"read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock"}


def is_library(task: Task) -> bool:
    """A thread that torch, gloo or a driver keeps for itself, told by its name."""
    return task.comm.startswith(_LIBRARY_THREADS)


def _natively_busy(task: Task) -> bool:
    """A thread of a C++ library that runs, or stands in a read or write that can end, may be what is waited for.

    One that only polls (epoll, timed waits) is a library's loop: gloo, autograd and allocators all keep some.
    """
    return not is_library(task) and (task.state in "RD" or task.syscall in _BLOCKING_IO)


def _may_act(stack: Stack, tasks: Mapping[int, Task]) -> bool:
    """A thread that does not wait for a lock itself, and is no poller, may do anything."""
    if is_poller(stack):
        return False
    task = tasks.get(stack.tid) if stack.tid else None
    if task is not None and task.woke >= WAKES and only_reports(stack.loop):
        return False
    return task is None or task.syscall != "futex" or task.timed is not False


_CHILD_CALLS = {"wait4", "waitid"}
_FILE_LOCKS = {"flock", "fcntl"}
_READS = {"read", "readv", "recvfrom", "recvmsg"}
_WRITES = {"write", "writev", "sendto", "sendmsg", "sendfile"}
_IO_CALLS = {
    *_READS, *_WRITES, "connect", "accept", "accept4", "openat", "fsync", "fdatasync", "pread64", "pwrite64", "poll",
    "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "ioctl",
}  # fmt: skip
_LOADER = "torch/utils/data/dataloader.py"
_LOADER_CALLS = {"_try_get_data", "_get_data"}
_WORKER = "torch/utils/data/_utils/worker.py"
_QUEUE = "multiprocessing/queues.py"
_NAMED_HOLDERS = 16  # the list of holders is cut there: then not all are known
_DEEPEST = 8  # children of children


@dataclass(frozen=True, kw_only=True)
class _Actor:
    """One process now, and the thread of it that waits."""

    process: Process
    before: Process | None
    stacks: tuple[Stack, ...]
    stack: Stack | None

    @property
    def task(self) -> Task | None:
        wanted = self.stack.tid if self.stack and self.stack.tid else self.process.pid
        return next((task for task in self.process.tasks if task.tid == wanted), None)

    @property
    def may_act(self) -> bool:
        """Some other thread of it, or another process that shares the lock."""
        return self.thread_may_act() or in_function(self.frames, "multiprocessing/synchronize.py") is not None

    def thread_may_act(self, idle: Sequence[Stack] = ()) -> bool:
        """Any thread of it but the one that waits, and those that are known to be idle."""
        tasks = {task.tid: task for task in self.process.tasks}
        in_python = {stack.tid for stack in self.stacks if stack.frames}
        native = (task for tid, task in tasks.items() if tid not in in_python)
        python = (one for one in self.stacks if one is not self.stack and one.frames and one not in idle)
        acts = any(_may_act(stack, tasks) for stack in python) or any(_natively_busy(task) for task in native)
        return self.stack is None or acts

    def computing(self, elapsed_s: float) -> tuple[ChildWait, ...]:
        """Its threads that compute, if each one that may act does that, on lines that are known."""
        earlier_s = {task.tid: task.cpu_s for task in self.before.tasks} if self.before else {}
        used_s = {task.tid: task.cpu_s - earlier_s.get(task.tid, task.cpu_s) for task in self.process.tasks}
        busy = [
            one
            for one in self.stacks
            if one is not self.stack and one.frames and used_s.get(one.tid or 0, 0.0) >= STARVED_SHARE * elapsed_s
        ]
        if self.stack is None or self.thread_may_act(busy):
            return ()
        return tuple(
            ChildWait(
                kind=WaitKind.COMPUTE,
                motion=Motion.BURNING,
                pid=one.tid or 0,
                command=self.process.command,
                thread=one.thread,
                leaf=one.frames[0],
                user=user_frame(one.frames),
            )
            for one in busy
        )

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.stack.frames if self.stack else ()

    @property
    def is_unread(self) -> bool:
        """A Python process whose stacks nobody could take."""
        return not self.frames and "python" in self.process.command and self.process.state not in "ZX"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A rank, the processes below it, and who the others of the job are."""

    rank: int
    actors: Mapping[int, _Actor]
    owners: Mapping[int, int]  # process -> rank, of all other ranks and their children
    elapsed_s: float


def host_wait(
    before: RankSnapshot | None, rank: RankSnapshot, stack: Stack | None, owners: Mapping[int, int], elapsed_s: float
) -> WaitState:
    """What the thread of `stack` waits for. `owners`: the rank of each process of the job."""
    if rank.process is None:
        return WaitState(kind=WaitKind.LOADER if stack and _awaits_batch(stack.frames) else WaitKind.UNKNOWN)
    was = before.process if before else None
    actors = {rank.pid: _Actor(process=rank.process, before=was, stacks=rank.stacks, stack=stack)}
    earlier = {child.pid: child for child in before.children} if before else {}
    for child in rank.children:
        stacks = rank.child_stacks.get(child.pid, ())
        trains = training_stack(stacks, child.pid)
        actors[child.pid] = _Actor(process=child, before=earlier.get(child.pid), stacks=stacks, stack=trains)
    family = _Family(rank=rank.rank, actors=actors, owners=owners, elapsed_s=elapsed_s)
    return _stands_in(family, rank.pid, ())


def _stands_in(family: _Family, pid: int, above: tuple[int, ...]) -> WaitState:
    """`above`: the processes that wait for this one, which can do nothing for it in the thread that waits."""
    actor = family.actors[pid]
    task = actor.task
    if _awaits_batch(actor.frames):
        return _loader(family, (*above, pid))
    if at_work := _pool_at_work(family, pid, above):
        return _pool(family, actor, at_work, (*above, pid))
    asked = _BY_CALL.get(task.syscall) if task else None
    if task is None or asked is None:
        return _unless_busy(family, WaitState(kind=WaitKind.UNKNOWN))
    return asked(family, actor, task, (*above, pid))


def _sleep(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    looks = actor.stack is not None and task.woke >= WAKES and only_looks(actor.stack.loop)
    alone = len(family.actors) == 1 and not actor.thread_may_act()
    polls = len(above) > 1 and task.woke >= WAKES  # then the end of this sleep ends nothing for who waits
    return WaitState(kind=WaitKind.SLEEP, until_s=None if polls else task.wakes_at_s, closed=looks and alone)


def _lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    if task.target:
        return _shared_lock(family, actor, task, above)
    closed = task.timed is False and actor.stack is not None and not actor.may_act
    computing = actor.computing(family.elapsed_s) if task.timed is False else ()
    motion = Motion.BURNING if computing else Motion.WAITING
    return _unless_busy(family, WaitState(kind=WaitKind.LOCK, closed=closed, motion=motion, computing=computing))


def _shared_lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    """A semaphore of several processes: each one that has it in its memory may give it back."""
    wait = WaitState(kind=WaitKind.LOCK, target=task.target)
    all_named = task.held_by is not None and len(task.held_by) < _NAMED_HOLDERS
    if task.timed is not False or not all_named or actor.thread_may_act():
        return _unless_busy(family, wait)
    idle = {pid for pid, other in family.actors.items() if _waits_for_orders(other)}
    sharers = tuple(pid for pid in task.held_by or () if pid not in idle)
    if not sharers:
        return replace(wait, closed=True)
    return _unless_busy(family, replace(_held(family, wait, replace(task, held_by=sharers), above), child=None))


def _waits_for_orders(actor: _Actor) -> bool:
    """A worker of a DataLoader that nobody has given anything to do."""
    within = any(frame.file.endswith(_WORKER) for frame in actor.frames)
    return within and not _fetches(actor.stack) and not actor.thread_may_act()


def _unless_busy(family: _Family, wait: WaitState) -> WaitState:
    """A child that computes may be what an open wait is for: a compiler, a pool of workers.

    Not one that the wait is already known to be for.
    """
    known = {next(iter(family.actors)), *(one.pid for one in wait.computing)}
    computes = (
        one.before is not None and cpu_share(one.before, one.process, family.elapsed_s) >= BUSY_SHARE
        for pid, one in family.actors.items()
        if pid not in known
    )
    return replace(wait, motion=Motion.MOVING, computing=()) if not wait.closed and any(computes) else wait


def _io(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    wait = WaitState(kind=WaitKind.IO, target=task.target)
    direct = task.syscall in _READS | _WRITES
    if task.target.startswith("socket:["):
        return _connection(family, actor, task, wait)
    if not task.target.startswith("pipe:[") and not task.target.endswith(" (deleted)"):
        return wait  # a file system, a device, or a FIFO, which others may still open by its name
    held = _held(family, wait, task, above)
    if not direct:  # a poll watches other descriptors too
        return replace(held, closed=False, peers=())
    return replace(held, kind=WaitKind.PIPE) if held.closed and task.syscall in _WRITES else held


def _connection(family: _Family, actor: _Actor, task: Task, wait: WaitState) -> WaitState:
    """A connection to a rank waits for that rank, any other for the world outside."""
    socket = next((one for one in actor.process.sockets if f"socket:[{one.inode}]" == task.target), None)
    if socket is None:
        return wait
    ends = socket.peer_rank is not None and socket.peer_rank != family.rank and task.syscall in _READS | _WRITES
    peers = (socket.peer_rank,) if ends and socket.peer_rank is not None else ()
    return replace(wait, target=socket.peer, peers=peers, closed=bool(peers))


def _held(family: _Family, wait: WaitState, task: Task, above: tuple[int, ...]) -> WaitState:
    """Closed by those who hold what is waited for: other ranks are waited for, the rest must be unable to act."""
    holders = task.held_by or ()
    of_the_job = all(pid in family.actors or pid in family.owners for pid in holders)
    if not of_the_job or not 0 < len(holders) < _NAMED_HOLDERS:
        return wait
    below = [pid for pid in holders if pid in family.actors and pid not in above]
    waiting = all(not family.actors[pid].may_act for pid in holders if pid in above)
    peers = {family.owners[pid] for pid in holders if pid not in family.actors}
    found = _with_children(wait, family, below, above, closed=waiting) if below else replace(wait, closed=waiting)
    return replace(found, peers=tuple(sorted(peers)) if found.closed else ())


def _file_lock(family: _Family, _: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    return _held(family, WaitState(kind=WaitKind.FILE_LOCK, target=task.target), task, above)


def _children(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    own = tuple(pid for pid, one in family.actors.items() if one.process.parent == actor.process.pid)
    wanted = task.held_by or own
    known = [pid for pid in wanted if pid in family.actors and pid not in above]
    return _with_children(WaitState(kind=WaitKind.CHILD), family, known, above, closed=len(known) == len(wanted))


# What a system call waits for; the processes that wait for this one, and itself, are `above`.
_BY_CALL: Mapping[str, Callable[[_Family, _Actor, Task, tuple[int, ...]], WaitState]] = {
    **dict.fromkeys(_IO_CALLS, _io),
    **dict.fromkeys(_FILE_LOCKS, _file_lock),
    **dict.fromkeys(_CHILD_CALLS, _children),
    **dict.fromkeys(SLEEPS, _sleep),
    "futex": _lock,
}


def _loader(family: _Family, above: tuple[int, ...]) -> WaitState:
    """A loop over a DataLoader ends when a worker that is at work hands over its batch."""
    workers = [pid for pid, actor in family.actors.items() if pid not in above and _fetches(actor.stack)]
    return _unless_busy(family, _with_children(WaitState(kind=WaitKind.LOADER), family, workers, above))


def _pool_at_work(family: _Family, pid: int, above: tuple[int, ...]) -> tuple[int, ...]:
    """The workers that have a task, of the pool whose result this process waits for; none where it waits for none."""
    pool = awaits_result(family.actors[pid].frames)
    if pool is None:
        return ()
    workers = ((one, actor.frames) for one, actor in family.actors.items() if one != pid and one not in above)
    return tuple(one for one, frames in workers if is_worker(pool, frames) and not awaits_task(frames))


def _pool(family: _Family, actor: _Actor, at_work: Sequence[int], above: tuple[int, ...]) -> WaitState:
    """Closed where each worker that has a task is, and nobody else is there who could give or do another one."""
    serving = [one for one in actor.stacks if serves_pool(one.frames)]
    others = actor.thread_may_act(serving)
    all_read = not any(one.is_unread for one in family.actors.values())
    found = _with_children(WaitState(kind=WaitKind.CHILD), family, at_work, above, closed=all_read and not others)
    return _unless_busy(family, found)


def _awaits_batch(frames: Sequence[Frame]) -> bool:
    """py-spy names a method with its class, faulthandler without."""
    asked = (frame.function.rpartition(".")[2] for frame in frames if frame.file.endswith(_LOADER))
    return any(name in _LOADER_CALLS for name in asked)


def _fetches(stack: Stack | None) -> bool:
    """A worker that does not wait for its next batch's indices."""
    frames = stack.frames if stack else ()
    inner = next((index for index, frame in enumerate(frames) if frame.file.endswith(_WORKER)), None)
    return inner is not None and (inner == 0 or not frames[inner - 1].file.endswith(_QUEUE))


def _with_children(
    wait: WaitState, family: _Family, pids: Sequence[int], above: tuple[int, ...], *, closed: bool = True
) -> WaitState:
    """Any of them may end the wait; `closed`: nobody else. Its end is readable where each one's is."""
    if not pids:
        return wait
    below = [_child(family, pid, above) for pid in pids]
    at_work = [(child, (child,) if child.kind is WaitKind.COMPUTE else child.computing) for child in below]
    computing = tuple(one for _, computes in at_work for one in computes)
    # A loop that never ends explains the wait only where nothing else that is waited for may end it.
    may_end = any(not child.closed and not computes for child, computes in at_work)
    moving = any(child.motion is Motion.MOVING for child in below) or (computing and may_end)
    ends = [child.deepest.until_s for child in below]
    shown = (child for child, computes in at_work if (computes if computing else child.closed))
    return replace(
        wait,
        motion=Motion.MOVING if moving else Motion.BURNING if computing else wait.motion,
        closed=closed and all(child.closed for child in below),
        until_s=None if None in ends else min(end for end in ends if end is not None),
        child=next(shown, below[0]),
        computing=() if moving else computing,
    )


def _child(family: _Family, pid: int, above: tuple[int, ...]) -> ChildWait:
    actor = family.actors[pid]
    moved = _motion(actor, family.elapsed_s)
    if moved is not Motion.WAITING or len(above) > _DEEPEST:
        kind = OF_MOTION.get(moved, WaitKind.UNKNOWN)
        found = WaitState(kind=kind, motion=moved, closed=moved is Motion.STOPPED)
    else:
        found = _stands_in(family, pid, above)
    return ChildWait(
        **vars(replace(found, closed=found.closed and not found.peers)),
        pid=pid,
        command=actor.process.command,
        leaf=actor.frames[0] if actor.frames else None,
        user=user_frame(actor.frames),
    )


def _motion(actor: _Actor, elapsed_s: float) -> Motion:
    """CPU time or bytes of a child are motion, unless its samples can tell a loop from work."""
    process, before = actor.process, actor.before
    if process.state in "ZX":
        return Motion.GONE
    if process.state in "Tt":
        return Motion.STOPPED
    if before is None:
        return Motion.MOVING
    if cpu_share(before, process, elapsed_s) >= STARVED_SHARE:
        return Motion.BURNING if _only_computes(actor, before, elapsed_s) else Motion.MOVING
    return Motion.MOVING if _moved_bytes(before, process) else Motion.WAITING


def _only_computes(actor: _Actor, before: Process, elapsed_s: float) -> bool:
    """In the thread whose lines are known, and it moves no byte: a worker that decodes reads a little at a time."""
    task = actor.task
    earlier_s = next((one.cpu_s for one in before.tasks if task and one.tid == task.tid), None)
    if not actor.frames or task is None or earlier_s is None or task.cpu_s - earlier_s < STARVED_SHARE * elapsed_s:
        return False
    return not _moved_bytes(before, actor.process)


def _moved_bytes(before: Process, after: Process) -> bool:
    return before.io_bytes != after.io_bytes or carried(before, after)
