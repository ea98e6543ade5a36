"""Motion: what one rank did between two looks at it."""

from __future__ import annotations

from enum import StrEnum

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process, Socket, Task
from nsa_harness.core.evidence.stacks import is_poller, training_stack

BUSY_SHARE = 0.5  # of one core
# Of one core, by the thread that trains: on a machine with too much to do a rank that computes gets no more. A thread
# that waits gets nothing at all.
STARVED_SHARE = 0.05
# Of a rank that computes meanwhile: it saves, loads or packs, and a loop that only computes moves none.
STREAM_BYTES_PER_S = 65536


_WORKER_SERVER = "pt_workerserver"  # answers who asks of the process, and takes no part in the training
SLEEPS = frozenset({"clock_nanosleep", "nanosleep"})


class Motion(StrEnum):
    MOVING = "moving"
    WAITING = "waiting"
    BURNING = "burning"
    STOPPED = "stopped"
    GONE = "gone"


def motion(before: RankSnapshot | None, after: RankSnapshot, elapsed_s: float) -> Motion:
    """What one rank did between two looks, collectives aside."""
    if after.dumped:
        return Motion.WAITING
    if after.process is None or after.process.state in "ZX":
        return Motion.GONE
    if _stopped(before, after.process):
        return Motion.STOPPED
    if before is None or before.process is None or _marked(before, after):
        return Motion.MOVING
    if cpu_share(before.process, after.process, elapsed_s) >= BUSY_SHARE:
        return Motion.MOVING if _streams(before, after, elapsed_s) else Motion.BURNING
    if _transferred(before, after, elapsed_s) and not _sleeps_between(before, after, elapsed_s):
        return Motion.MOVING
    if (thread_cpu_s(before, after) or 0.0) >= STARVED_SHARE * elapsed_s:
        return Motion.BURNING
    return Motion.MOVING if leaf(before) != leaf(after) else Motion.WAITING


