"""Find the open files of processes, and which process could end a wait: a pipe's other end, or a lock's holder."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from nsa_harness.core.evidence.host import Process, Socket, Task
from nsa_harness.core.evidence.sockets import TransferredBytes, answers_end, other_ends, parse_answers, parse_table
from nsa_harness.supervisor.capture.syscalls import kernel_fields, kernel_text, link

_MAX_FDS = 4096  # per process
_MAX_HELD = 16  # holders that are stored
_MAX_WAITS = 32  # threads of one process whose holders are searched
_LIMIT_S = 0.5  # for one search through all processes of the host
_ACCESS = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
_READS = {"read", "readv", "recvfrom", "recvmsg"}
_WRITES = {"write", "writev", "sendfile", "sendto", "sendmsg"}
_POLLS = {"poll", "ppoll", "select", "pselect6"}
_LOCKS = {"flock", "fcntl"}
_FIFO_OPENS = {"wait_for_partner", "fifo_open"}  # kernel functions in which the open of a FIFO sleeps
# File systems of a server or a program, which may not answer. Their files are not inspected.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "virtiofs")
_GPU = re.compile(r"/dev/nvidia\d+$")
_LOCK = re.compile(r"^(\d+):( ->)? (?:FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(-?\d+)\s", re.M)


def holds(pid: int) -> tuple[str, ...]:
    """Return the open pipes, FIFOs, sockets and GPUs of a process with their access: "pipe:[123] w"."""
    found = {f"{target} {access}" for _, target, access in _open_channels(pid)}
    return tuple(sorted(found))


def readable_descriptors(pid: int) -> bool:
    """Whether the process's descriptors are readable. A process that has exited hides nothing."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd")[:1]:
            os.readlink(f"/proc/{pid}/fd/{name}")
    except PermissionError:
        return False
    except OSError:
        return True
    return True


