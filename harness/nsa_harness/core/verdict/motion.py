"""Determine whether a rank made progress, waited, computed, was stopped or exited between two snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack, StatusFile
from nsa_harness.core.evidence.host import Process, Socket, Task
from nsa_harness.core.evidence.stacks import in_probe, is_poller, training_stack

BUSY_SHARE = 0.5  # share of one core
# Share of one core used by the training thread. On an overloaded machine a computing thread may get no more. A waiting
# thread uses nothing at all.
STARVED_SHARE = 0.05
# A computing rank that transfers this many bytes is saving or loading. An endless loop transfers none.
STREAM_BYTES_PER_S = 65536


_WORKER_SERVER = "pt_workerserver"  # answers queries about the process and takes no part in the training
_STORE_SERVER = "pt_tcpstore_uv"  # answers the ranks' requests to the job's store, which also a rank that hangs makes
# Runs stored by earlier versions have the numbers of these calls on x86-64 instead of their names.
_SENDS_SIGNAL = frozenset({"kill", "tkill", "tgkill", "62", "200", "234"})
SLEEPS = frozenset({"clock_nanosleep", "nanosleep"})
POLLS = frozenset({"poll", "ppoll", "select", "pselect6"})


class Motion(StrEnum):
    """The activity of a rank or process between two snapshots, such as waiting or computing."""

    MOVING = "moving"  # it made progress
    WAITING = "waiting"
    BURNING = "burning"  # it used CPU time without any sign of progress, as an endless loop does
    STOPPED = "stopped"  # by a signal, its control group, or a debugger
    GONE = "gone"  # it has exited


def motion(before: RankSnapshot | None, after: RankSnapshot, elapsed_s: float) -> Motion:
    """Return one rank's activity between two snapshots.

    The snapshots are `elapsed_s` apart. A rank is MOVING if it recorded a progress event, completed a collective,
    transferred bytes, or is on another line. It is BURNING if it used CPU time and did none of these. Without a
    snapshot `before`, a running rank is MOVING.
    """
    if after.is_from_dump:
        return Motion.WAITING
    if after.process is None or after.process.state in "ZX":
        return Motion.GONE
    if _is_stopped(before, after.process):
        return Motion.STOPPED
    if before is None or before.process is None or _has_new_event(before, after):
        return Motion.MOVING
    if cpu_share(before.process, after.process, elapsed_s) >= BUSY_SHARE:
        return Motion.MOVING if _streams(before, after, elapsed_s) else Motion.BURNING
    if _has_transferred(before, after, elapsed_s) and not _sleeps_between(before, after, elapsed_s):
        return Motion.MOVING
    if (thread_cpu_s(before, after) or 0.0) >= STARVED_SHARE * elapsed_s:
        return Motion.BURNING
    return Motion.MOVING if leaf(before) != leaf(after) else Motion.WAITING


def only_another_line(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether the only sign of progress is that the rank is on another line, as in a polling loop.

    This is so if the rank recorded no progress event and transferred no bytes. A rank that sleeps may have transferred
    a few bytes, because a polling loop may log each retry. The same applies to a rank that waits with a time limit for
    data from a process of the job, and has read none.
    """
    if _has_new_event(before, after):
        return False
    sleeps = sleep_end_s(before) is not None or sleep_end_s(after) is not None
    sleeps = sleeps or (_reads_nothing(before, after) and (_polls_job(before) or _polls_job(after)))
    return not _has_transferred(before, after, elapsed_s) or (sleeps and _only_trickles(before, after, elapsed_s))


