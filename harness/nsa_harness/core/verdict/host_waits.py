"""Find what a process waits for on its host: locks, pipes, files, connections, child processes, workers or time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.stacks import (
    awaits_result,
    awaits_task,
    in_function,
    is_poller,
    is_worker,
    serves_pool,
    training_stack,
    user_frame,
)
from nsa_harness.core.source_code.loops import only_polls, only_reports
from nsa_harness.core.verdict.motion import BUSY_SHARE, SLEEPS, STARVED_SHARE, Motion, cpu_share, has_connection_traffic
from nsa_harness.core.verdict.wait import KIND_OF_MOTION, ChildWait, WaitKind, WaitState

_LIBRARY_THREADS = ("gloo", "pt_", "cuda", "nccl", "jemalloc")
POLLING_WAKES = 2  # wake-ups on one sleep line without effect; one more sleep there is polling
_BLOCKING_IO = {"read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock"}


def is_library(task: Task) -> bool:
    """Whether the thread belongs to torch, gloo or a driver, by its name."""
    return task.comm.startswith(_LIBRARY_THREADS)


def _natively_busy(task: Task) -> bool:
    """Whether a thread without Python frames may end the wait: it runs, or is in a read or write that can end.

    A thread that only polls (epoll, timed waits) is a library's event loop. gloo, autograd and allocators keep such
    threads.
    """
    return not is_library(task) and (task.state in "RD" or task.syscall in _BLOCKING_IO)


def _may_act(stack: Stack, tasks: Mapping[int, Task]) -> bool:
    """Whether the thread can act: it waits for no lock and does not only poll."""
    if is_poller(stack):
        return False
    task = tasks.get(stack.tid) if stack.tid else None
    if task is not None and task.wake_count >= POLLING_WAKES and only_reports(stack.loop):
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
_NAMED_HOLDERS = 16  # longest list of lock holders; a full list may be incomplete
_DEEPEST = 8  # levels of child processes that are followed


@dataclass(frozen=True, kw_only=True)
class _Actor:
    """One process at this moment, and the thread of it that waits."""

    process: Process
    before: Process | None
    stacks: tuple[Stack, ...]
    stack: Stack | None

    @property
    def task(self) -> Task | None:
        tid = self.stack.tid if self.stack and self.stack.tid else self.process.pid
        return next((task for task in self.process.tasks if task.tid == tid), None)

    @property
    def may_act(self) -> bool:
        """Whether another thread of the process, or another process that shares the lock, can act."""
        return self.thread_may_act() or in_function(self.frames, "multiprocessing/synchronize.py") is not None

    def thread_may_act(self, idle: Sequence[Stack] = ()) -> bool:
        """Whether any thread can act, apart from the waiting thread and threads known to be idle."""
        tasks = {task.tid: task for task in self.process.tasks}
        in_python = {stack.tid for stack in self.stacks if stack.frames}
        native = (task for tid, task in tasks.items() if tid not in in_python)
        python = (stack for stack in self.stacks if stack is not self.stack and stack.frames and stack not in idle)
        acts = any(_may_act(stack, tasks) for stack in python) or any(_natively_busy(task) for task in native)
        return self.stack is None or acts

    def computing(self, elapsed_s: float) -> tuple[ChildWait, ...]:
        """Return the threads that compute, if every thread that can act computes on known lines."""
        earlier_s = {task.tid: task.cpu_s for task in self.before.tasks} if self.before else {}
        used_s = {task.tid: task.cpu_s - earlier_s.get(task.tid, task.cpu_s) for task in self.process.tasks}
        busy = [
            stack
            for stack in self.stacks
            if stack is not self.stack and stack.frames and used_s.get(stack.tid or 0, 0.0) >= STARVED_SHARE * elapsed_s
        ]
        if self.stack is None or self.thread_may_act(busy):
            return ()
        return tuple(
            ChildWait(
                kind=WaitKind.COMPUTE,
                motion=Motion.BURNING,
                pid=stack.tid or 0,
                command=self.process.command,
                thread=stack.thread,
                leaf=stack.frames[0],
                user_frame=user_frame(stack.frames),
            )
            for stack in busy
        )

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.stack.frames if self.stack else ()

    @property
    def is_unread(self) -> bool:
        """Whether the process runs Python and its stacks could not be read."""
        return not self.frames and "python" in self.process.command and self.process.state not in "ZX"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A rank, the processes below it, and the owners of the job's other processes."""

    rank: int
    actors: Mapping[int, _Actor]
    owners: Mapping[int, int]  # process -> rank, for all other ranks and their children
    elapsed_s: float


def host_wait(
    before: RankSnapshot | None, rank: RankSnapshot, stack: Stack | None, owners: Mapping[int, int], elapsed_s: float
) -> WaitState:
    """Return what the thread of `stack` waits for on its host. `owners` maps each process of the job to its rank."""
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
    return _wait_of(family, rank.pid, ())


