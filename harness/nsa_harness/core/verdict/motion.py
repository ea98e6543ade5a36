"""The motion of a rank between two snapshots: it makes progress, waits, only computes, is stopped, or is gone."""

from __future__ import annotations

from enum import StrEnum

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process, Socket, Task
from nsa_harness.core.evidence.stacks import is_poller, training_stack

BUSY_SHARE = 0.5  # share of one core
# Share of one core used by the training thread. A computing rank on an overloaded machine gets no more than that; a
# waiting thread gets nothing at all.
STARVED_SHARE = 0.05
# A computing rank that moves this many bytes saves, loads or packs. A loop that only computes moves none.
STREAM_BYTES_PER_S = 65536


_WORKER_SERVER = "pt_workerserver"  # answers queries about the process and takes no part in the training
SLEEPS = frozenset({"clock_nanosleep", "nanosleep"})


class Motion(StrEnum):
    MOVING = "moving"
    WAITING = "waiting"
    BURNING = "burning"
    STOPPED = "stopped"
    GONE = "gone"


def motion(before: RankSnapshot | None, after: RankSnapshot, elapsed_s: float) -> Motion:
    """Return what one rank did between two snapshots, judged without its collectives.

    A rank is MOVING if it recorded a progress event, transferred bytes or went to another line. It is BURNING if it
    used CPU time and did none of these, as an endless loop does.
    """
    if after.is_from_dump:
        return Motion.WAITING
    if after.process is None or after.process.state in "ZX":
        return Motion.GONE
    if _stopped(before, after.process):
        return Motion.STOPPED
    if before is None or before.process is None or _has_new_event(before, after):
        return Motion.MOVING
    if cpu_share(before.process, after.process, elapsed_s) >= BUSY_SHARE:
        return Motion.MOVING if _streams(before, after, elapsed_s) else Motion.BURNING
    if _transferred(before, after, elapsed_s) and not _sleeps_between(before, after, elapsed_s):
        return Motion.MOVING
    if (thread_cpu_s(before, after) or 0.0) >= STARVED_SHARE * elapsed_s:
        return Motion.BURNING
    return Motion.MOVING if leaf(before) != leaf(after) else Motion.WAITING


