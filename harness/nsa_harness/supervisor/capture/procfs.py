"""Reads the state of processes from /proc, even if they do not respond."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from nsa_harness.core.evidence.host import Process, SignalMasks, Task
from nsa_harness.core.verdict.host_waits import is_library
from nsa_harness.supervisor.capture.descriptors import open_descriptors
from nsa_harness.supervisor.capture.syscalls import kernel_fields, kernel_text, namespace_pids, with_system_call

# psutil provides descendants and bytes of I/O. The rest is read here for these reasons. psutil lacks system calls, wait
# channels, thread states, peak memory, handled signals and the tracer. It reports the start time on a clock that may be
# set. It is several times slower for the state, CPU time and memory of hundreds of processes. It ends an environment at
# the first empty entry, which a rank that was forked from the fork server has.
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_TASKS = 256  # threads that are read per process


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The fields of /proc/PID/stat that nsa-harness uses."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    rss_bytes: int
    start_ticks: int
    processor: int  # the CPU on which it last ran


def read_stat(pid: int, tid: int | None = None) -> Stat | None:
    """Return the state of a process or of its thread `tid`, or None if it no longer exists."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    text = kernel_text(path)
    if not text:
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
        start_ticks=int(fields[19]),
        processor=int(fields[36]),
    )


def exit_status(pid: int) -> int | None:
    """Return the exit code of a zombie, or minus the signal that killed it. Return None for any other process."""
    head, _, tail = kernel_text(f"/proc/{pid}/stat").rpartition(") ")
    fields = tail.split()
    return os.waitstatus_to_exitcode(int(fields[49])) if head and fields[0] in "ZX" and len(fields) > 49 else None


def is_alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def descendants(root: int) -> list[Stat]:
    """Return all descendants of a process, with parents before children."""
    try:
        processes = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return []
    return [stat for child in processes if (stat := read_stat(child.pid))]


def children(parent: int) -> list[Stat]:
    """Return the children of a process, including zombies."""
    try:
        processes = psutil.Process(parent).children()
    except psutil.Error:
        return []
    return [stat for child in processes if (stat := read_stat(child.pid))]


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started, or {} if it is unreadable."""
    pairs = (item.partition(b"=") for item in _read_strings(pid, "environ") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command_line(pid: int) -> list[str]:
    return [word.decode(errors="replace") for word in _read_strings(pid, "cmdline") if word]


def _read_strings(pid: int, file: str) -> list[bytes]:
    """Return the NUL-terminated strings in /proc/PID/`file`, or [] if it is unreadable."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []


def peak_rss_bytes(pid: int) -> int | None:
    peak = kernel_fields(f"/proc/{pid}/status").get("VmHWM")
    return None if peak is None else int(peak.split()[0]) * 1024


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process has installed a handler for this signal."""
    return bool(int(kernel_fields(f"/proc/{pid}/status").get("SigCgt", "0"), 16) >> (number - 1) & 1)


def io_bytes(pid: int) -> int | None:
    """Return the number of bytes that a process has read and written, or None if they are unreadable."""
    try:
        counters = psutil.Process(pid).io_counters()
    except (psutil.Error, OSError, RuntimeError):
        return None
    return int(counters.read_chars + counters.write_chars)


def task_io_bytes(pid: int, tid: int) -> int | None:
    """Return the number of bytes that a thread has read and written, or None if they are unreadable."""
    return _read_and_total_bytes(pid, tid)[1]


def _read_and_total_bytes(pid: int, tid: int) -> tuple[int | None, int | None]:
    """Return the bytes that a thread has read, and those that it has read and written, or None if unreadable."""
    counters = kernel_fields(f"/proc/{pid}/task/{tid}/io")
    if "wchar" not in counters:
        return None, None
    return int(counters["rchar"]), int(counters["rchar"]) + int(counters["wchar"])


_LAST_RUN_FIELD = "se.exec_start"  # field of /proc/PID/task/TID/sched, in milliseconds; some kernels lack it
_Clocks = dict[int, float | None]  # CPU number -> its scheduler clock, which is read once for several threads


def idle_s(pid: int, tid: int, clocks: _Clocks | None = None) -> float | None:
    """Return the seconds since the thread last ran, or None if unknown. Several calls can share the cache `clocks`."""
    last_run_s, stat = _last_run_s(f"/proc/{pid}/task/{tid}/sched"), read_stat(pid, tid)
    if last_run_s is None or stat is None:
        return None
    known_clocks = {} if clocks is None else clocks
    if stat.processor not in known_clocks:
        known_clocks[stat.processor] = _scheduler_clock_s(stat.processor)
    now_s = known_clocks[stat.processor]
    return None if now_s is None else max(0.0, now_s - last_run_s)


def _scheduler_clock_s(processor: int) -> float | None:
    """Return the scheduler clock of a CPU core in seconds, or None if it cannot be read."""
    # This clock stops while the hypervisor gives the core to other machines. Only a thread on the core can read it.
    home = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {processor})
        return _last_run_s("/proc/thread-self/sched")
    except OSError:
        return None
    finally:
        os.sched_setaffinity(0, home)


def _last_run_s(path: str) -> float | None:
    for line in kernel_text(path).splitlines():
        if line.startswith(_LAST_RUN_FIELD):
            return float(line.rpartition(":")[2]) / 1000
    return None


def program_idle_s(pid: int) -> float:
    """Return the seconds since a thread of the program last ran, without PyTorch's own threads, or 0 if unknown."""
    clocks: _Clocks = {}
    idle = [idle_s(pid, task.tid, clocks) for task in _tasks(pid, 0) if not is_library(task)]
    return min((0.0 if seconds is None else seconds for seconds in idle), default=0.0)