@dataclass(kw_only=True)
class Holders:
    """The open files of all processes on this host, read once, at the first query."""

    sockets: SocketTable
    failures: list[str] = field(default_factory=list)
    _open_channels: dict[str, set[tuple[int, str]]] | None = None
    _complete: bool = True  # whether all processes were readable; an unreadable one may hold anything

    def with_holders(self, process: Process) -> Process:
        """Return the process with `held_by` for its threads that wait for something that other processes hold."""
        waiting = [task.tid for task in process.tasks if task.held_by is None and task.target][:_MAX_WAITS]
        tasks = (self._task(process.pid, task) if task.tid in waiting else task for task in process.tasks)
        return replace(process, tasks=tuple(tasks))

    def _task(self, pid: int, task: Task) -> Task:
        held_by = self._held_by(pid, task)
        return task if held_by is None else replace(task, held_by=held_by[:_MAX_HELD])

    def _held_by(self, pid: int, task: Task) -> tuple[int, ...] | None:
        if task.target.startswith("socket:["):
            other = self.sockets.other_end(pid, int(task.target[8:-1]))
            return None if other is None else (other,)
        if task.syscall in _LOCKS:
            return self._lock_holders(pid, task)
        if task.syscall == "openat":
            return self._fifo_holders(task)
        if task.syscall == "futex":
            return self._sharers(pid, task)
        return self._other_ends(pid, task)

    def _other_ends(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """Return the processes at the other end of a pipe: the writers if the thread reads, else the readers.

        Return None if there is none to be seen: such a process may be unreadable.
        """
        if task.syscall not in _READS | _WRITES | _POLLS:
            return None
        reads = task.syscall in _READS or (task.syscall in _POLLS and _access(pid, task.fd) == "r")
        wanted = "w" if reads else "r"
        found = {holder for holder, access in self._all().get(task.target, ()) if wanted in access}
        return tuple(sorted(found)) or None if self._complete else None

    def _fifo_holders(self, task: Task) -> tuple[int, ...] | None:
        """Return the processes that have open the FIFO whose opening waits for a partner: usually none."""
        if task.wchan not in _FIFO_OPENS:
            return None
        found = {holder for holder, _ in self._all().get(task.target, ())}
        return tuple(sorted(found)) if self._complete else None

    def _sharers(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """Return the other processes that map a semaphore: each may release it."""
        found = []
        deadline = time.thread_time() + _LIMIT_S
        for other in psutil.pids():
            if time.thread_time() > deadline:
                self._note(f"maps of the host: not all read within {_LIMIT_S:g} s")
                return None
            if other != pid and task.target in kernel_text(f"/proc/{other}/maps"):
                found.append(other)
        return tuple(sorted(found))

    def _lock_holders(self, pid: int, task: Task) -> tuple[int, ...] | None:
        try:
            holders = lock_holders(Path("/proc/locks").read_text(), pid)
        except OSError as error:
            self._note(f"/proc/locks: {error}")
            return None
        living = tuple(holder for holder in holders if Path(f"/proc/{holder}").exists())
        if living or task.fd is None:
            return living or None
        # The lock was taken before a fork by a process that has exited: processes that inherited the file hold it.
        heirs = {holder for holder in _processes_with_open_file(task.target) if holder != pid}
        return tuple(sorted(heirs)) or None

    def _all(self) -> dict[str, set[tuple[int, str]]]:
        if self._open_channels is None:
            self._open_channels = {}
            # This thread's time: on a busy machine, wall time also passes while it does not run.
            deadline = time.thread_time() + _LIMIT_S
            for pid in psutil.pids():
                if time.thread_time() > deadline:
                    self._note(f"descriptors of the host: not all read within {_LIMIT_S:g} s")
                    self._complete = False
                    break
                for _, target, access in _open_channels(pid, sockets=False):
                    self._open_channels.setdefault(target, set()).add((pid, access))
        return self._open_channels

    def _note(self, failure: str) -> None:
        if failure not in self.failures:
            self.failures.append(failure)


def lock_holders(table: str, waiter: int) -> tuple[int, ...]:
    """Return the processes that hold the file locks for which `waiter` waits, from /proc/locks."""
    lines = [(number, bool(blocked), int(pid)) for number, blocked, pid in _LOCK.findall(table)]
    wanted = {number for number, blocked, pid in lines if blocked and pid == waiter}
    return tuple(sorted({pid for number, blocked, pid in lines if number in wanted and not blocked and pid > 0}))


def _open_channels(pid: int, *, sockets: bool = True) -> Iterator[tuple[int, str, str]]:
    """Yield descriptor, target and access of each open pipe, FIFO, socket and GPU; nothing without permission."""
    try:
        names = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))[:_MAX_FDS]
    except OSError:
        return
    remote: frozenset[str] | None = None
    for fd in names:
        target = link(pid, fd)
        if target.startswith("pipe:["):
            yield fd, target, _access(pid, fd)
        elif target.startswith("socket:["):
            if sockets:
                yield fd, target, "rw"
        elif _GPU.match(target):
            yield fd, target, "rw"
        elif target.startswith("/"):
            remote = _remote_mounts(pid) if remote is None else remote
            if _is_fifo(pid, fd, remote):
                yield fd, target, _access(pid, fd)


def _is_fifo(pid: int, fd: int, remote: frozenset[str]) -> bool:
    if kernel_fields(f"/proc/{pid}/fdinfo/{fd}").get("mnt_id") in remote:
        return False
    try:
        return stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode)
    except OSError:
        return False


def _remote_mounts(pid: int) -> frozenset[str]:
    """Return the ids of mounts on a server or program that may not answer."""
    lines = kernel_text(f"/proc/{pid}/mountinfo").splitlines()
    kinds = ((line.split()[0], line.partition(" - ")[2]) for line in lines if " - " in line)
    return frozenset(number for number, kind in kinds if kind.startswith(_REMOTE))


def _access(pid: int, fd: int | None) -> str:
    """Return the access of an open descriptor: "r", "w" or "rw"."""
    flags = kernel_fields(f"/proc/{pid}/fdinfo/{fd}").get("flags")
    if flags is None:
        return "rw"  # unknown: both are possible
    return _ACCESS.get(int(flags, 8) & os.O_ACCMODE, "rw")


def _processes_with_open_file(path: str) -> Iterator[int]:
    for pid in psutil.pids():
        try:
            names = os.listdir(f"/proc/{pid}/fd")[:_MAX_FDS]
        except OSError:
            continue
        if any(link(pid, int(name)) == path for name in names):
            yield pid


# The sockets of this host, and the process at the other end of each connection.

_MAX_TABLE_BYTES = 16 << 20
_MAX_SOCKETS = 64  # stored per process; sockets with data in flight first
_ANSWER_LIMIT_S = 0.5
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ALL_STATES = 0xFFFFFFFF
_WITH_INFO = 1 << 1  # the bit of INET_DIAG_INFO, less one


