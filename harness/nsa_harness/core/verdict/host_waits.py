"""Determine what a process waits for on its own host: a lock, a pipe, a file, a child process or similar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack, StatusFile
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.process_pools import awaits_result, awaits_task, is_worker, serves_pool
from nsa_harness.core.evidence.stacks import NativeWait, in_function, is_poller, native_wait, training_stack, user_frame
from nsa_harness.core.source_code.loops import only_polls, only_reports
from nsa_harness.core.verdict.motion import (
    BUSY_SHARE,
    SLEEPS,
    STARVED_SHARE,
    Motion,
    cpu_share,
    has_connection_traffic,
    is_stopped_by_job,
)
from nsa_harness.core.verdict.wait import KIND_OF_MOTION, ChildWait, WaitKind, WaitState

_LIBRARY_THREADS = ("gloo", "pt_", "cuda", "nccl", "jemalloc", "TP_")  # TP_: TensorPipe, which spins
POLLING_WAKES = 2  # a thread that woke up this often and sleeps again on the same line is in a polling loop
_BLOCKING_IO = {"read", "write", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "fsync", "flock"}


def is_from_spawn(command: str) -> bool:
    """Return whether multiprocessing started this command in a new interpreter, to run a function of the program."""
    return any(word in command for word in _FRESH_PROCESSES)


def compiles(frames: Sequence[Frame]) -> bool:
    """Return whether the thread runs a compiler of torch or Triton."""
    return any(in_function(frames, compiler) for compiler in _COMPILERS)


def is_library(task: Task) -> bool:
    """Return whether the thread belongs to PyTorch, gloo or a driver, according to its name."""
    return task.comm.startswith(_LIBRARY_THREADS)


def _native_thread_may_act(task: Task) -> bool:
    """Return whether a thread without Python frames could end the wait of another thread.

    It could if it runs, or is in a read or write. A thread that only polls (in epoll or timed waits) is the event loop
    of a library, such as gloo, autograd or an allocator. It does not count.
    """
    return not is_library(task) and (task.state in "RD" or task.syscall in _BLOCKING_IO)


def _may_act(stack: Stack, tasks: Mapping[int, Task]) -> bool:
    """Return whether a Python thread could act: unless it waits for a lock of Python or only polls."""
    if is_poller(stack):
        return False
    task = tasks.get(stack.tid) if stack.tid else None
    if task is not None and task.wake_count >= POLLING_WAKES and only_reports(stack.loop):
        return False
    if native_wait(stack) not in _ENDED_BY_PYTHON:
        return True
    return task is None or task.syscall != "futex" or task.timed is not False


# Kinds of waits that only a Python thread of the process can end. None: the native frames were not read.
_ENDED_BY_PYTHON = (None, NativeWait.PYTHON_LOCK)
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
# Parts of the command line of a process that multiprocessing started in a new interpreter.
_FRESH_PROCESSES = ("multiprocessing.spawn", "multiprocessing.forkserver", "multiprocessing-fork")
# Frames that are on a stack only during compilation, not while compiled code runs.
_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/async_compile.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
_MAX_HOLDERS = 16  # longest list of lock holders; a full list may be incomplete
_MAX_DEPTH = 8  # levels of child processes that are followed


@dataclass(frozen=True, kw_only=True)
class _Actor:
    """A process of a rank, together with the thread whose wait is examined."""

    process: Process
    before: Process | None  # the process in the snapshot before
    stacks: tuple[Stack, ...]
    stack: Stack | None  # stack of the thread whose wait is examined

    @property
    def task(self) -> Task | None:
        """The kernel's record of the examined thread, or None if there is none."""
        tid = self.stack.tid if self.stack and self.stack.tid else self.process.pid
        return next((task for task in self.process.tasks if task.tid == tid), None)

    @property
    def may_act(self) -> bool:
        """Whether another thread or process could end the wait of the examined thread."""
        return self.thread_may_act() or in_function(self.frames, "multiprocessing/synchronize.py") is not None

    def thread_may_act(self, idle: Sequence[Stack] = ()) -> bool:
        """Return whether another thread of the process, not in `idle`, could end the examined thread's wait."""
        tasks = {task.tid: task for task in self.process.tasks}
        in_python = {stack.tid for stack in self.stacks if stack.frames}
        native = (task for tid, task in tasks.items() if tid not in in_python)
        python = (stack for stack in self.stacks if stack is not self.stack and stack.frames and stack not in idle)
        may_act = any(_may_act(stack, tasks) for stack in python) or any(map(_native_thread_may_act, native))
        return self.stack is None or may_act

    def computing(self, elapsed_s: float) -> tuple[ChildWait, ...]:
        """Return the other threads in the process that are computing."""
        earlier_s = {task.tid: task.cpu_s for task in self.before.tasks} if self.before else {}
        used_s = {task.tid: task.cpu_s - earlier_s.get(task.tid, task.cpu_s) for task in self.process.tasks}
        busy = [
            stack
            for stack in self.stacks
            if stack is not self.stack and stack.frames and used_s.get(stack.tid or 0, 0.0) >= STARVED_SHARE * elapsed_s
        ]
        if self.stack is None or self.thread_may_act(busy) or any(compiles(stack.frames) for stack in busy):
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
        """The frames of the examined thread, innermost first. The value is empty if they are unknown."""
        return self.stack.frames if self.stack else ()

    @property
    def is_unread(self) -> bool:
        """Whether the process runs Python but its stacks could not be read."""
        return not self.frames and "python" in self.process.command and self.process.state not in "ZX"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A rank and its child processes, with the owners of the job's other processes."""

    rank: int
    actors: Mapping[int, _Actor]  # by process id; the rank's own process comes first
    owners: Mapping[int, int]  # process id -> rank, for all ranks and their child processes
    elapsed_s: float  # time between the two snapshots
    status_file: StatusFile | None  # of the rank

    def runs_program(self, pid: int) -> bool:
        """Return whether a process runs the rank's own program: the rank itself, a fork of it, or a process that
        multiprocessing started for it.

        A command that the program starts, such as a compiler, is another program, and so are its child processes.
        """
        rank_pid = next(iter(self.actors))
        for _ in range(_MAX_DEPTH):
            if pid == rank_pid:
                return True
            process = self.actors[pid].process
            parent = self.actors.get(process.parent)
            if parent is None or not (process.command == parent.process.command or is_from_spawn(process.command)):
                return False
            pid = parent.process.pid
        return False