def only_another_line(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """It neither marked nor moved a byte: a rank that polls shows another line now and then, and does nothing.

    A loop that says each time that it tries again, and sleeps, moves those few bytes and no others.
    """
    if _marked(before, after):
        return False
    naps = nap(before) is not None or nap(after) is not None
    return not _transferred(before, after, elapsed_s) or (naps and _only_trickles(before, after, elapsed_s))


def _sleeps_between(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """At both looks in a sleep on one line, not in the same sleep: between them it looked, or wrote a line."""
    earlier, later = nap(before), nap(after)
    if earlier is None or later is None or earlier >= later or leaf(before) != leaf(after):
        return False
    return _only_trickles(before, after, elapsed_s)


def _only_trickles(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    moved, processes = _moved_bytes(before, after), (before.process, after.process)
    few = moved is not None and moved < STREAM_BYTES_PER_S * elapsed_s
    return few and not (processes[0] and processes[1] and carried(processes[0], processes[1]))


def nap(snapshot: RankSnapshot) -> float | None:
    """When the sleep that the thread that trains stands in ends; None where it stands in none."""
    task = task_of(snapshot, rank_stack(snapshot))
    return task.wakes_at_s if task and task.syscall in SLEEPS else None


def _streams(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    moved = _moved_bytes(before, after)
    return moved is not None and moved >= STREAM_BYTES_PER_S * elapsed_s


def _stopped(before: RankSnapshot | None, after: Process) -> bool:
    """By a signal, by a frozen control group, or held by a debugger at both looks, which a tool that reads is not."""
    if after.state == "t":
        return before is not None and before.process is not None and before.process.state == "t"
    return after.state == "T" or after.frozen


def cpu_share(before: Process, after: Process, elapsed_s: float) -> float:
    return (after.cpu_s - before.cpu_s) / elapsed_s


def thread_cpu_s(before: RankSnapshot | None, after: RankSnapshot) -> float | None:
    """What the thread that trains has computed since, whatever the others did; None where nobody says."""
    stack = rank_stack(after)
    then, now = task_of(before, stack) if before else None, task_of(after, stack)
    return now.cpu_s - then.cpu_s if now and then else None


def task_of(snapshot: RankSnapshot, stack: Stack | None) -> Task | None:
    """What the kernel says of the thread of that stack; without one, of the first thread."""
    wanted = stack.tid if stack and stack.tid else snapshot.pid
    tasks = snapshot.process.tasks if snapshot.process else ()
    return next((task for task in tasks if task.tid == wanted), None)


def _marked(before: RankSnapshot, after: RankSnapshot) -> bool:
    if before.board is None or after.board is None:
        return before.board is not after.board
    then, now = (
        (sum(mark.count for mark in one.marks), one.completed, one.device_completed)
        for one in (before.board, after.board)
    )
    return then != now


def _transferred(before: RankSnapshot, after: RankSnapshot, elapsed_s: float) -> bool:
    """Bytes moved, apart from those our own questions cost and those of threads that sleep, report and sleep again."""
    if before.process is None or after.process is None:
        return False
    asleep, spare = _asleep(before) & _asleep(after), STREAM_BYTES_PER_S * elapsed_s
    tids = {tid for tid, _ in asleep}
    reported = _task_bytes(after.process, tids) - _task_bytes(before.process, tids)
    idle = reported if reported < spare else 0
    # A thread of torch's worker server closes seconds after the question, with an event of a few bytes.
    served: set[int | None] = {one.tid for one in after.process.tasks if one.comm == _WORKER_SERVER}
    closed = _task_bytes(after.process, served) - _task_bytes(before.process, served)
    if _moved_bytes(before, after) not in (None, idle, idle + closed):
        return True
    tasks = (*before.process.tasks, *after.process.tasks)
    connected = any(one.target.startswith("socket:[") for one in tasks)
    return carried(before.process, after.process, spare if asleep and not connected else 0)


def _asleep(snapshot: RankSnapshot) -> set[tuple[int | None, tuple[Frame, ...]]]:
    """Threads of the program's in a wait that ends by itself, and where they stand; not the one that trains."""
    tasks = snapshot.process.tasks if snapshot.process else ()
    naps = {one.tid for one in tasks if one.timed and (one.syscall in SLEEPS or one.syscall == "futex")}
    trains = rank_stack(snapshot)
    others = (one for one in snapshot.stacks if one.tid in naps and one is not trains and not is_poller(one))
    return {(one.tid, one.frames) for one in others}


def _task_bytes(process: Process, tids: set[int | None]) -> int:
    return sum(one.io_bytes or 0 for one in process.tasks if one.tid in tids)


def carried(before: Process, after: Process, spare_bytes: float = 0) -> bool:
    """A connection had bytes acknowledged or received.

    The kernel's count of bytes read and written leaves out send and recv, which is what libraries of sockets call.
    Connections to the launcher and its store do not count: what keeps them alive is not training.
    """
    earlier = {one.inode: _carried_bytes(one) for one in before.sockets}
    return any(
        _carried_bytes(one) - earlier[one.inode] > (0 if one.peer_rank is not None else spare_bytes)
        for one in after.sockets
        if one.inode in earlier and (one.peer_rank is not None or not one.in_job)
    )


def _carried_bytes(one: Socket) -> int:
    return (one.acked_bytes or 0) + (one.received_bytes or 0)


def _moved_bytes(before: RankSnapshot, after: RankSnapshot) -> int | None:
    """Read and written since, apart from what our own questions cost; None where the kernel does not say."""
    looks = [
        one.process.io_bytes - one.asked_bytes
        for one in (before, after)
        if one.process is not None and one.process.io_bytes is not None
    ]
    return looks[1] - looks[0] if len(looks) == 2 else None


def leaf(snapshot: RankSnapshot) -> Frame | None:
    stack = rank_stack(snapshot)
    return stack.frames[0] if stack and stack.frames else None


def rank_stack(snapshot: RankSnapshot) -> Stack | None:
    """The stack of the thread that trains."""
    tids = [mark.tid for mark in snapshot.board.marks] if snapshot.board else []
    return training_stack(snapshot.stacks, snapshot.pid, tids)
