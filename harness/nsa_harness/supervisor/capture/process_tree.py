"""Reads a run's processes from /proc, and finds what they wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.evidence.network import port_of
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.descriptors import (
    HolderSearch,
    SocketTable,
    has_readable_descriptors,
    open_descriptors,
    socket_inodes,
    socket_owners,
)
from nsa_harness.supervisor.capture.node import is_frozen
from nsa_harness.supervisor.capture.syscalls import RESTARTED_WAIT

_MAX_CHILDREN = 64  # per rank


@dataclass(frozen=True, kw_only=True)
class ProcessTree:
    """The processes of a run at one moment, arranged as a tree below its ranks and launchers."""

    processes: dict[int, Process]  # rank -> its process; only ranks that are alive
    children: dict[int, tuple[Process, ...]]  # rank -> its descendants, parents first
    failures: tuple[tuple[int | None, str], ...]  # (rank, what could not be read); rank None = for all ranks

    @property
    def all_processes(self) -> Iterator[Process]:
        yield from self.processes.values()
        for descendants in self.children.values():
            yield from descendants


def read_process_tree(
    ranks: Mapping[int, int], origin_ns: int, last_tasks: dict[int, Task] | None = None
) -> ProcessTree:
    """Return the process tree for `ranks`, which maps each rank to its pid.

    Times are relative to `origin_ns`. `last_tasks` has each thread of the last snapshot by thread id, and is updated.
    It is needed because a wait that was interrupted, for example by py-spy, no longer shows what it waits for after it
    is restarted.
    """
    read_processes = {rank: procfs.read_process(pid, origin_ns) for rank, pid in ranks.items()}
    remembered_tasks = {} if last_tasks is None else last_tasks
    processes = {
        rank: _with_last_tasks(process, remembered_tasks)
        for rank, process in read_processes.items()
        if process is not None
    }
    children = {
        rank: tuple(_with_last_tasks(child, remembered_tasks) for child in _read_descendants(process.pid, origin_ns))
        for rank, process in processes.items()
    }
    table = SocketTable(owners=socket_owners(_run_processes(processes, children)))
    holders = HolderSearch(sockets=table)
    with_connections = {
        rank: _with_store_marked(_with_connections(process, table, holders)) for rank, process in processes.items()
    }
    connected_children = {
        rank: tuple(_with_connections(child, table, holders) for child in read_processes)
        for rank, read_processes in children.items()
    }
    general = [(None, failure) for failure in (*table.failures, *holders.failures)]
    unreadable = [(rank, text) for rank, process in processes.items() if (text := _unreadable_facts(process))]
    return ProcessTree(processes=with_connections, children=connected_children, failures=(*general, *unreadable))


def _unreadable_facts(process: Process) -> str | None:
    """Return a description of everything that could not be read about a process, or None if everything was read."""
    main = next((task for task in process.tasks if task.tid == process.pid), None)
    if main is None or process.state in "ZX":
        return None
    facts = {
        "the system call it is blocked in": not main.syscall,
        "bytes read and written": process.io_bytes is None,
        "open descriptors": not has_readable_descriptors(process.pid),
    }
    names = [name for name, missing in facts.items() if missing]
    return f"not readable without permission to trace the process: {', '.join(names)}" if names else None


def _with_last_tasks(process: Process, last_tasks: dict[int, Task]) -> Process:
    tasks = tuple(
        _with_wake_count(_with_last_call(task, last_tasks.get(task.tid)), last_tasks.get(task.tid))
        for task in process.tasks
    )
    last_tasks.update({task.tid: task for task in tasks})
    return replace(process, tasks=tasks)


def _with_wake_count(task: Task, last_task: Task | None) -> Task:
    """Return the thread with its wake-up count continued from `last_task`, its state in the last snapshot."""
    if last_task is None or last_task.wakes_at_s is None or task.wakes_at_s is None:
        return task
    return replace(task, wake_count=last_task.wake_count + (task.wakes_at_s > last_task.wakes_at_s))


def _with_last_call(task: Task, last_task: Task | None) -> Task:
    if task.syscall != RESTARTED_WAIT:
        return task
    if last_task is None:
        return replace(task, timed=True)  # only waits with a time limit are restarted like this
    return replace(last_task, state=task.state, wchan=task.wchan, cpu_s=task.cpu_s, io_bytes=task.io_bytes)


def _read_descendants(pid: int, origin_ns: int) -> Iterator[Process]:
    for stat in procfs.descendants(pid)[:_MAX_CHILDREN]:
        process = procfs.read_process(stat.pid, origin_ns)
        if process is not None:
            yield process


def _run_processes(
    processes: Mapping[int, Process], children: Mapping[int, tuple[Process, ...]]
) -> Iterator[tuple[int | None, Process]]:
    """Yield each process of the run with its rank, which is None for a launcher."""
    yield from processes.items()
    for rank, descendants in children.items():
        yield from ((rank, child) for child in descendants)
    for pid in sorted({process.parent for process in processes.values()}):
        launcher = procfs.read_process(pid, 0, tasks=False)
        if launcher is not None:
            yield None, replace(launcher, open_ends=open_descriptors(pid))


def _with_connections(process: Process, table: SocketTable, holders: HolderSearch) -> Process:
    sockets = table.sockets_of(process.pid, socket_inodes(process.open_ends))
    return holders.with_holders(replace(process, sockets=sockets, is_frozen=is_frozen(process.pid)))


def _with_store_marked(process: Process) -> Process:
    """Return a rank's process with its connections to the job's store marked."""
    port = procfs.environment(process.pid).get("MASTER_PORT", "") if process.sockets else ""
    if not port:
        return process
    sockets = (
        replace(socket, is_store=socket.state != "LISTEN" and port in (port_of(socket.local), port_of(socket.peer)))
        for socket in process.sockets
    )
    return replace(process, sockets=tuple(sockets))
