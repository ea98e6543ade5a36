"""Read a run's processes from /proc: ranks, their children, open files, and which process waits for which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.descriptors import (
    Holders,
    SocketTable,
    holds,
    inodes,
    owners_of,
    readable_descriptors,
)
from nsa_harness.supervisor.capture.node import frozen
from nsa_harness.supervisor.capture.syscalls import RESTARTED

_MAX_CHILDREN = 64  # per rank


@dataclass(frozen=True, kw_only=True)
class ProcessTree:
    """The processes, read without asking them. `failures` lists what could not be read."""

    processes: dict[int, Process]  # rank -> its process, for living ranks
    children: dict[int, tuple[Process, ...]]  # rank -> the processes below it, parents first
    failures: tuple[tuple[int | None, str], ...]  # (rank, what could not be read); None = for all ranks

    @property
    def everyone(self) -> Iterator[Process]:
        yield from self.processes.values()
        for below in self.children.values():
            yield from below


def read_process_tree(
    ranks: Mapping[int, int], origin_ns: int, last_tasks: dict[int, Task] | None = None
) -> ProcessTree:
    """Return the process tree of these ranks (rank -> pid), with times relative to `origin_ns`.

    `last_tasks` has each thread's system call from the last snapshot: a wait that is restarted after a stop, such as
    py-spy's, no longer shows what it waits for.
    """
    found = {rank: procfs.read_process(pid, origin_ns) for rank, pid in ranks.items()}
    memory = {} if last_tasks is None else last_tasks
    processes = {rank: _resumed(process, memory) for rank, process in found.items() if process is not None}
    children = {
        rank: tuple(_resumed(child, memory) for child in _below(process.pid, origin_ns))
        for rank, process in processes.items()
    }
    table = SocketTable(owners=owners_of(_run(processes, children)))
    holders = Holders(sockets=table)
    complete = {rank: _with_connections(process, table, holders) for rank, process in processes.items()}
    below = {
        rank: tuple(_with_connections(child, table, holders) for child in found) for rank, found in children.items()
    }
    general = [(None, failure) for failure in (*table.failures, *holders.failures)]
    hidden = [(rank, text) for rank, process in processes.items() if (text := _unreadable_facts(process))]
    return ProcessTree(processes=complete, children=below, failures=(*general, *hidden))


def _unreadable_facts(process: Process) -> str | None:
    """Return what the kernel did not show about a living process, as text, or None."""
    main = next((task for task in process.tasks if task.tid == process.pid), None)
    if main is None or process.state in "ZX":
        return None
    unread = {
        "the system call it is blocked in": not main.syscall,
        "bytes read and written": process.io_bytes is None,
        "open descriptors": not readable_descriptors(process.pid),
    }
    names = [name for name, missing in unread.items() if missing]
    return f"not readable without the right to trace the process: {', '.join(names)}" if names else None


def _resumed(process: Process, last_tasks: dict[int, Task]) -> Process:
    tasks = tuple(
        _counted(_as_before(task, last_tasks.get(task.tid)), last_tasks.get(task.tid)) for task in process.tasks
    )
    last_tasks.update({task.tid: task for task in tasks})
    return replace(process, tasks=tasks)


def _counted(task: Task, before: Task | None) -> Task:
    """Count how often the thread woke from a sleep and went to sleep again."""
    if before is None or before.wakes_at_s is None or task.wakes_at_s is None:
        return task
    return replace(task, wake_count=before.wake_count + (task.wakes_at_s > before.wakes_at_s))


def _as_before(task: Task, before: Task | None) -> Task:
    if task.syscall != RESTARTED:
        return task
    if before is None:
        return replace(task, timed=True)  # only waits with a time limit are restarted like this
    return replace(before, state=task.state, wchan=task.wchan, cpu_s=task.cpu_s, io_bytes=task.io_bytes)


def _below(pid: int, origin_ns: int) -> Iterator[Process]:
    for stat in procfs.descendants(pid)[:_MAX_CHILDREN]:
        process = procfs.read_process(stat.pid, origin_ns)
        if process is not None:
            yield process


def _run(
    processes: Mapping[int, Process], children: Mapping[int, tuple[Process, ...]]
) -> Iterator[tuple[int | None, Process]]:
    """Yield the processes of the run, ranks first: a socket that a child inherited belongs to the rank."""
    yield from processes.items()
    for rank, below in children.items():
        yield from ((rank, child) for child in below)
    for pid in sorted({process.parent for process in processes.values()}):
        launcher = procfs.read_process(pid, 0, tasks=False)
        if launcher is not None:
            yield None, replace(launcher, open_ends=holds(pid))


def _with_connections(process: Process, table: SocketTable, holders: Holders) -> Process:
    sockets = table.of(process.pid, inodes(process.open_ends))
    return holders.with_holders(replace(process, sockets=sockets, is_frozen=frozen(process.pid)))