def host_wait(
    before: RankSnapshot | None, rank: RankSnapshot, stack: Stack | None, owners: Mapping[int, int], elapsed_s: float
) -> WaitState:
    """Return the wait of a rank's thread on its own host.

    `before` is the rank in the snapshot before, `elapsed_s` earlier. `stack` is the stack of the thread. `owners` maps
    the process ids of all ranks and their child processes to their rank.
    """
    if rank.process is None:
        return WaitState(kind=WaitKind.LOADER if stack and _awaits_batch(stack.frames) else WaitKind.UNKNOWN)
    process_before = before.process if before else None
    actors = {rank.pid: _Actor(process=rank.process, before=process_before, stacks=rank.stacks, stack=stack)}
    earlier = {child.pid: child for child in before.children} if before else {}
    for child in rank.children:
        stacks = rank.child_stacks.get(child.pid, ())
        main_stack = training_stack(stacks, child.pid)
        actors[child.pid] = _Actor(process=child, before=earlier.get(child.pid), stacks=stacks, stack=main_stack)
    family = _Family(rank=rank.rank, actors=actors, owners=owners, elapsed_s=elapsed_s, status_file=rank.status_file)
    return _wait_of(family, rank.pid, ())


def _wait_of(family: _Family, pid: int, above: tuple[int, ...]) -> WaitState:
    """Return the wait of a process. `above` contains the ids of the processes that wait for it."""
    actor = family.actors[pid]
    task = actor.task
    if _awaits_batch(actor.frames):
        return _loader(family, (*above, pid))
    if workers := _busy_pool_workers(family, pid, above):
        return _pool(family, actor, workers, (*above, pid))
    find_wait = _BY_CALL.get(task.syscall) if task else None
    if task is None or find_wait is None:
        return _unless_busy(family, WaitState(kind=WaitKind.UNKNOWN))
    return find_wait(family, actor, task, (*above, pid))


