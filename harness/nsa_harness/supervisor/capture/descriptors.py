"""Finds the files that a process has open, and the processes for which a waiting thread waits."""

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
from nsa_harness.supervisor.capture.syscalls import descriptor_target, kernel_fields, kernel_text

_MAX_FDS = 4096  # per process
_MAX_HOLDERS = 16  # holders that are stored per thread
_MAX_WAITING_THREADS = 32  # threads per process for which holders are searched
_SEARCH_LIMIT_S = 0.5  # CPU time for one search through all processes of the host
_ACCESS = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
_READS = {"read", "readv", "recvfrom", "recvmsg"}
_WRITES = {"write", "writev", "sendfile", "sendto", "sendmsg"}
_POLLS = {"poll", "ppoll", "select", "pselect6"}
_LOCK_CALLS = {"flock", "fcntl"}
_FIFO_OPENS = {"wait_for_partner", "fifo_open"}  # kernel functions in which opening a FIFO sleeps
# File systems that depend on a server or a program, which may hang. Files on them are not inspected.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "virtiofs")
_GPU = re.compile(r"/dev/nvidia\d+$")
_LOCK_LINE = re.compile(r"^(\d+):( ->)? (?:FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(-?\d+)\s", re.M)


def open_descriptors(pid: int) -> tuple[str, ...]:
    """Return a description of each pipe, FIFO, socket and GPU that a process has open, such as "pipe:[123] w"."""
    descriptors = {f"{target} {access}" for _, target, access in _read_descriptors(pid)}
    return tuple(sorted(descriptors))


def has_readable_descriptors(pid: int) -> bool:
    """Return whether this user may read the descriptors of a process. The result is True if it has exited."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd")[:1]:
            os.readlink(f"/proc/{pid}/fd/{name}")
    except PermissionError:
        return False
    except OSError:
        return True
    return True


@dataclass(kw_only=True)
class HolderSearch:
    """A search for the processes that hold the lock or pipe for which a thread waits. Open files are read only once."""

    sockets: SocketTable
    failures: list[str] = field(default_factory=list)
    _open_files: dict[str, set[tuple[int, str]]] | None = None
    _is_complete: bool = True  # all processes were searched; a process that was not may hold any file

    def with_holders(self, process: Process) -> Process:
        """Return a copy of `process` in which each waiting thread lists the processes for which it waits."""
        waiting = [task.tid for task in process.tasks if task.held_by is None and task.target][:_MAX_WAITING_THREADS]
        tasks = (self._with_holders(process.pid, task) if task.tid in waiting else task for task in process.tasks)
        return replace(process, tasks=tuple(tasks))

    def _with_holders(self, pid: int, task: Task) -> Task:
        held_by = self._held_by(pid, task)
        return task if held_by is None else replace(task, held_by=held_by[:_MAX_HOLDERS])

    def _held_by(self, pid: int, task: Task) -> tuple[int, ...] | None:
        if task.target.startswith("socket:["):
            holder = self.sockets.process_at_other_end(pid, int(task.target[8:-1]))
            return None if holder is None else (holder,)
        if task.syscall in _LOCK_CALLS:
            return self._lock_holders(pid, task)
        if task.syscall == "openat":
            return self._fifo_holders(task)
        if task.syscall == "futex":
            return self._processes_sharing_semaphore(pid, task)
        return self._processes_at_other_end(pid, task)

    def _processes_at_other_end(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """Return the processes at the other end of the pipe that a thread uses, or None if they are unknown."""
        if task.syscall not in _READS | _WRITES | _POLLS:
            return None
        reads = task.syscall in _READS or (task.syscall in _POLLS and _access(pid, task.fd) == "r")
        needed_access = "w" if reads else "r"
        pids = {holder for holder, access in self._all_open_files().get(task.target, ()) if needed_access in access}
        return tuple(sorted(pids)) or None if self._is_complete else None

    def _fifo_holders(self, task: Task) -> tuple[int, ...] | None:
        """Return the processes that have opened the FIFO that a thread tries to open, or None if they are unknown."""
        if task.wchan not in _FIFO_OPENS:
            return None
        pids = {holder for holder, _ in self._all_open_files().get(task.target, ())}
        return tuple(sorted(pids)) if self._is_complete else None

    def _processes_sharing_semaphore(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """Return the other processes that can release a waiting thread's semaphore, or None if they are unknown."""
        pids = []
        deadline = time.thread_time() + _SEARCH_LIMIT_S
        for other in psutil.pids():
            if time.thread_time() > deadline:
                self._note(f"maps of the host: not all read within {_SEARCH_LIMIT_S:g} s")
                return None
            if other != pid and task.target in kernel_text(f"/proc/{other}/maps"):
                pids.append(other)
        return tuple(sorted(pids))

    def _lock_holders(self, pid: int, task: Task) -> tuple[int, ...] | None:
        try:
            holders = lock_holders(Path("/proc/locks").read_text(), pid)
        except OSError as error:
            self._note(f"/proc/locks: {error}")
            return None
        living = tuple(holder for holder in holders if Path(f"/proc/{holder}").exists())
        if living or task.fd is None:
            return living or None
        # A process locked the file, forked, and exited. Processes that inherited the open file hold the lock now.
        inheriting_pids = {holder for holder in _processes_with_open_file(task.target) if holder != pid}
        return tuple(sorted(inheriting_pids)) or None

    def _all_open_files(self) -> dict[str, set[tuple[int, str]]]:
        if self._open_files is None:
            self._open_files = {}
            # CPU time of this thread: on a busy machine, wall time also passes while the thread does not run.
            deadline = time.thread_time() + _SEARCH_LIMIT_S
            for pid in psutil.pids():
                if time.thread_time() > deadline:
                    self._note(f"descriptors of the host: not all read within {_SEARCH_LIMIT_S:g} s")
                    self._is_complete = False
                    break
                for _, target, access in _read_descriptors(pid, sockets=False):
                    self._open_files.setdefault(target, set()).add((pid, access))
        return self._open_files

    def _note(self, failure: str) -> None:
        if failure not in self.failures:
            self.failures.append(failure)


