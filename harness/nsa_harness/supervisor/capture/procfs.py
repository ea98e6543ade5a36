"""What the kernel shows about the processes of a run: /proc, read without asking them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from nsa_harness.core.evidence.host import Process, SignalMasks, Task
from nsa_harness.core.verdict.host_waits import is_library
from nsa_harness.supervisor.capture.descriptors import holds
from nsa_harness.supervisor.capture.syscalls import kernel_fields, kernel_text, process_names, with_system_call

# psutil provides descendants and bytes of I/O. The rest is read here, because psutil lacks it (system calls, wait
# channels, thread states, peak memory, handled signals, the tracer), gives the start on a clock that may be set, takes
# several times as long for hundreds of processes (state, CPU time, memory), or ends an environment at its first empty
# entry, which a rank of the fork server has.
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_TASKS = 256  # threads that are read of one process


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The fields of /proc/PID/stat that are used here."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    rss_bytes: int
    started_ticks: int
    processor: int  # the CPU on which it last ran


def read_stat(pid: int, tid: int | None = None) -> Stat | None:
    """Return the fields, or None if the process or thread is gone."""
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
        started_ticks=int(fields[19]),
        processor=int(fields[36]),
    )


def exit_status(pid: int) -> int | None:
    """Return the exit code, or minus the signal, of a zombie; None for any other process."""
    head, _, tail = kernel_text(f"/proc/{pid}/stat").rpartition(") ")
    fields = tail.split()
    return os.waitstatus_to_exitcode(int(fields[49])) if head and fields[0] in "ZX" and len(fields) > 49 else None


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def descendants(root: int) -> list[Stat]:
    """Return the processes below `root`, parents before children."""
    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return []
    return [stat for child in below if (stat := read_stat(child.pid))]


def children(parent: int) -> list[Stat]:
    """Return the children of a process, including zombies."""
    try:
        found = psutil.Process(parent).children()
    except psutil.Error:
        return []
    return [stat for child in found if (stat := read_stat(child.pid))]


def environment(pid: int) -> dict[str, str]:
    """Return the environment that the process was started with, empty if unreadable."""
    pairs = (item.partition(b"=") for item in _words(pid, "environ") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command_words(pid: int) -> list[str]:
    return [word.decode(errors="replace") for word in _words(pid, "cmdline") if word]


def _words(pid: int, file: str) -> list[bytes]:
    """Return the NUL-terminated strings of a file, none if unreadable."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []


def peak_rss_bytes(pid: int) -> int | None:
    peak = kernel_fields(f"/proc/{pid}/status").get("VmHWM")
    return None if peak is None else int(peak.split()[0]) * 1024


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal (SigCgt)."""
    return bool(int(kernel_fields(f"/proc/{pid}/status").get("SigCgt", "0"), 16) >> (number - 1) & 1)


def io_bytes(pid: int) -> int | None:
    """Return the bytes read and written by system calls, or None without permission."""
    try:
        counters = psutil.Process(pid).io_counters()
    except (psutil.Error, OSError, RuntimeError):
        return None
    return int(counters.read_chars + counters.write_chars)


def task_io_bytes(pid: int, tid: int) -> int | None:
    """Return the bytes read and written by one thread, or None without permission."""
    counted = kernel_fields(f"/proc/{pid}/task/{tid}/io")
    return int(counted["rchar"]) + int(counted["wchar"]) if "wchar" in counted else None


_LAST_RAN = "se.exec_start"  # in /proc/PID/task/TID/sched; milliseconds; not in every kernel
_Clocks = dict[int, float | None]  # CPU -> its scheduler clock, read once per sweep


def idle_s(pid: int, tid: int, clocks: _Clocks | None = None) -> float | None:
    """Return the time since the thread last ran on a core, or None if the kernel does not show it."""
    then, stat = _last_ran_s(f"/proc/{pid}/task/{tid}/sched"), read_stat(pid, tid)
    if then is None or stat is None:
        return None
    known = {} if clocks is None else clocks
    if stat.processor not in known:
        known[stat.processor] = _clock_s(stat.processor)
    now = known[stat.processor]
    return None if now is None else max(0.0, now - then)


def _clock_s(processor: int) -> float | None:
    """Return the scheduler's clock of a core, which stops while the hypervisor gives the core to other machines.

    Only a thread that runs on the core shows it, so this thread moves there for a moment.
    """
    home = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {processor})
        return _last_ran_s("/proc/thread-self/sched")
    except OSError:
        return None
    finally:
        os.sched_setaffinity(0, home)


def _last_ran_s(path: str) -> float | None:
    for line in kernel_text(path).splitlines():
        if line.startswith(_LAST_RAN):
            return float(line.rpartition(":")[2]) / 1000
    return None


def all_idle_s(pid: int) -> float:
    """Return how long no thread of the program has run, without those of torch's libraries; 0 if unknown."""
    clocks: _Clocks = {}
    idle = [idle_s(pid, task.tid, clocks) for task in _tasks(pid, 0) if not is_library(task)]
    return min((0.0 if seconds is None else seconds for seconds in idle), default=0.0)


