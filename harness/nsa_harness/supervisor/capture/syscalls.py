"""Reads the system call in which a thread is blocked."""

from __future__ import annotations

import os
import platform
import struct
import time
from dataclasses import replace
from pathlib import Path

from nsa_harness.core.evidence.host import Task

RESTARTED_WAIT = "restart_syscall"  # a timed wait that continues after the process was stopped; its arguments are lost

# Names of system calls by number. A call that is not listed is shown by its number and counts as an unknown wait.
_SYSCALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        23: "select", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
        46: "sendmsg", 47: "recvmsg", 56: "clone", 58: "vfork", 61: "wait4", 62: "kill", 72: "fcntl", 73: "flock",
        74: "fsync", 75: "fdatasync", 200: "tkill", 202: "futex", 219: RESTARTED_WAIT, 230: "clock_nanosleep",
        232: "epoll_wait", 234: "tgkill", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 288: "accept4", 435: "clone3",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv",
        66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile", 72: "pselect6", 73: "ppoll", 82: "fsync",
        83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 128: RESTARTED_WAIT,
        129: "kill", 130: "tkill", 131: "tgkill",
        202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 220: "clone",
        242: "accept4", 260: "wait4", 435: "clone3",
    },
}.get(platform.machine(), {})  # fmt: skip

_FUTEX_WAITS = {0, 9, 11, 13}  # WAIT, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_FUTEX_ABSOLUTE = 9
_FUTEX_COMMAND_MASK = 0x7F
_FUTEX_PRIVATE = 128  # the futex is shared only by threads of one process
_FUTEX_CLOCK_REALTIME = 256
_CLOCK_REALTIME, _CLOCK_MONOTONIC = 0, 1
_TIMER_ABSTIME = 1
_TIMESPEC = struct.Struct("<qq")

_FD_FIRST = {
    "read", "write", "readv", "writev", "pread64", "pwrite64", "sendfile", "connect", "accept", "accept4", "sendto",
    "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync", "fdatasync", "ioctl", "epoll_wait", "epoll_pwait",
}  # fmt: skip
_POLLFD = struct.Struct("<ihh")
_MAX_PATH_BYTES = 1024
_MAX_DESCRIPTORS = 1024  # per select
_MAX_CHILDREN = 16
_P_ALL, _P_PID = 0, 1


def with_system_call(task: Task, pid: int, origin_ns: int) -> Task:
    """Return a copy of the thread with its current system call. Times are relative to `origin_ns`."""
    name, arguments = _syscall(pid, task.tid)
    has_timeout, wakes_at_s = _timeout(pid, name, arguments, origin_ns)
    fd = _descriptor(pid, name, arguments)
    target = _target(pid, name, arguments, fd)
    held_by = _children(pid, name, arguments)
    return replace(
        task,
        syscall=name,
        timed=has_timeout,
        wakes_at_s=wakes_at_s,
        timeout_s=_poll_limit_s(pid, name, arguments) if has_timeout else None,
        fd=fd,
        target=target,
        held_by=held_by,
    )


def _target(pid: int, name: str, arguments: tuple[int, ...], fd: int | None) -> str:
    if name == "openat" and len(arguments) > 1:
        return _read_memory(pid, arguments[1], _MAX_PATH_BYTES).partition(b"\0")[0].decode(errors="replace")
    if name == "futex" and len(arguments) > 1 and not arguments[1] & _FUTEX_PRIVATE:
        return _shared_file(pid, arguments[0])
    return descriptor_target(pid, fd)


def _shared_file(pid: int, address: int) -> str:
    """Return the path of the shared-memory file that a process has mapped at `address`, or "" if there is none."""
    for line in kernel_text(f"/proc/{pid}/maps").splitlines():
        span, access, _, _, _, *path = line.split(maxsplit=5)
        first, _, end = span.partition("-")
        if int(first, 16) <= address < int(end, 16):
            return path[0] if path and access.endswith("s") else ""
    return ""