def lock_holders(table: str, waiter: int) -> tuple[int, ...]:
    """Return the processes that hold a file lock for which `waiter` waits, according to the text of /proc/locks."""
    lines = [(number, bool(is_blocked), int(pid)) for number, is_blocked, pid in _LOCK_LINE.findall(table)]
    numbers = {number for number, is_blocked, pid in lines if is_blocked and pid == waiter}
    return tuple(sorted({pid for number, is_blocked, pid in lines if number in numbers and not is_blocked and pid > 0}))


def _read_descriptors(pid: int, *, sockets: bool = True) -> Iterator[tuple[int, str, str]]:
    """Yield the descriptor, target and access mode of each pipe, FIFO, socket and GPU that a process has open."""
    try:
        names = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))[:_MAX_FDS]
    except OSError:
        return
    remote: frozenset[str] | None = None
    for fd in names:
        target = descriptor_target(pid, fd)
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
    """Return the ids of a process's mounts on which file access can hang, such as network file systems."""
    lines = kernel_text(f"/proc/{pid}/mountinfo").splitlines()
    kinds = ((line.split()[0], line.partition(" - ")[2]) for line in lines if " - " in line)
    return frozenset(number for number, kind in kinds if kind.startswith(_REMOTE))


def _access(pid: int, fd: int | None) -> str:
    flags = kernel_fields(f"/proc/{pid}/fdinfo/{fd}").get("flags")
    if flags is None:
        return "rw"  # unknown, so both are possible
    return _ACCESS.get(int(flags, 8) & os.O_ACCMODE, "rw")


def _processes_with_open_file(path: str) -> Iterator[int]:
    for pid in psutil.pids():
        try:
            names = os.listdir(f"/proc/{pid}/fd")[:_MAX_FDS]
        except OSError:
            continue
        if any(descriptor_target(pid, int(name)) == path for name in names):
            yield pid


# The sockets of this host, and the process at the other end of each connection.

_MAX_TABLE_BYTES = 16 << 20
_MAX_SOCKETS = 64  # stored per process; sockets with data in flight come first
_NETLINK_LIMIT_S = 0.5
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ALL_STATES = 0xFFFFFFFF
_TCP_INFO_BIT = 1 << 1  # requests tcp_info; bit number INET_DIAG_INFO - 1