def read_process(pid: int, origin_ns: int, *, tasks: bool = True) -> Process | None:
    """Return one process, with times relative to `origin_ns`, or None if it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return None
    status = kernel_fields(f"/proc/{pid}/status") if tasks else {}
    return Process(
        pid=pid,
        parent=stat.parent,
        command=b" ".join(_words(pid, "cmdline")).decode(errors="replace").strip()[:300] or stat.command,
        state=stat.state,
        cpu_s=stat.cpu_s,
        io_bytes=io_bytes(pid),
        rss_bytes=stat.rss_bytes,
        tasks=tuple(_tasks(pid, origin_ns)) if tasks else (),
        open_ends=holds(pid) if tasks else (),
        traced_by=int(status.get("TracerPid", "0")) or None,
        signals=_signal_masks(status),
    )


def tracers(pid: int) -> dict[int, int]:
    """Return thread -> pid of its tracer, 0 = none."""
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
        task = Task(
            tid=tid,
            comm=stat.command,
            state=stat.state,
            wchan=kernel_text(f"/proc/{pid}/task/{tid}/wchan"),
            syscall="",
            wakes_at_s=None,
            timed=None,
            cpu_s=stat.cpu_s,
            io_bytes=task_io_bytes(pid, tid),
            idle_s=idle_s(pid, tid) if tid == pid else None,
        )
        yield with_system_call(task, pid, origin_ns)


# Processes in other mount or PID namespaces: where their files are, and which number they know themselves by.

_MAX_LINKS = 40  # the kernel's limit


def path_of(pid: int, file: str, proc: Path = Path("/proc")) -> Path:
    """Return the path at which this process can open a file that process `pid` names.

    It is below the root of `pid` if the two processes have different roots.

    Links are followed within that root, as the process sees them. The kernel would follow absolute links out of it.
    """
    home = proc / str(pid)
    if not _has_other_root(home, proc / "self"):
        return Path(file)
    root = home / "root"
    return root.joinpath(*_resolved(root, file if os.path.isabs(file) else os.path.join(_link(home / "cwd"), file)))


def inner_pid(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the process's pid in its own namespace."""
    return process_names(pid, proc)[-1]


def _has_other_root(home: Path, own: Path) -> bool:
    other = _link(home / "root")
    same = _link(home / "ns" / "mnt") == _link(own / "ns" / "mnt") and other == _link(own / "root")
    return bool(other) and not same


def _resolved(root: Path, file: str) -> list[str]:
    """Return the path components below `root` that lead to the file, with all links resolved."""
    found: list[str] = []
    left = [part for part in reversed(file.split("/")) if part not in ("", ".")]
    links = 0
    while left:
        part = left.pop()
        if part == "..":
            del found[-1:]
            continue
        target = _link(root.joinpath(*found, part))
        links += bool(target)
        if not target or links > _MAX_LINKS:
            found.append(part)
            continue
        found = [] if target.startswith("/") else found
        left += [name for name in reversed(target.split("/")) if name not in ("", ".")]
    return found


def _link(path: Path) -> str:
    """Return a link's target, or "" if it is no link or unreadable."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