def descriptor_target(pid: int, fd: int | None) -> str:
    """Return what a file descriptor refers to, such as "pipe:[123]" or a path, or "" if it is unreadable."""
    if fd is None:
        return ""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def _syscall(pid: int, tid: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and arguments of a thread's system call: "running" outside of calls, "" if unreadable."""
    text = kernel_text(f"/proc/{pid}/task/{tid}/syscall")
    if not text or text == "running":
        return text, ()
    number, *arguments = text.split()
    if number == "-1":
        return "running", ()
    return _SYSCALLS.get(int(number), number), tuple(int(word, 16) for word in arguments[:6])


def _descriptor(pid: int, name: str, arguments: tuple[int, ...]) -> int | None:
    """Return the first file descriptor that the system call `name` uses, or None if it uses none."""
    if len(arguments) < 3:
        return None
    if name in _FD_FIRST:
        return _as_c_int(arguments[0])
    if name in ("poll", "ppoll"):
        data = _read_memory(pid, arguments[0], _POLLFD.size) if arguments[1] else b""
        return _POLLFD.unpack(data)[0] if len(data) == _POLLFD.size else None
    if name in ("select", "pselect6"):
        return _first_selected(pid, arguments)
    return None


def _first_selected(pid: int, arguments: tuple[int, ...]) -> int | None:
    size = (min(arguments[0], _MAX_DESCRIPTORS) + 7) // 8
    for address in arguments[1:3]:  # to read, to write
        bits = int.from_bytes(_read_memory(pid, address, size), "little") if address and size else 0
        if bits:
            return (bits & -bits).bit_length() - 1
    return None


def _children(pid: int, name: str, arguments: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the child processes for which the system call `name` waits, or None if they are unknown."""
    if name == "wait4" and len(arguments) > 1:
        child = _as_c_int(arguments[0])
        return (outer_pid(pid, child),) if child > 0 else _living_children(pid)
    if name == "waitid" and len(arguments) > 1 and arguments[0] in (_P_ALL, _P_PID):
        return (outer_pid(pid, _as_c_int(arguments[1])),) if arguments[0] == _P_PID else _living_children(pid)
    return None


def outer_pid(pid: int, inner: int, proc: Path = Path("/proc")) -> int:
    """Translate a pid from the namespace of process `pid` to that of nsa-harness, if they differ and it is found."""
    depth = len(namespace_pids(pid, proc))
    if depth == 1:
        return inner
    child_lists = (kernel_text(file).split() for file in (proc / str(pid) / "task").glob("*/children"))
    candidates = ((int(word), namespace_pids(int(word), proc)) for line in child_lists for word in line)
    return next((child for child, names in candidates if names[depth - 1 : depth] == [inner]), inner)


def namespace_pids(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the pids of a process in its PID namespaces, from nsa-harness's to the innermost."""
    words = kernel_fields(proc / str(pid) / "status").get("NSpid", "").split()
    return [int(word) for word in words] or [pid]


def _living_children(pid: int) -> tuple[int, ...] | None:
    words = (kernel_text(file).split() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return tuple(sorted(int(word) for line in words for word in line))[:_MAX_CHILDREN] or None


def _as_c_int(argument: int) -> int:
    return int.from_bytes((argument & 0xFFFFFFFF).to_bytes(4, "little"), "little", signed=True)


def _read_memory(pid: int, address: int, size: int) -> bytes:
    """Return up to `size` bytes from the memory of a process, or b"" if it is unreadable."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)
    except (OSError, ValueError, OverflowError):
        return b""


def _timeout(pid: int, name: str, arguments: tuple[int, ...], origin_ns: int) -> tuple[bool | None, float | None]:
    """Return whether a system call has a timeout, and the time at which it expires. Unknown values are None."""
    if len(arguments) < 6:
        return None, None
    if name == "futex":
        return _futex_timeout(pid, arguments, origin_ns)
    if name == "clock_nanosleep":
        absolute = arguments[1] & _TIMER_ABSTIME
        return True, _timespec(pid, arguments[2], arguments[0], origin_ns) if absolute else None
    if name == "nanosleep":
        return True, None
    if name in ("poll", "epoll_wait", "epoll_pwait"):
        milliseconds = arguments[2 if name == "poll" else 3] & 0xFFFFFFFF
        return milliseconds != 0xFFFFFFFF, None
    if name in ("select", "pselect6", "ppoll"):
        return arguments[2 if name == "ppoll" else 4] != 0, None
    return False, None


def _poll_limit_s(pid: int, name: str, arguments: tuple[int, ...]) -> float | None:
    """Return the time limit of a poll or select in seconds, or None if it is unreadable."""
    if name == "poll":
        return (arguments[2] & 0xFFFFFFFF) / 1e3
    if name not in ("ppoll", "select", "pselect6"):
        return None
    data = _read_memory(pid, arguments[2 if name == "ppoll" else 4], _TIMESPEC.size)
    if len(data) < _TIMESPEC.size:
        return None
    seconds, fraction = _TIMESPEC.unpack(data)
    return float(seconds) + float(fraction) / (1e6 if name == "select" else 1e9)  # a timeval has microseconds


def _futex_timeout(pid: int, arguments: tuple[int, ...], origin_ns: int) -> tuple[bool | None, float | None]:
    operation, pointer = arguments[1], arguments[3]
    if operation & _FUTEX_COMMAND_MASK not in _FUTEX_WAITS:
        return None, None
    if pointer == 0:
        return False, None
    if operation & _FUTEX_COMMAND_MASK != _FUTEX_ABSOLUTE:
        return True, None
    clock = _CLOCK_REALTIME if operation & _FUTEX_CLOCK_REALTIME else _CLOCK_MONOTONIC
    return True, _timespec(pid, pointer, clock, origin_ns)


def _timespec(pid: int, address: int, clock: int, origin_ns: int) -> float | None:
    """Return the absolute time stored at `address` in a process's memory, or None if it is unreadable."""
    data = _read_memory(pid, address, _TIMESPEC.size)
    if len(data) < _TIMESPEC.size:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(data)
    ahead_ns = 0 if clock == _CLOCK_MONOTONIC else time.clock_gettime_ns(clock) - time.monotonic_ns()
    return (int(seconds) * 10**9 + int(nanoseconds) - ahead_ns - origin_ns) / 1e9


def kernel_text(path: str | Path) -> str:
    """Return the contents of a file in /proc or /sys, or "" if it is unreadable."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def kernel_fields(path: str | Path) -> dict[str, str]:
    """Return the contents of a file with lines like "name: value" as a dict."""
    pairs = (line.partition(":") for line in kernel_text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}