def _wait_of(family: _Family, pid: int, above: tuple[int, ...]) -> WaitState:
    """Return what process `pid` waits for. `above` are the processes that wait for it, directly or indirectly."""
    actor = family.actors[pid]
    task = actor.task
    if _awaits_batch(actor.frames):
        return _loader(family, (*above, pid))
    if at_work := _pool_at_work(family, pid, above):
        return _pool(family, actor, at_work, (*above, pid))
    find_wait = _BY_CALL.get(task.syscall) if task else None
    if task is None or find_wait is None:
        return _unless_busy(family, WaitState(kind=WaitKind.UNKNOWN))
    return find_wait(family, actor, task, (*above, pid))


def _sleep(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    only_reads = actor.stack is not None and task.wake_count >= POLLING_WAKES and only_polls(actor.stack.loop)
    alone = len(family.actors) == 1 and not actor.thread_may_act()
    polls = (
        len(above) > 1 and task.wake_count >= POLLING_WAKES
    )  # the end of this sleep then ends nothing for the processes above
    return WaitState(kind=WaitKind.SLEEP, until_s=None if polls else task.wakes_at_s, closed=only_reads and alone)


def _lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    if task.target:
        return _shared_lock(family, actor, task, above)
    closed = task.timed is False and actor.stack is not None and not actor.may_act
    computing = actor.computing(family.elapsed_s) if task.timed is False else ()
    motion = Motion.BURNING if computing else Motion.WAITING
    return _unless_busy(family, WaitState(kind=WaitKind.LOCK, closed=closed, motion=motion, computing=computing))


def _shared_lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    """Return the wait for a semaphore in shared memory. Any process that maps this memory may release it."""
    wait = WaitState(kind=WaitKind.LOCK, target=task.target)
    all_named = task.held_by is not None and len(task.held_by) < _NAMED_HOLDERS
    if task.timed is not False or not all_named or actor.thread_may_act():
        return _unless_busy(family, wait)
    idle = {pid for pid, other in family.actors.items() if _has_no_request(other)}
    sharers = tuple(pid for pid in task.held_by or () if pid not in idle)
    if not sharers:
        return replace(wait, closed=True)
    return _unless_busy(
        family, replace(_wait_for_holders(family, wait, replace(task, held_by=sharers), above), child=None)
    )


def _has_no_request(actor: _Actor) -> bool:
    """Whether the process is a DataLoader worker without a request."""
    within = any(frame.file.endswith(_WORKER) for frame in actor.frames)
    return within and not _is_at_work(actor.stack) and not actor.thread_may_act()


def _unless_busy(family: _Family, wait: WaitState) -> WaitState:
    """Return the wait; mark it as MOVING if it is open and a computing child may end it, such as a compiler.

    A child that explains the wait already does not count.
    """
    explained = {next(iter(family.actors)), *(child.pid for child in wait.computing)}
    computes = (
        actor.before is not None and cpu_share(actor.before, actor.process, family.elapsed_s) >= BUSY_SHARE
        for pid, actor in family.actors.items()
        if pid not in explained
    )
    return replace(wait, motion=Motion.MOVING, computing=()) if not wait.closed and any(computes) else wait


def _io(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    wait = WaitState(kind=WaitKind.IO, target=task.target)
    direct = task.syscall in _READS | _WRITES
    if task.target.startswith("socket:["):
        return _connection(family, actor, task, wait)
    if not task.target.startswith("pipe:[") and not task.target.endswith(" (deleted)"):
        return wait  # a file system, a device, or a FIFO that other processes may still open by its name
    held = _wait_for_holders(family, wait, task, above)
    if not direct:  # a poll watches other descriptors too
        return replace(held, closed=False, peers=())
    return replace(held, kind=WaitKind.PIPE) if held.closed and task.syscall in _WRITES else held


def _connection(family: _Family, actor: _Actor, task: Task, wait: WaitState) -> WaitState:
    """Return the wait on a connection. It is a wait for a rank if the other end belongs to one."""
    socket = next((end for end in actor.process.sockets if f"socket:[{end.inode}]" == task.target), None)
    if socket is None:
        return wait
    ends = socket.peer_rank is not None and socket.peer_rank != family.rank and task.syscall in _READS | _WRITES
    peers = (socket.peer_rank,) if ends and socket.peer_rank is not None else ()
    return replace(wait, target=socket.peer, peers=peers, closed=bool(peers))


def _wait_for_holders(family: _Family, wait: WaitState, task: Task, above: tuple[int, ...]) -> WaitState:
    """Return the wait, closed if its holders are ranks or cannot act."""
    holders = task.held_by or ()
    of_the_job = all(pid in family.actors or pid in family.owners for pid in holders)
    if not of_the_job or not 0 < len(holders) < _NAMED_HOLDERS:
        return wait
    below = [pid for pid in holders if pid in family.actors and pid not in above]
    waiting = all(not family.actors[pid].may_act for pid in holders if pid in above)
    peers = {family.owners[pid] for pid in holders if pid not in family.actors}
    held = _wait_for_children(wait, family, below, above, closed=waiting) if below else replace(wait, closed=waiting)
    return replace(held, peers=tuple(sorted(peers)) if held.closed else ())


def _file_lock(family: _Family, _: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    return _wait_for_holders(family, WaitState(kind=WaitKind.FILE_LOCK, target=task.target), task, above)


def _children(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    own = tuple(pid for pid, child in family.actors.items() if child.process.parent == actor.process.pid)
    awaited = task.held_by or own
    followed = [pid for pid in awaited if pid in family.actors and pid not in above]
    return _wait_for_children(
        WaitState(kind=WaitKind.CHILD), family, followed, above, closed=len(followed) == len(awaited)
    )


# The function that finds the wait, by system call. `above` has the waiting processes, including this one.
_BY_CALL: Mapping[str, Callable[[_Family, _Actor, Task, tuple[int, ...]], WaitState]] = {
    **dict.fromkeys(_IO_CALLS, _io),
    **dict.fromkeys(_FILE_LOCKS, _file_lock),
    **dict.fromkeys(_CHILD_CALLS, _children),
    **dict.fromkeys(SLEEPS, _sleep),
    "futex": _lock,
}


def _loader(family: _Family, above: tuple[int, ...]) -> WaitState:
    """Return the wait of a loop over a DataLoader, which ends when a busy worker hands over its batch."""
    workers = [pid for pid, actor in family.actors.items() if pid not in above and _is_at_work(actor.stack)]
    return _unless_busy(family, _wait_for_children(WaitState(kind=WaitKind.LOADER), family, workers, above))


def _pool_at_work(family: _Family, pid: int, above: tuple[int, ...]) -> tuple[int, ...]:
    """Return the busy workers of the pool whose result this process waits for; none if it waits for no pool."""
    pool = awaits_result(family.actors[pid].frames)
    if pool is None:
        return ()
    workers = (
        (worker, actor.frames) for worker, actor in family.actors.items() if worker != pid and worker not in above
    )
    return tuple(worker for worker, frames in workers if is_worker(pool, frames) and not awaits_task(frames))


def _pool(family: _Family, actor: _Actor, at_work: Sequence[int], above: tuple[int, ...]) -> WaitState:
    """Return the wait for a pool. It is closed if all busy workers are in closed waits and no thread can add a task."""
    serving = [stack for stack in actor.stacks if serves_pool(stack.frames)]
    others = actor.thread_may_act(serving)
    all_read = not any(member.is_unread for member in family.actors.values())
    wait = _wait_for_children(WaitState(kind=WaitKind.CHILD), family, at_work, above, closed=all_read and not others)
    return _unless_busy(family, wait)


def _awaits_batch(frames: Sequence[Frame]) -> bool:
    """Whether the thread waits for a batch of a DataLoader. Only py-spy prefixes a method with its class."""
    functions = (frame.function.rpartition(".")[2] for frame in frames if frame.file.endswith(_LOADER))
    return any(name in _LOADER_CALLS for name in functions)


def _is_at_work(stack: Stack | None) -> bool:
    """Whether the worker does something other than wait for the indices of its next batch."""
    frames = stack.frames if stack else ()
    inner = next((index for index, frame in enumerate(frames) if frame.file.endswith(_WORKER)), None)
    return inner is not None and (inner == 0 or not frames[inner - 1].file.endswith(_QUEUE))


def _wait_for_children(
    wait: WaitState, family: _Family, pids: Sequence[int], above: tuple[int, ...], *, closed: bool = True
) -> WaitState:
    """Return the wait for these children, any of which may end it. `closed` means that nothing else can end it."""
    if not pids:
        return wait
    below = [_child(family, pid, above) for pid in pids]
    at_work = [(child, (child,) if child.kind is WaitKind.COMPUTE else child.computing) for child in below]
    computing = tuple(child for _, computes in at_work for child in computes)
    # A loop that never ends explains the wait only if nothing else that is waited for may end it.
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
        kind = KIND_OF_MOTION.get(moved, WaitKind.UNKNOWN)
        wait = WaitState(kind=kind, motion=moved, closed=moved is Motion.STOPPED)
    else:
        wait = _wait_of(family, pid, above)
    return ChildWait(
        **vars(replace(wait, closed=wait.closed and not wait.peers)),
        pid=pid,
        command=actor.process.command,
        leaf=actor.frames[0] if actor.frames else None,
        user_frame=user_frame(actor.frames),
    )


def _motion(actor: _Actor, elapsed_s: float) -> Motion:
    """Return the motion of a child process of a rank.

    CPU time counts as progress, unless it was used on known lines and no bytes were transferred: later samples of these
    lines then show whether it is an endless loop.
    """
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
    """Whether the child computes in its thread with known lines and transfers no bytes, unlike a decoding worker."""
    task = actor.task
    earlier_s = next((thread.cpu_s for thread in before.tasks if task and thread.tid == task.tid), None)
    if not actor.frames or task is None or earlier_s is None or task.cpu_s - earlier_s < STARVED_SHARE * elapsed_s:
        return False
    return not _moved_bytes(before, actor.process)


def _moved_bytes(before: Process, after: Process) -> bool:
    return before.io_bytes != after.io_bytes or has_connection_traffic(before, after)