def read_process(pid: int, origin_ns: int, *, tasks: bool = True) -> Process | None:
    """Return the state of a process, or None if it is gone. `tasks`: also read its threads, files and tracer."""
    stat = read_stat(pid)
    if stat is None:
        return None
    status = kernel_fields(f"/proc/{pid}/status") if tasks else {}
    return Process(
        pid=pid,
        parent=stat.parent,
        command=b" ".join(_read_strings(pid, "cmdline")).decode(errors="replace").strip()[:300] or stat.command,
        state=stat.state,
        cpu_s=stat.cpu_s,
        io_bytes=io_bytes(pid),
        rss_bytes=stat.rss_bytes,
        tasks=tuple(_tasks(pid, origin_ns)) if tasks else (),
        open_ends=open_descriptors(pid) if tasks else (),
        traced_by=int(status.get("TracerPid", "0")) or None,
        signals=_signal_masks(status),
    )


def tracers(pid: int) -> dict[int, int]:
    """Map the id of each thread of a process to the pid of its tracer, or to 0 if it is not traced."""
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return {}
    return {tid: int(kernel_fields(f"/proc/{pid}/task/{tid}/status").get("TracerPid", "0")) for tid in tids}


def _signal_masks(status: Mapping[str, str]) -> SignalMasks | None:
    try:
        masks = {name: int(status[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")}
    except (KeyError, ValueError):
        return None
    return SignalMasks(
        pending=masks["SigPnd"] | masks["ShdPnd"],
        blocked=masks["SigBlk"],
        ignored=masks["SigIgn"],
        caught=masks["SigCgt"],
    )


def _tasks(pid: int, origin_ns: int) -> Iterator[Task]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return
    for tid in tids[:_MAX_TASKS]:
        stat = read_stat(pid, tid)
        if stat is None:
            continue
        read_bytes, io_bytes = _read_and_total_bytes(pid, tid)
        task = Task(
            tid=tid,
            comm=stat.command,
            state=stat.state,
            wchan=kernel_text(f"/proc/{pid}/task/{tid}/wchan"),
            syscall="",
            wakes_at_s=None,
            timed=None,
            cpu_s=stat.cpu_s,
            io_bytes=io_bytes,
            read_bytes=read_bytes,
            idle_s=idle_s(pid, tid) if tid == pid else None,
        )
        yield with_system_call(task, pid, origin_ns)


# Processes in other mount or PID namespaces, such as containers: the paths of their files, and their pids inside.

_MAX_LINKS = 40  # the kernel's limit


def path_in_process(pid: int, file: str, proc: Path = Path("/proc")) -> Path:
    """Translate a path used by another process, such as one in a container, to a path that works in this process.

    If the two processes have different roots, the result is below /proc/PID/root. Links are resolved within that root,
    as the process sees them, because the kernel would follow absolute links out of it.
    """
    home = proc / str(pid)
    if not _has_other_root(home, proc / "self"):
        return Path(file)
    root = home / "root"
    return root.joinpath(
        *_resolve_links(root, file if os.path.isabs(file) else os.path.join(_link(home / "cwd"), file))
    )


def pid_in_namespace(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the pid that the process has in its own PID namespace."""
    return namespace_pids(pid, proc)[-1]


def _has_other_root(home: Path, own_home: Path) -> bool:
    root = _link(home / "root")
    is_same = _link(home / "ns" / "mnt") == _link(own_home / "ns" / "mnt") and root == _link(own_home / "root")
    return bool(root) and not is_same


def _resolve_links(root: Path, file: str) -> list[str]:
    """Return the components of a path below `root`, with all links resolved."""
    components: list[str] = []
    remaining = [part for part in reversed(file.split("/")) if part not in ("", ".")]
    links = 0
    while remaining:
        part = remaining.pop()
        if part == "..":
            del components[-1:]
            continue
        target = _link(root.joinpath(*components, part))
        links += bool(target)
        if not target or links > _MAX_LINKS:
            components.append(part)
            continue
        components = [] if target.startswith("/") else components
        remaining += [name for name in reversed(target.split("/")) if name not in ("", ".")]
    return components


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
