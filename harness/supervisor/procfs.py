"""What the kernel says about the processes of a run: /proc, read without asking them."""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core.observed.evidence import Process, Task

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_TASKS = 256  # a process with more threads is read in part: state matters, not the census

_SYSCALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept",
        44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll",
        82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect",
        206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}.get(platform.machine(), {})  # fmt: skip

_FUTEX_WAITS = {0, 9, 11, 13}  # WAIT, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_FUTEX_ABSOLUTE = 9
_FUTEX_COMMAND_MASK = 0x7F
_FUTEX_CLOCK_REALTIME = 256
_CLOCK_REALTIME, _CLOCK_MONOTONIC = 0, 1
_TIMER_ABSTIME = 1
_TIMESPEC = struct.Struct("<qq")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """/proc/PID/stat, the part that is used here."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    rss_bytes: int
    started_ticks: int


def read_stat(pid: int, tid: int | None = None) -> Stat | None:
    """None when the process is gone."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(") ")
    fields = tail.split()
    return Stat(
        pid=pid,
        parent=int(fields[1]),
        command=head.partition("(")[2],
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        started_ticks=int(fields[19]),
    )


def every_process() -> Iterator[Stat]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = read_stat(int(entry.name))
            if stat:
                yield stat


def descendants(root: int) -> list[Stat]:
    """The living processes below `root`, parents before children."""
    children: dict[int, list[Stat]] = {}
    for stat in every_process():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [stat.pid for stat in below]
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty when unreadable."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def peak_rss_bytes(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    peak = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak[0]) * 1024 if peak else None


def handles_signal(pid: int, number: int) -> bool:
    """The process has a handler for this signal (SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(caught) and bool(int(caught[0], 16) >> (number - 1) & 1)


def io_bytes(pid: int) -> int | None:
    """Bytes read and written through system calls; None where the kernel does not let us see."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counters = dict(line.split(": ") for line in lines)
        return int(counters["rchar"]) + int(counters["wchar"])
    except (OSError, ValueError, KeyError):
        return None


def read_process(pid: int, origin_ns: int, *, tasks: bool = True) -> Process | None:
    """One process; times relative to `origin_ns`. None when it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return Process(
        pid=pid,
        parent=stat.parent,
        command=_command_line(pid) or stat.command,
        state=stat.state,
        cpu_s=stat.cpu_s,
        io_bytes=io_bytes(pid),
        rss_bytes=stat.rss_bytes,
        tasks=tuple(_tasks(pid, origin_ns)) if tasks else (),
    )


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:300]


def _tasks(pid: int, origin_ns: int) -> Iterator[Task]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return
    for tid in tids[:_MAX_TASKS]:
        stat = read_stat(pid, tid)
        if stat is None:
            continue
        number, arguments = _syscall(pid, tid)
        timed, wakes_at_s = _timeout(pid, number, arguments, origin_ns)
        yield Task(
            tid=tid,
            comm=stat.command,
            state=stat.state,
            wchan=_read(f"/proc/{pid}/task/{tid}/wchan"),
            syscall=number,
            wakes_at_s=wakes_at_s,
            timed=timed,
            cpu_s=stat.cpu_s,
        )


def _syscall(pid: int, tid: int) -> tuple[str, tuple[int, ...]]:
    """Name and arguments of the system call the thread stands in; "running" outside one, "" if unreadable."""
    text = _read(f"/proc/{pid}/task/{tid}/syscall")
    if not text or text == "running":
        return text, ()
    number, *arguments = text.split()
    if number == "-1":
        return "running", ()
    return _SYSCALLS.get(int(number), number), tuple(int(word, 16) for word in arguments[:6])


def _timeout(pid: int, name: str, arguments: tuple[int, ...], origin_ns: int) -> tuple[bool | None, float | None]:
    """Whether the wait ends by itself, and when, where that can be read."""
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
    """The absolute time at `address` of the process, on our axis. Needs the right to trace it."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            seconds, nanoseconds = _TIMESPEC.unpack(memory.read(_TIMESPEC.size))
    except (OSError, struct.error, OverflowError):
        return None
    at_ns = int(seconds) * 10**9 + int(nanoseconds) - _clock_offset_ns(clock)
    return (at_ns - origin_ns) / 1e9


def _clock_offset_ns(clock: int) -> int:
    """What to take from a time of `clock` to get CLOCK_MONOTONIC."""
    if clock == _CLOCK_MONOTONIC:
        return 0
    return time.clock_gettime_ns(clock) - time.monotonic_ns()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
