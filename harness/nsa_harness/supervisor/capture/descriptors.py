"""What processes hold open, and who could end a wait: at the other end of a pipe or connection, or with the lock."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.supervisor.capture.sockets import SocketTable
from nsa_harness.supervisor.capture.syscalls import kernel_fields, kernel_text, link

_MAX_FDS = 4096  # of one process
_MAX_HELD = 16  # names of others that are kept
_MAX_WAITS = 32  # threads of one process whose others are looked for
_LIMIT_S = 0.5  # for the whole host
_ACCESS = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
_READS = {"read", "readv", "recvfrom", "recvmsg"}
_WRITES = {"write", "writev", "sendfile", "sendto", "sendmsg"}
_POLLS = {"poll", "ppoll", "select", "pselect6"}
_LOCKS = {"flock", "fcntl"}
_FIFO_OPENS = {"wait_for_partner", "fifo_open"}  # the kernel functions an open of a FIFO sleeps in
# File systems of a server or a program, which may not answer: no file of theirs is asked what it is.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "virtiofs")
_GPU = re.compile(r"/dev/nvidia\d+$")
_LOCK = re.compile(r"^(\d+):( ->)? (?:FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(-?\d+)\s", re.M)


def holds(pid: int) -> tuple[str, ...]:
    """The pipes, FIFOs, sockets and GPUs a process has open, each with what it may do there: "pipe:[123] w"."""
    found = {f"{target} {access}" for _, target, access in _ends(pid)}
    return tuple(sorted(found))


def readable_descriptors(pid: int) -> bool:
    """We may see what the process has open; a process that has left hides nothing."""
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
    """Who holds what on this host at this moment; read once, when the first wait asks for it."""

    sockets: SocketTable
    failures: list[str] = field(default_factory=list)
    _ends: dict[str, set[tuple[int, str]]] | None = None
    _complete: bool = True  # whoever was not read may hold anything

    def with_holders(self, process: Process) -> Process:
        """The process with `held_by` filled in for its threads that wait on something that others hold."""
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
            return self._opened(task)
        if task.syscall == "futex":
            return self._sharers(pid, task)
        return self._other_ends(pid, task)

    def _other_ends(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """A read ends when the last writer leaves, a write when the last reader does: somebody holds the other end.

        Nobody found means that we cannot see who, not that there is nobody.
        """
        if task.syscall not in _READS | _WRITES | _POLLS:
            return None
        reads = task.syscall in _READS or (task.syscall in _POLLS and _access(pid, task.fd) == "r")
        wanted = "w" if reads else "r"
        found = {holder for holder, access in self._all().get(task.target, ()) if wanted in access}
        return tuple(sorted(found)) or None if self._complete else None

    def _opened(self, task: Task) -> tuple[int, ...] | None:
        """An open that waits for the other side of a FIFO: who has the FIFO open, which is nobody as a rule."""
        if task.wchan not in _FIFO_OPENS:
            return None
        found = {holder for holder, _ in self._all().get(task.target, ())}
        return tuple(sorted(found)) if self._complete else None

    def _sharers(self, pid: int, task: Task) -> tuple[int, ...] | None:
        """The other processes that have a semaphore in their memory: any of them may give it back."""
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
        # Taken before a fork by a process that has left: whoever inherited the open file keeps the lock.
        heirs = {holder for holder in _who_opened(task.target) if holder != pid}
        return tuple(sorted(heirs)) or None

    def _all(self) -> dict[str, set[tuple[int, str]]]:
        if self._ends is None:
            self._ends = {}
            # Of this thread: on a crowded machine the wall clock runs on while nothing is read.
            deadline = time.thread_time() + _LIMIT_S
            for pid in psutil.pids():
                if time.thread_time() > deadline:
                    self._note(f"descriptors of the host: not all read within {_LIMIT_S:g} s")
                    self._complete = False
                    break
                for _, target, access in _ends(pid, sockets=False):
                    self._ends.setdefault(target, set()).add((pid, access))
        return self._ends

    def _note(self, failure: str) -> None:
        if failure not in self.failures:
            self.failures.append(failure)


def lock_holders(table: str, waiter: int) -> tuple[int, ...]:
    """The processes that hold the file locks `waiter` is blocked on, by /proc/locks."""
    lines = [(number, bool(blocked), int(pid)) for number, blocked, pid in _LOCK.findall(table)]
    wanted = {number for number, blocked, pid in lines if blocked and pid == waiter}
    return tuple(sorted({pid for number, blocked, pid in lines if number in wanted and not blocked and pid > 0}))


def _ends(pid: int, *, sockets: bool = True) -> Iterator[tuple[int, str, str]]:
    """Descriptor, target and access of each open pipe, FIFO, socket and GPU; nothing where we may not look."""
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
    """The numbers of the mounts whose server may not answer."""
    lines = kernel_text(f"/proc/{pid}/mountinfo").splitlines()
    kinds = ((line.split()[0], line.partition(" - ")[2]) for line in lines if " - " in line)
    return frozenset(number for number, kind in kinds if kind.startswith(_REMOTE))


def _access(pid: int, fd: int | None) -> str:
    flags = kernel_fields(f"/proc/{pid}/fdinfo/{fd}").get("flags")
    if flags is None:
        return "rw"  # unknown: it may do either
    return _ACCESS.get(int(flags, 8) & os.O_ACCMODE, "rw")


def _who_opened(path: str) -> Iterator[int]:
    for pid in psutil.pids():
        try:
            names = os.listdir(f"/proc/{pid}/fd")[:_MAX_FDS]
        except OSError:
            continue
        if any(link(pid, int(name)) == path for name in names):
            yield pid