def _sleep(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    """Return the wait of a sleeping thread, closed in a polling loop that nothing else in the rank can end."""
    is_endless_poll = actor.stack is not None and task.wake_count >= POLLING_WAKES and only_polls(actor.stack.loop)
    is_alone = len(family.actors) == 1 and not actor.thread_may_act()
    # The end of a child's sleep in a polling loop does not end the wait of the processes above it.
    is_polling_child = len(above) > 1 and task.wake_count >= POLLING_WAKES
    return WaitState(
        kind=WaitKind.SLEEP,
        until_s=None if is_polling_child else task.wakes_at_s,
        is_closed=is_endless_poll and is_alone,
    )


def _lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    if task.target:
        return _shared_lock(family, actor, task, above)
    is_closed = task.timed is False and actor.stack is not None and not actor.may_act
    if actor.stack is not None and not actor.stack.gil:
        wait = native_wait(actor.stack)
        # With the probe, a future of torch that a collective completes counts as a wait in this collective.
        is_closed &= wait in _ENDED_BY_PYTHON or (wait is NativeWait.FUTURE and family.status_file is not None)
    computing = actor.computing(family.elapsed_s) if task.timed is False else ()
    motion = Motion.BURNING if computing else Motion.WAITING
    return _unless_busy(family, WaitState(kind=WaitKind.LOCK, is_closed=is_closed, motion=motion, computing=computing))


def lock_is_closed(process: Process, stacks: Sequence[Stack], stack: Stack, idle: Sequence[Stack]) -> bool:
    """Return whether a thread of the process waits for a lock of Python that no other thread may release."""
    actor = _Actor(process=process, before=None, stacks=tuple(stacks), stack=stack)
    is_in_lock = actor.task is not None and actor.task.syscall == "futex" and actor.task.timed is False
    return is_in_lock and native_wait(stack) in _ENDED_BY_PYTHON and not actor.thread_may_act(idle)


def _shared_lock(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    """Return a wait for a lock in memory that several processes share and may release."""
    wait = WaitState(kind=WaitKind.LOCK, target=task.target)
    is_complete = task.held_by is not None and len(task.held_by) < _MAX_HOLDERS
    if task.timed is not False or not is_complete or actor.thread_may_act():
        return _unless_busy(family, wait)
    idle = {pid for pid, other in family.actors.items() if _has_no_request(other)}
    sharers = tuple(pid for pid in task.held_by or () if pid not in idle)
    if not sharers:
        return replace(wait, is_closed=True)
    return _unless_busy(
        family, replace(_wait_for_holders(family, wait, replace(task, held_by=sharers), above), child=None)
    )


def _has_no_request(actor: _Actor) -> bool:
    """Return whether the process is an idle DataLoader worker."""
    is_loader_worker = any(frame.file.endswith(_WORKER) for frame in actor.frames)
    return is_loader_worker and not _is_at_work(actor.stack) and not actor.thread_may_act()


def _unless_busy(family: _Family, wait: WaitState) -> WaitState:
    """Return the wait, but MOVING if a busy child, other than those known to compute, could end it."""
    ignored_pids = {next(iter(family.actors)), *(child.pid for child in wait.computing)}
    computes = (
        actor.before is not None and cpu_share(actor.before, actor.process, family.elapsed_s) >= BUSY_SHARE
        for pid, actor in family.actors.items()
        if pid not in ignored_pids
    )
    return replace(wait, motion=Motion.MOVING, computing=()) if not wait.is_closed and any(computes) else wait


def _io(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    wait = WaitState(kind=WaitKind.IO, target=task.target)
    is_read_or_write = task.syscall in _READS | _WRITES
    if task.target.startswith("socket:["):
        return _connection(family, actor, task, wait)
    if not task.target.startswith("pipe:[") and not task.target.endswith(" (deleted)"):
        return wait  # a file system, a device, or a FIFO that another process may still open by its name
    pipe_wait = _wait_for_holders(family, wait, task, above)
    if not is_read_or_write:  # a poll watches other descriptors too
        return replace(pipe_wait, is_closed=False, peers=())
    return replace(pipe_wait, kind=WaitKind.PIPE) if pipe_wait.is_closed and task.syscall in _WRITES else pipe_wait


def _connection(family: _Family, actor: _Actor, task: Task, wait: WaitState) -> WaitState:
    """Return a wait on a TCP connection, or for the rank at the other end of the connection if there is one."""
    socket = next((end for end in actor.process.sockets if f"socket:[{end.inode}]" == task.target), None)
    if socket is None:
        return wait
    waits_for_rank = (
        socket.peer_rank is not None and socket.peer_rank != family.rank and task.syscall in _READS | _WRITES
    )
    peers = (socket.peer_rank,) if waits_for_rank and socket.peer_rank is not None else ()
    return replace(wait, target=socket.peer, peers=peers, is_closed=bool(peers))


def _wait_for_holders(family: _Family, wait: WaitState, task: Task, above: tuple[int, ...]) -> WaitState:
    """Return a wait for the holders of a lock or pipe, closed if all are other ranks or cannot end it."""
    holders = task.held_by or ()
    are_in_job = all(pid in family.actors or pid in family.owners for pid in holders)
    if not are_in_job or not 0 < len(holders) < _MAX_HOLDERS:
        return wait
    below = [pid for pid in holders if pid in family.actors and pid not in above]
    is_closed = all(not family.actors[pid].may_act for pid in holders if pid in above)
    peers = {family.owners[pid] for pid in holders if pid not in family.actors}
    if below:
        wait = _wait_for_children(wait, family, below, above, is_closed=is_closed)
    else:
        wait = replace(wait, is_closed=is_closed)
    return replace(wait, peers=tuple(sorted(peers)) if wait.is_closed else ())


def _file_lock(family: _Family, _: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    return _wait_for_holders(family, WaitState(kind=WaitKind.FILE_LOCK, target=task.target), task, above)


def _children(family: _Family, actor: _Actor, task: Task, above: tuple[int, ...]) -> WaitState:
    own_children = tuple(pid for pid, child in family.actors.items() if child.process.parent == actor.process.pid)
    awaited_pids = task.held_by or own_children
    known_pids = [pid for pid in awaited_pids if pid in family.actors and pid not in above]
    return _wait_for_children(
        WaitState(kind=WaitKind.CHILD), family, known_pids, above, is_closed=len(known_pids) == len(awaited_pids)
    )


# System call -> function that returns the wait. Its argument `above` includes the waiting process itself.
_BY_CALL: Mapping[str, Callable[[_Family, _Actor, Task, tuple[int, ...]], WaitState]] = {
    **dict.fromkeys(_IO_CALLS, _io),
    **dict.fromkeys(_FILE_LOCKS, _file_lock),
    **dict.fromkeys(_CHILD_CALLS, _children),
    **dict.fromkeys(SLEEPS, _sleep),
    "futex": _lock,
}


def _loader(family: _Family, above: tuple[int, ...]) -> WaitState:
    """Return a wait for a batch from the busy workers of a DataLoader."""
    workers = [pid for pid, actor in family.actors.items() if pid not in above and _is_at_work(actor.stack)]
    return _unless_busy(family, _wait_for_children(WaitState(kind=WaitKind.LOADER), family, workers, above))


def _busy_pool_workers(family: _Family, pid: int, above: tuple[int, ...]) -> tuple[int, ...]:
    """Return the process ids of the busy workers of the process pool that a process waits for."""
    pool = awaits_result(family.actors[pid].frames)
    if pool is None:
        return ()
    workers = (
        (worker, actor.frames) for worker, actor in family.actors.items() if worker != pid and worker not in above
    )
    return tuple(worker for worker, frames in workers if is_worker(pool, frames) and not awaits_task(frames))


def _pool(family: _Family, actor: _Actor, workers: Sequence[int], above: tuple[int, ...]) -> WaitState:
    """Return a wait for busy pool workers, closed if none can continue and no thread can add a task."""
    pool_threads = [stack for stack in actor.stacks if serves_pool(stack.frames)]
    others_may_act = actor.thread_may_act(pool_threads)
    all_read = not any(member.is_unread for member in family.actors.values())
    is_closed = all_read and not others_may_act
    return _unless_busy(
        family, _wait_for_children(WaitState(kind=WaitKind.CHILD), family, workers, above, is_closed=is_closed)
    )


def _awaits_batch(frames: Sequence[Frame]) -> bool:
    """Return whether the thread is waiting for a batch from a DataLoader."""
    functions = (frame.function.rpartition(".")[2] for frame in frames if frame.file.endswith(_LOADER))
    return any(name in _LOADER_CALLS for name in functions)


def _is_at_work(stack: Stack | None) -> bool:
    """Return whether the thread belongs to a DataLoader worker that is loading a batch."""
    frames = stack.frames if stack else ()
    inner = next((index for index, frame in enumerate(frames) if frame.file.endswith(_WORKER)), None)
    return inner is not None and (inner == 0 or not frames[inner - 1].file.endswith(_QUEUE))


def _wait_for_children(
    wait: WaitState, family: _Family, pids: Sequence[int], above: tuple[int, ...], *, is_closed: bool = True
) -> WaitState:
    """Return a wait for any of several child processes. `is_closed`: nothing else can end it."""
    if not pids:
        return wait
    children = [_child(family, pid, above) for pid in pids]
    computing_in = [(child, (child,) if child.kind is WaitKind.COMPUTE else child.computing) for child in children]
    computing = tuple(process for _, processes in computing_in for process in processes)
    # An endless loop explains the wait only if none of the other processes may end it.
    others_may_end = any(not child.is_closed and not processes for child, processes in computing_in)
    is_moving = any(child.motion is Motion.MOVING for child in children) or (computing and others_may_end)
    ends_s = [child.deepest.until_s for child in children]
    explaining = (child for child, processes in computing_in if (processes if computing else child.is_closed))
    return replace(
        wait,
        motion=Motion.MOVING if is_moving else Motion.BURNING if computing else wait.motion,
        is_closed=is_closed and all(child.is_closed for child in children),
        until_s=None if None in ends_s else min(end_s for end_s in ends_s if end_s is not None),
        child=next(explaining, children[0]),
        computing=() if is_moving else computing,
    )


def _child(family: _Family, pid: int, above: tuple[int, ...]) -> ChildWait:
    actor = family.actors[pid]
    motion = _motion(actor, family.elapsed_s, runs_program=family.runs_program(pid))
    if motion is not Motion.WAITING or len(above) > _MAX_DEPTH:
        kind = KIND_OF_MOTION.get(motion, WaitKind.UNKNOWN)
        wait = WaitState(kind=kind, motion=motion, is_closed=is_stopped_by_job(actor.process, (family.status_file,)))
    else:
        wait = _wait_of(family, pid, above)
    return ChildWait(
        **vars(replace(wait, is_closed=wait.is_closed and not wait.peers)),
        pid=pid,
        command=actor.process.command,
        leaf=actor.frames[0] if actor.frames else None,
        user_frame=user_frame(actor.frames),
    )


def _motion(actor: _Actor, elapsed_s: float, *, runs_program: bool) -> Motion:
    """Return what a child process has been doing since the previous snapshot.

    Use of CPU time counts as progress, with one exception: if the process runs the rank's own program
    (`runs_program`), its lines are known and it transferred no bytes, it is BURNING, because later samples of these
    lines show whether it is in an endless loop. The lines of a compiler, or of any other command, show no such thing:
    a long computation of such a command may stay on one line until it is done.
    """
    process, before = actor.process, actor.before
    if process.state in "ZX":
        return Motion.GONE
    if process.state in "Tt":
        return Motion.STOPPED
    if before is None:
        return Motion.MOVING
    if cpu_share(before, process, elapsed_s) >= STARVED_SHARE:
        may_loop = runs_program and not compiles(actor.frames) and _only_computes(actor, before, elapsed_s)
        return Motion.BURNING if may_loop else Motion.MOVING
    return Motion.MOVING if _has_transferred(before, process) else Motion.WAITING


def _only_computes(actor: _Actor, before: Process, elapsed_s: float) -> bool:
    """Return whether the child process only computes, without reading or writing data."""
    task = actor.task
    earlier_s = next((thread.cpu_s for thread in before.tasks if task and thread.tid == task.tid), None)
    if not actor.frames or task is None or earlier_s is None or task.cpu_s - earlier_s < STARVED_SHARE * elapsed_s:
        return False
    return not _has_transferred(before, actor.process)


def _has_transferred(before: Process, after: Process) -> bool:
    """Return whether the process read, wrote, sent or received bytes between the snapshots."""
    return before.io_bytes != after.io_bytes or has_connection_traffic(before, after)