@dataclass(kw_only=True)
class SocketTable:
    """The current sockets. Each network namespace is read once, at its first query."""

    owners: Mapping[int, tuple[int | None, int]]  # inode -> (rank, pid) of the run's process that holds it
    failures: list[str] = field(default_factory=list)
    _tables: dict[str, tuple[dict[int, Socket], dict[int, int]]] = field(default_factory=dict)

    def of(self, pid: int, inodes: Iterable[int]) -> tuple[Socket, ...]:
        """Return up to _MAX_SOCKETS TCP sockets of a process from its `inodes`, with data in flight first."""
        table, ends = self._table(pid)
        own_sockets = sorted(
            (self._with_owner(table[inode], ends) for inode in set(inodes) & table.keys()), key=_urgency
        )
        return tuple(own_sockets[:_MAX_SOCKETS])

    def other_end(self, pid: int, inode: int) -> int | None:
        """Return the run's process at the other end of a connection, or None if it is unknown."""
        owner = self.owners.get(self._table(pid)[1].get(inode, 0))
        return owner[1] if owner else None

    def _with_owner(self, connection: Socket, ends: Mapping[int, int]) -> Socket:
        owner = self.owners.get(ends.get(connection.inode, 0))  # no socket has inode 0
        return replace(connection, peer_rank=owner[0], in_job=True) if owner else connection

    def _table(self, pid: int) -> tuple[dict[int, Socket], dict[int, int]]:
        """Return the namespace's sockets by inode, and for each inode that of the connection's other end."""
        namespace = _namespace(pid)
        if namespace not in self._tables:
            table = _read_table(pid)
            if namespace == _namespace("self"):
                table = self._with_bytes(table)
            elif namespace and table:
                self.failures.append("acknowledged bytes: the process is in another network namespace")
            self._tables[namespace] = table, other_ends(table)
        return self._tables[namespace]

    def _with_bytes(self, table: dict[int, Socket]) -> dict[int, Socket]:
        try:
            carried = dict(_ask_kernel())
        except (OSError, ValueError, struct.error) as error:
            self.failures.append(f"acknowledged bytes: {error}")
            return table
        return {inode: _with_traffic(connection, carried.get(inode)) for inode, connection in table.items()}


def owners_of(processes: Iterable[tuple[int | None, Process]]) -> dict[int, tuple[int | None, int]]:
    """Return socket inode -> (rank, pid). A socket that several processes hold belongs to the first."""
    found: dict[int, tuple[int | None, int]] = {}
    for rank, process in processes:
        for inode in inodes(process.open_ends):
            found.setdefault(inode, (rank, process.pid))
    return found


def inodes(holds: Iterable[str]) -> Iterator[int]:
    """Yield the socket inodes in a process's list of open files."""
    for end in holds:
        if end.startswith("socket:["):
            yield int(end[len("socket:[") :].partition("]")[0])


def _with_traffic(connection: Socket, carried: TransferredBytes | None) -> Socket:
    if carried is None or connection.state == "LISTEN":
        return connection
    return replace(connection, acked_bytes=carried.acked_bytes, received_bytes=carried.received_bytes)


def _urgency(connection: Socket) -> tuple[bool, bool, int]:
    in_flight = connection.unacked_bytes or connection.retransmits
    return not in_flight, connection.state == "LISTEN", connection.inode


def _namespace(pid: int | str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _read_table(pid: int) -> dict[int, Socket]:
    found: dict[int, Socket] = {}
    for name in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/{pid}/net/{name}").open("rb") as table:
                found |= parse_table(table.read(_MAX_TABLE_BYTES).decode(errors="replace"))
        except OSError:
            continue
    return found


def _ask_kernel() -> Iterator[tuple[int, TransferredBytes]]:
    """Yield inode and bytes of each TCP socket in this network namespace. Raises OSError or ValueError if refused."""
    deadline = time.monotonic() + _ANSWER_LIMIT_S
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            kernel.sendto(_request(family), (0, 0))
            ended = False
            while not ended:
                kernel.settimeout(max(deadline - time.monotonic(), 0.001))
                data = kernel.recv(1 << 16)
                yield from ((inode, carried) for inode, carried in parse_answers(data) if carried)
                ended = answers_end(data)


def _request(family: int) -> bytes:
    """Return struct inet_diag_req_v2 after its header: all states, any address, with tcp_info."""
    body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, _WITH_INFO, 0, _ALL_STATES)
    return struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body