@dataclass(kw_only=True)
class SocketTable:
    """A reader of this host's TCP sockets. Each network namespace is read once, when it is first needed."""

    owners: Mapping[int, tuple[int | None, int]]  # socket inode -> (rank, pid) of the run's process that has it open
    failures: list[str] = field(default_factory=list)
    _tables: dict[str, tuple[dict[int, Socket], dict[int, int]]] = field(default_factory=dict)

    def sockets_of(self, pid: int, socket_inodes: Iterable[int]) -> tuple[Socket, ...]:
        """Return at most _MAX_SOCKETS TCP sockets of a process, with those that have data in flight first."""
        table, ends = self._table(pid)
        own_sockets = sorted(
            (self._with_owner(table[inode], ends) for inode in set(socket_inodes) & table.keys()), key=_sort_key
        )
        return tuple(own_sockets[:_MAX_SOCKETS])

    def process_at_other_end(self, pid: int, inode: int) -> int | None:
        """Return the pid of the process to which the socket `inode` is connected, or None if it is unknown."""
        owner = self.owners.get(self._table(pid)[1].get(inode, 0))
        return owner[1] if owner else None

    def _with_owner(self, connection: Socket, ends: Mapping[int, int]) -> Socket:
        owner = self.owners.get(ends.get(connection.inode, 0))  # no socket has inode 0
        return replace(connection, peer_rank=owner[0], in_job=True) if owner else connection

    def _table(self, pid: int) -> tuple[dict[int, Socket], dict[int, int]]:
        """Map the inode of each TCP socket to the socket, and to the inode of the connection's other socket."""
        namespace = _namespace(pid)
        if namespace not in self._tables:
            table = read_socket_table(pid)
            if namespace == _namespace("self"):
                table = self._add_traffic(table)
            elif namespace and table:
                self.failures.append("acknowledged bytes: the process is in another network namespace")
            self._tables[namespace] = table, other_ends(table)
        return self._tables[namespace]

    def _add_traffic(self, table: dict[int, Socket]) -> dict[int, Socket]:
        try:
            traffic = dict(query_traffic())
        except (OSError, ValueError, struct.error) as error:
            self.failures.append(f"acknowledged bytes: {error}")
            return table
        return {inode: _with_traffic(connection, traffic.get(inode)) for inode, connection in table.items()}


def socket_owners(processes: Iterable[tuple[int | None, Process]]) -> dict[int, tuple[int | None, int]]:
    """Map the inode of each open socket to the rank and pid of the first process that owns the socket."""
    owners: dict[int, tuple[int | None, int]] = {}
    for rank, process in processes:
        for inode in socket_inodes(process.open_ends):
            owners.setdefault(inode, (rank, process.pid))
    return owners


def socket_inodes(open_descriptors: Iterable[str]) -> Iterator[int]:
    """Yield the inodes of the sockets in a list of open descriptors."""
    for descriptor in open_descriptors:
        if descriptor.startswith("socket:["):
            yield int(descriptor[len("socket:[") :].partition("]")[0])


def open_sockets(pid: int) -> tuple[int, ...]:
    """Return the inodes of all sockets that a process has open, or () if this user may not see them."""
    try:
        targets = [descriptor_target(pid, int(name)) for name in os.listdir(f"/proc/{pid}/fd")[:_MAX_FDS]]
    except OSError:
        return ()
    return tuple(socket_inodes(target for target in targets if target))


def _with_traffic(connection: Socket, traffic: TransferredBytes | None) -> Socket:
    if traffic is None or connection.state == "LISTEN":
        return connection
    return replace(connection, acked_bytes=traffic.acked_bytes, received_bytes=traffic.received_bytes)


def _sort_key(connection: Socket) -> tuple[bool, bool, int]:
    in_flight = connection.unacked_bytes or connection.retransmits
    return not in_flight, connection.state == "LISTEN", connection.inode


def _namespace(pid: int | str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def read_socket_table(pid: int) -> dict[int, Socket]:
    """Map inodes to the TCP sockets in the network namespace of a process. {} if they cannot be read."""
    sockets: dict[int, Socket] = {}
    for name in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/{pid}/net/{name}").open("rb") as table:
                sockets |= parse_table(table.read(_MAX_TABLE_BYTES).decode(errors="replace"))
        except OSError:
            continue
    return sockets


def query_traffic() -> Iterator[tuple[int, TransferredBytes]]:
    """Yield the inode and the bytes transferred of each TCP socket. Raise OSError or ValueError if the query fails."""
    deadline = time.monotonic() + _NETLINK_LIMIT_S
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            kernel.sendto(_diag_request(family), (0, 0))
            is_finished = False
            while not is_finished:
                kernel.settimeout(max(deadline - time.monotonic(), 0.001))
                data = kernel.recv(1 << 16)
                yield from ((inode, traffic) for inode, traffic in parse_answers(data) if traffic)
                is_finished = answers_end(data)


def _diag_request(family: int) -> bytes:
    """Return a netlink request for information about all TCP sockets of an address family (inet_diag_req_v2)."""
    body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, _TCP_INFO_BIT, 0, _ALL_STATES)
    return struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body
