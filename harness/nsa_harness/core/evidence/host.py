"""The state of a host: processes, threads, memory, GPUs, processes that the kernel killed, and NCCL's log."""

from __future__ import annotations

import csv
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nsa_harness.core.stored_keys import stored_as


@stored_as(wake_count="woke")
@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel thread."""

    tid: int
    comm: str
    state: str  # R S D T t Z as in /proc
    wchan: str
    syscall: str  # "futex", "clock_nanosleep", "read", ... or "running", or "" if unreadable
    wakes_at_s: float | None  # end of a timed sleep or wait, if readable
    timed: bool | None  # the wait has a timeout; None = not readable
    cpu_s: float
    fd: int | None = None  # descriptor of the system call; for a poll the first one
    target: str = ""  # target of `fd`: "pipe:[123]", "socket:[456]", a path; file of a shared lock; "" if unreadable
    # Living processes that could end this wait: they hold the other end of the pipe, FIFO or socket, or the lock, or
    # are the child that is waited for. None = it waits for nothing of the kind, or not all could be read.
    held_by: tuple[int, ...] | None = None
    io_bytes: int | None = None  # read + written by this thread, None = not readable
    idle_s: float | None = None  # for a main thread: time since it last ran on a core; None = unknown
    wake_count: int = 0  # how often it was in a later sleep than in the snapshot before, since it was last elsewhere


@dataclass(frozen=True, kw_only=True)
class Socket:
    """One TCP socket of a process."""

    inode: int
    local: str  # "127.0.0.1:4711"
    peer: str
    state: str  # "ESTABLISHED", "SYN_SENT", ... as the kernel names them
    unacked_bytes: int  # written and not acknowledged by the other side
    unread_bytes: int  # arrived and not read; for a listening socket, connections that were not accepted
    retransmits: int  # consecutive retransmissions of the oldest unacknowledged segment
    acked_bytes: int | None = None  # over its life; None = the kernel refuses the query
    received_bytes: int | None = None
    peer_rank: int | None = None  # the other end belongs to this rank, or to a child of it
    in_job: bool = False  # the other end belongs to a process of the run, its launcher included


@dataclass(frozen=True, kw_only=True)
class SignalMasks:
    """Signal masks of a process, one bit per signal, as in /proc/PID/status; those of the main thread."""

    pending: int
    blocked: int
    ignored: int
    caught: int


@stored_as(open_ends="holds", is_frozen="frozen")
@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of the run: a rank or a child."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    io_bytes: int | None  # read + written, None = not readable
    rss_bytes: int
    tasks: tuple[Task, ...] = ()
    open_ends: tuple[
        str, ...
    ] = ()  # open ends of pipes, FIFOs, sockets: "pipe:[123] w", "/tmp/fifo r", "socket:[456] rw"
    sockets: tuple[Socket, ...] = ()
    traced_by: int | None = None  # the debugger that is attached at this moment
    is_frozen: bool = False  # by its control group
    signals: SignalMasks | None = None  # None = not read


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment, from nvidia-smi; None = it does not report the value."""

    index: int
    name: str
    utilisation: float | None  # 0..1
    used_bytes: int | None
    total_bytes: int | None
    ecc_errors: int | None  # uncorrected, since the driver was loaded
    pids: tuple[int, ...]
    used_by: dict[int, int] = field(default_factory=dict)  # pid -> bytes; only processes whose memory is reported


@dataclass(frozen=True, kw_only=True)
class MemoryAtEvent:
    """Memory that a rank reported at one moment. On a CPU there is no allocator to query: None."""

    moment: str  # "boot", "dump", "last"
    step: int
    rss_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class SentSignal:
    """A signal that a known sender sent to a process of the run."""

    pid: int  # 0 = every process of the job
    rank: int | None  # None = the launcher, or a child of a rank
    signal: str  # "SIGTERM"
    sender: str  # "harness", "torchrun", "kernel (out of memory)"
    at_s: float | None  # None = unknown