def _sleeps_between(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether the rank woke up and is sleeping again on the same line, as in a polling loop."""
    earlier, later = sleep_end_s(before), sleep_end_s(after)
    if earlier is None or later is None:
        return _waits_between(before, after, elapsed_s)
    return earlier < later and leaf(before) == leaf(after) and _only_trickles(before, after, elapsed_s)


def _waits_between(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether a timed wait has ended, and the rank waits again on the same line.

    It waits for a lock, event or queue, or for data from a process of the job. The rank may have written a few bytes in
    between, such as a log line for each attempt, but only in the training thread: a thread that fills the queue
    transfers bytes too.
    """
    earlier, later = (task_of(snapshot, rank_stack(snapshot)) for snapshot in (before, after))
    if earlier is None or later is None or leaf(before) != leaf(after):
        return False
    ends_s = [task.wakes_at_s if task.syscall == "futex" and task.timed else None for task in (earlier, later)]
    is_next_wait = ends_s[0] is not None and ends_s[1] is not None and ends_s[0] < ends_s[1]
    is_next_poll = earlier.target == later.target and _polls_job(before) and _polls_job(after)
    if not is_next_wait and not (is_next_poll and _reads_nothing(before, after)):
        return False
    others_bytes = [_bytes_of_other_threads(snapshot, later.tid) for snapshot in (before, after)]
    return others_bytes[0] == others_bytes[1] and _only_trickles(before, after, elapsed_s)


def _polls_job(snapshot: RankSnapshot) -> bool:
    """Return whether the training thread waits with a time limit for data that only processes of the job can send.

    The result is False if it is unknown how many bytes the connection has received, and if another thread of the rank
    could write to the pipe. A poll without descriptors only waits for its time limit.
    """
    task = task_of(snapshot, rank_stack(snapshot))
    if task is None or snapshot.process is None or task.syscall not in POLLS or not task.timed:
        return False
    if task.target.startswith("pipe:["):
        family = {snapshot.pid, *(child.pid for child in snapshot.children)}
        holders = set(task.held_by or ())
        return bool(holders) and holders <= family and not (snapshot.pid in holders and _has_active_thread(snapshot))
    if task.target.startswith("socket:["):
        ends = (end for end in snapshot.process.sockets if f"socket:[{end.inode}]" == task.target)
        return any(end.in_job and end.received_bytes is not None for end in ends)
    return task.fd is None and not task.target


def _has_active_thread(snapshot: RankSnapshot) -> bool:
    """Return whether another Python thread of the rank does anything but wait for a lock without a time limit."""
    tasks = {task.tid: task for task in snapshot.process.tasks} if snapshot.process else {}
    training = rank_stack(snapshot)
    others = [stack for stack in snapshot.stacks if stack is not training and stack.frames and not is_poller(stack)]
    blocked = (
        (task := tasks.get(stack.tid or 0)) and task.syscall == "futex" and task.timed is False for stack in others
    )
    return not all(blocked)


def _reads_nothing(before: RankSnapshot, after: RankSnapshot) -> bool:
    """Return whether the training thread read no bytes between the snapshots. False if this is unknown."""
    tasks = [task_of(snapshot, rank_stack(snapshot)) for snapshot in (before, after)]
    reads = [task.read_bytes if task else None for task in tasks]
    return None not in reads and reads[0] == reads[1]


def _bytes_of_other_threads(snapshot: RankSnapshot, tid: int) -> dict[int, int | None]:
    """Return the bytes that each thread has transferred, without thread `tid`, pollers, and torch's servers."""
    tasks = snapshot.process.tasks if snapshot.process else ()
    ignored_tids = {tid, *(stack.tid for stack in snapshot.stacks if is_poller(stack))}
    servers = (_WORKER_SERVER, _STORE_SERVER)
    return {task.tid: task.io_bytes for task in tasks if task.tid not in ignored_tids and task.comm not in servers}


def _only_trickles(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether the rank read or wrote only a few bytes, and none on its connections."""
    transferred, processes = _transferred_bytes(before, after), (before.process, after.process)
    is_little = transferred is not None and transferred < STREAM_BYTES_PER_S * elapsed_s
    return is_little and not (processes[0] and processes[1] and has_connection_traffic(processes[0], processes[1]))


def sleep_end_s(snapshot: RankSnapshot) -> float | None:
    """Return when the training thread's sleep ends, or None if it does not sleep or this is unknown."""
    task = task_of(snapshot, rank_stack(snapshot))
    return task.wakes_at_s if task and task.syscall in SLEEPS else None


def latest_end_s(snapshot: RankSnapshot, at_s: float) -> float | None:
    """Return the latest end of the training thread's timed wait at `at_s`, or None. Its begin is unknown."""
    task = task_of(snapshot, rank_stack(snapshot))
    if task is None or not task.timed:
        return None
    if task.syscall in POLLS:
        return None if task.timeout_s is None else at_s + task.timeout_s
    return task.wakes_at_s if task.syscall in SLEEPS or task.syscall == "futex" else None


def _streams(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether the rank transferred so many bytes that it must be saving or loading data."""
    transferred = _transferred_bytes(before, after)
    return transferred is not None and transferred >= STREAM_BYTES_PER_S * elapsed_s


def _is_stopped(before: RankSnapshot | None, after: Process) -> bool:
    """Return whether the process is stopped by a signal or debugger, or frozen by its control group."""
    if after.state == "t":
        return before is not None and before.process is not None and before.process.state == "t"
    return after.state == "T" or after.is_frozen


def is_stopped_by_job(process: Process, status_files: Iterable[StatusFile | None]) -> bool:
    """Return whether the process stopped itself, or one of the ranks with these status files stopped it.

    Nothing resumes such a process. Somebody outside the job who stopped a process may also resume it: a debugger, a
    shell, or a scheduler that suspends jobs. The kernel does not tell who sent a signal, but it shows the system call
    in which a process that stopped itself stands.
    """
    if process.state != "T":
        return False
    itself = any(task.syscall in _SENDS_SIGNAL for task in process.tasks)
    return itself or any(file is not None and process.pid in file.stopped for file in status_files)


def cpu_share(before: Process, after: Process, elapsed_s: float) -> float:
    """Return the average CPU usage of a process between two snapshots, as a fraction of one core."""
    return (after.cpu_s - before.cpu_s) / elapsed_s


def thread_cpu_s(before: RankSnapshot | None, after: RankSnapshot) -> float | None:
    """Return the CPU time, in seconds, used by the training thread between two snapshots, or None if unknown."""
    stack = rank_stack(after)
    earlier, later = task_of(before, stack) if before else None, task_of(after, stack)
    return later.cpu_s - earlier.cpu_s if earlier and later else None


def task_of(snapshot: RankSnapshot, stack: Stack | None) -> Task | None:
    """Return the kernel's record of the stack's thread, or of the main thread without a stack, or None."""
    tid = stack.tid if stack and stack.tid else snapshot.pid
    tasks = snapshot.process.tasks if snapshot.process else ()
    return next((task for task in tasks if task.tid == tid), None)


def _has_new_event(before: RankSnapshot, after: RankSnapshot) -> bool:
    """Return whether the rank recorded a progress event or completed a collective between the snapshots."""
    if before.status_file is None or after.status_file is None:
        return before.status_file is not after.status_file
    earlier, later = (
        (sum(event.count for event in status_file.events), status_file.completed, status_file.device_completed)
        for status_file in (before.status_file, after.status_file)
    )
    return earlier != later


def _has_transferred(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Return whether the rank read, wrote, sent or received bytes between the snapshots.

    Bytes that nsa-harness's own queries caused do not count, and neither do a few bytes of threads that only sleep,
    write a report and sleep again.
    """
    if before.process is None or after.process is None:
        return False
    sleeping, allowance = _sleeping_threads(before) & _sleeping_threads(after), STREAM_BYTES_PER_S * elapsed_s
    sleeping_tids = {tid for tid, _ in sleeping}
    report_bytes = _task_bytes(after.process, sleeping_tids) - _task_bytes(before.process, sleeping_tids)
    ignored_bytes = report_bytes if report_bytes < allowance else 0
    # A thread of torch's worker server writes a few bytes when it closes, seconds after a query of nsa-harness.
    server_tids = _tids_of(after.process, _WORKER_SERVER)
    server_bytes = _task_bytes(after.process, server_tids) - _task_bytes(before.process, server_tids)
    if _transferred_bytes(before, after) not in (None, ignored_bytes, ignored_bytes + server_bytes):
        return True
    tasks = (*before.process.tasks, *after.process.tasks)
    waits_on_socket = any(task.target.startswith("socket:[") for task in tasks)
    spare_bytes = allowance if sleeping and not waits_on_socket else 0
    return has_connection_traffic(before.process, after.process, spare_bytes)


def _sleeping_threads(snapshot: RankSnapshot) -> set[tuple[int | None, tuple[Frame, ...]]]:
    """Return the id and the frames of each sleeping thread, excluding the training thread and pollers."""
    tasks = snapshot.process.tasks if snapshot.process else ()
    sleeping_tids = {task.tid for task in tasks if task.timed and (task.syscall in SLEEPS or task.syscall == "futex")}
    training = rank_stack(snapshot)
    others = (stack for stack in snapshot.stacks if stack is not training and not is_poller(stack))
    return {(stack.tid, stack.frames) for stack in others if stack.tid in sleeping_tids}


def _tids_of(process: Process, comm: str) -> set[int | None]:
    return {task.tid for task in process.tasks if task.comm == comm}


def _task_bytes(process: Process, tids: set[int | None]) -> int:
    return sum(task.io_bytes or 0 for task in process.tasks if task.tid in tids)


def has_connection_traffic(before: Process, after: Process, spare_bytes: float = 0) -> bool:
    """Return whether data was transferred on the network connections of a process.

    On a connection to another rank, any byte counts; on others, more than `spare_bytes`. The kernel's count of bytes
    read and written does not include send and recv, which socket libraries call. Connections to the launcher and to
    the job's store are ignored: their keep-alive traffic is not training, and NCCL asks the store even while the rank
    hangs.
    """
    earlier = {socket.inode: _carried_bytes(socket) for socket in before.sockets}
    return any(
        _carried_bytes(socket) - earlier[socket.inode] > (0 if socket.peer_rank is not None else spare_bytes)
        for socket in after.sockets
        if socket.inode in earlier and not socket.is_store and (socket.peer_rank is not None or not socket.in_job)
    )


def _carried_bytes(socket: Socket) -> int:
    return (socket.acked_bytes or 0) + (socket.received_bytes or 0)


def _transferred_bytes(before: RankSnapshot, after: RankSnapshot) -> int | None:
    """Return the bytes that the rank read and wrote in between, except for queries and the job's store, or None."""
    totals = [
        snapshot.process.io_bytes
        - snapshot.query_bytes
        - _task_bytes(snapshot.process, _tids_of(snapshot.process, _STORE_SERVER))
        for snapshot in (before, after)
        if snapshot.process is not None and snapshot.process.io_bytes is not None
    ]
    return totals[1] - totals[0] if len(totals) == 2 else None


def leaf(snapshot: RankSnapshot) -> Frame | None:
    """Return the training thread's innermost frame outside nsa-harness's instrumentation, or None."""
    stack = rank_stack(snapshot)
    return next((frame for frame in stack.frames if not in_probe(frame.file)), None) if stack else None


def rank_stack(snapshot: RankSnapshot) -> Stack | None:
    """Return the stack of the rank's training thread, or None if the snapshot has no stacks."""
    tids = [event.tid for event in snapshot.status_file.events] if snapshot.status_file else []
    return training_stack(snapshot.stacks, snapshot.pid, tids)