def only_another_line(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Whether a change of the line is the rank's only sign of progress, as in a polling loop.

    The rank recorded no progress event and transferred no bytes, or only a few while it sleeps: a loop that logs each
    retry writes a line.
    """
    if _has_new_event(before, after):
        return False
    naps = sleep_end_s(before) is not None or sleep_end_s(after) is not None
    return not _transferred(before, after, elapsed_s) or (naps and _only_trickles(before, after, elapsed_s))


def _sleeps_between(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Whether the rank woke up and sleeps again on the same line, with few bytes transferred in between."""
    earlier, later = sleep_end_s(before), sleep_end_s(after)
    if earlier is None or later is None or earlier >= later or leaf(before) != leaf(after):
        return False
    return _only_trickles(before, after, elapsed_s)


def _only_trickles(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Whether the rank read or wrote little, and nothing on its connections."""
    moved, processes = _moved_bytes(before, after), (before.process, after.process)
    few = moved is not None and moved < STREAM_BYTES_PER_S * elapsed_s
    return few and not (processes[0] and processes[1] and has_connection_traffic(processes[0], processes[1]))


def sleep_end_s(snapshot: RankSnapshot) -> float | None:
    """Return the time at which the training thread's sleep ends, or None if the thread does not sleep."""
    task = task_of(snapshot, rank_stack(snapshot))
    return task.wakes_at_s if task and task.syscall in SLEEPS else None


def _streams(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    moved = _moved_bytes(before, after)
    return moved is not None and moved >= STREAM_BYTES_PER_S * elapsed_s


def _stopped(before: RankSnapshot | None, after: Process) -> bool:
    """Whether a signal or a frozen control group stopped the process, or a debugger held it in both snapshots."""
    if after.state == "t":
        return before is not None and before.process is not None and before.process.state == "t"
    return after.state == "T" or after.is_frozen


def cpu_share(before: Process, after: Process, elapsed_s: float) -> float:
    return (after.cpu_s - before.cpu_s) / elapsed_s


def thread_cpu_s(before: RankSnapshot | None, after: RankSnapshot) -> float | None:
    """Return the CPU time that the training thread used between the snapshots, or None if unknown."""
    stack = rank_stack(after)
    then, now = task_of(before, stack) if before else None, task_of(after, stack)
    return now.cpu_s - then.cpu_s if now and then else None


def task_of(snapshot: RankSnapshot, stack: Stack | None) -> Task | None:
    """Return the kernel's record of the stack's thread. Without a stack, return that of the main thread."""
    tid = stack.tid if stack and stack.tid else snapshot.pid
    tasks = snapshot.process.tasks if snapshot.process else ()
    return next((task for task in tasks if task.tid == tid), None)


def _has_new_event(before: RankSnapshot, after: RankSnapshot) -> bool:
    """Whether the rank recorded a progress event or completed a collective between the snapshots."""
    if before.status_file is None or after.status_file is None:
        return before.status_file is not after.status_file
    then, now = (
        (sum(event.count for event in status_file.events), status_file.completed, status_file.device_completed)
        for status_file in (before.status_file, after.status_file)
    )
    return then != now


def _transferred(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Whether the rank transferred bytes.

    Bytes of our own queries do not count, nor a few bytes of threads that only sleep, report and sleep again.
    """
    if before.process is None or after.process is None:
        return False
    asleep, spare = _sleeping_threads(before) & _sleeping_threads(after), STREAM_BYTES_PER_S * elapsed_s
    tids = {tid for tid, _ in asleep}
    reported = _task_bytes(after.process, tids) - _task_bytes(before.process, tids)
    idle = reported if reported < spare else 0
    # A thread of torch's worker server closes seconds after the query, with an event of a few bytes.
    served: set[int | None] = {task.tid for task in after.process.tasks if task.comm == _WORKER_SERVER}
    closed = _task_bytes(after.process, served) - _task_bytes(before.process, served)
    if _moved_bytes(before, after) not in (None, idle, idle + closed):
        return True
    tasks = (*before.process.tasks, *after.process.tasks)
    connected = any(task.target.startswith("socket:[") for task in tasks)
    return has_connection_traffic(before.process, after.process, spare if asleep and not connected else 0)


def _sleeping_threads(snapshot: RankSnapshot) -> set[tuple[int | None, tuple[Frame, ...]]]:
    """Return (thread, frames) of threads in a sleep or timed wait, apart from the training thread and pollers."""
    tasks = snapshot.process.tasks if snapshot.process else ()
    naps = {task.tid for task in tasks if task.timed and (task.syscall in SLEEPS or task.syscall == "futex")}
    trains = rank_stack(snapshot)
    others = (stack for stack in snapshot.stacks if stack.tid in naps and stack is not trains and not is_poller(stack))
    return {(stack.tid, stack.frames) for stack in others}


def _task_bytes(process: Process, tids: set[int | None]) -> int:
    return sum(task.io_bytes or 0 for task in process.tasks if task.tid in tids)


def has_connection_traffic(before: Process, after: Process, spare_bytes: float = 0) -> bool:
    """Whether a connection transferred more than `spare_bytes`; on a connection to a rank any byte counts.

    The kernel's count of bytes read and written does not include send and recv, which socket libraries call.
    Connections to the launcher and its store do not count, since keep-alive traffic is not training.
    """
    earlier = {socket.inode: _carried_bytes(socket) for socket in before.sockets}
    return any(
        _carried_bytes(socket) - earlier[socket.inode] > (0 if socket.peer_rank is not None else spare_bytes)
        for socket in after.sockets
        if socket.inode in earlier and (socket.peer_rank is not None or not socket.in_job)
    )


def _carried_bytes(socket: Socket) -> int:
    return (socket.acked_bytes or 0) + (socket.received_bytes or 0)


def _moved_bytes(before: RankSnapshot, after: RankSnapshot) -> int | None:
    """Return the bytes read and written between the snapshots, without those of our own queries.

    None if the kernel does not report them.
    """
    totals = [
        snapshot.process.io_bytes - snapshot.query_bytes
        for snapshot in (before, after)
        if snapshot.process is not None and snapshot.process.io_bytes is not None
    ]
    return totals[1] - totals[0] if len(totals) == 2 else None


def leaf(snapshot: RankSnapshot) -> Frame | None:
    stack = rank_stack(snapshot)
    return stack.frames[0] if stack and stack.frames else None


def rank_stack(snapshot: RankSnapshot) -> Stack | None:
    """Return the stack of the training thread."""
    tids = [event.tid for event in snapshot.status_file.events] if snapshot.status_file else []
    return training_stack(snapshot.stacks, snapshot.pid, tids)