@stored_as(kill_messages="killed")
@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the node while the run was watched; None = not readable."""

    total_bytes: int | None
    available_bytes: int | None  # at the end
    limit_bytes: int | None  # the smallest limit of the control groups around the run
    used_bytes: int | None  # of that group, at the end
    oom_kills: int | None  # processes that the kernel killed in those groups since the launch
    kill_messages: tuple[str, ...]  # the kernel's log lines: "Out of memory: Killed process 71 (python) ..."


GPU_FIELDS = (
    "index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
_MAX_GPUS = 64
_MAX_PIDS = 64


def parse_gpus(table: str, processes: str) -> tuple[Gpu, ...]:
    """Return the GPUs from two CSV answers without header and units, in the order of the fields above.

    Raises ValueError if a line has another form.
    """
    pids: dict[str, dict[int, float | None]] = {}
    for uuid, pid, used in _rows(processes, len(PROCESS_FIELDS)):
        pids.setdefault(uuid, {})[int(pid)] = _number(used)
    return tuple(_gpu(row, pids) for row in list(_rows(table, len(GPU_FIELDS)))[:_MAX_GPUS])


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    for line, row in enumerate(csv.reader(text.splitlines(), skipinitialspace=True), start=1):
        if len(row) != columns:
            raise ValueError(f"nvidia-smi, line {line}: {len(row)} values, expected {columns}: {','.join(row)[:100]}")
        yield [word.strip() for word in row]


def _gpu(row: list[str], pids: Mapping[str, Mapping[int, float | None]]) -> Gpu:
    index, uuid, name, utilisation, used, total, errors = row
    percent, used_mib, total_mib = _number(utilisation), _number(used), _number(total)
    uncorrected, of_pids = _number(errors), pids.get(uuid, {})
    kept_pids = sorted(of_pids)[:_MAX_PIDS]
    return Gpu(
        index=int(index),
        name=name[:80],
        utilisation=None if percent is None else percent / 100,
        used_bytes=None if used_mib is None else int(used_mib) << 20,
        total_bytes=None if total_mib is None else int(total_mib) << 20,
        ecc_errors=None if uncorrected is None else int(uncorrected),
        pids=tuple(kept_pids),
        used_by={pid: int(mib) << 20 for pid in kept_pids if (mib := of_pids[pid]) is not None},
    )


def _number(word: str) -> float | None:
    """Return the number, or None for "[N/A]", "[Not Supported]" and "[Unknown Error]"."""
    return float(word) if word.replace(".", "", 1).isdigit() else None


_RECORD = re.compile(r"^\d+,\d+,(\d+),[^;]*;(.*)")  # level, number, microseconds since boot, flags; text
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+).*")
_CLOCK_SLACK_US = 2_000_000  # the log's clock and CLOCK_MONOTONIC drift apart by a little
_MAX_LINE = 300


def kill_messages_since(records: Iterable[str], began_us: int) -> Iterator[str]:
    """Yield the lines of /dev/kmsg on processes that the kernel killed after `began_us` (microseconds since boot)."""
    for record in records:
        parts = _RECORD.match(record)
        killed = _KILLED.search(parts[2]) if parts else None
        if parts and killed and int(parts[1]) >= began_us - _CLOCK_SLACK_US:
            yield killed[0][:_MAX_LINE]


def killed_pids(lines: Iterable[str]) -> Iterator[int]:
    return (int(killed[1]) for line in lines if (killed := _KILLED.search(line)))


def sigterm_reaction(process: Process) -> str:
    """Return how the process would react to SIGTERM, by its state and masks; empty if unknown. Send no signal."""
    if process.state == "D":
        return "in state D, in which no signal reaches it, SIGKILL included, until its call of the kernel is over"
    if process.state in "Tt" or process.is_frozen:
        return "stopped: of all signals only SIGKILL and SIGCONT act"
    if process.signals is None or process.state in "ZX":
        return ""
    masks, bit = process.signals, 1 << (signal.SIGTERM - 1)
    answer = "SIGTERM ends it"
    if masks.blocked & bit:
        answer = "it blocks SIGTERM: only SIGKILL ends it"
    elif masks.ignored & bit:
        answer = "it ignores SIGTERM: only SIGKILL ends it"
    elif masks.caught & bit:
        answer = "it handles SIGTERM itself, which in Python waits until the call that it is blocked in returns"
    waiting = ", ".join(_signals_in(masks.pending))
    return f"{answer}; sent and not taken yet: {waiting}" if waiting else answer


def _signals_in(mask: int) -> Iterator[str]:
    names = {number_and_name.value: number_and_name.name for number_and_name in signal.Signals}
    return (names.get(number, f"signal {number}") for number in range(1, 65) if mask >> (number - 1) & 1)


# NCCL's output with NCCL_DEBUG=INFO: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug
_NCCL = re.compile(r"\bNCCL (?:INFO|WARN|version)\b")
_NCCL_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NCCL_CHANNELS = re.compile(r"(\d+) coll channels,.*?(\d+) p2p channels,")
_NCCL_TRANSPORT = re.compile(r"Channel \S+ ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via ([\w-]+(?:/[A-Za-z][\w-]*)?)")
_NCCL_NETWORK = re.compile(r"Using network ([\w -]+)")
_NCCL_WARNING = re.compile(r"NCCL WARN (.+)")
_MAX_WARNINGS = 4


@dataclass(frozen=True, kw_only=True)
class NcclInfo:
    """How NCCL connected the ranks, from its log."""

    version: str | None
    channels: int | None  # for collectives
    p2p_channels: int | None
    transports: tuple[str, ...]  # "P2P/CUMEM", "SHM/direct", "NET/IB"; the most used first
    network: str | None
    seen: tuple[int, ...]  # ranks whose log has any line of NCCL's
    connected: tuple[int, ...]  # ranks of `seen` that finished every communicator that they began
    warnings: tuple[str, ...]


def read_nccl(logs: Mapping[int, Iterable[str]]) -> NcclInfo | None:
    """Return how NCCL connected the ranks, from their logs; None if NCCL wrote nothing."""
    lines = {
        rank: nccl_lines for rank, log in logs.items() if (nccl_lines := [line for line in log if _NCCL.search(line)])
    }
    if not lines:
        return None
    everything = [line for nccl_lines in lines.values() for line in nccl_lines]
    channels = next((match for line in everything if (match := _NCCL_CHANNELS.search(line))), None)
    transports = Counter(match[1] for line in everything if (match := _NCCL_TRANSPORT.search(line)))
    warnings = (match[1].strip()[:_MAX_LINE] for line in everything if (match := _NCCL_WARNING.search(line)))
    return NcclInfo(
        version=_first(_NCCL_VERSION, everything),
        channels=int(channels[1]) if channels else None,
        p2p_channels=int(channels[2]) if channels else None,
        transports=tuple(
            name
            for name, _ in sorted(
                transports.items(), key=lambda transport_count: (-transport_count[1], transport_count[0])
            )
        ),
        network=_first(_NCCL_NETWORK, everything),
        seen=tuple(sorted(lines)),
        connected=tuple(rank for rank in sorted(lines) if _has_connected(lines[rank])),
        warnings=tuple(dict.fromkeys(warnings))[:_MAX_WARNINGS],
    )


def _has_connected(lines: Iterable[str]) -> bool:
    """Whether the rank finished every communicator that it began. NCCL before 2.18 does not log the beginning."""
    begun_and_done = Counter(word for line in lines for word in ("Init START", "Init COMPLETE") if word in line)
    return begun_and_done["Init COMPLETE"] >= max(1, begun_and_done["Init START"])


def _first(expression: re.Pattern[str], lines: Iterable[str]) -> str | None:
    return next((match[1].strip() for line in lines if (match := expression.search(line))), None)
