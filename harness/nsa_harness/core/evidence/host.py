"""Data about a host, including its processes, sockets, memory and GPUs."""

from __future__ import annotations

import csv
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nsa_harness.core.stored_keys import stored_as


@stored_as(wake_count="woke")
@dataclass(frozen=True, kw_only=True)
class Task:
    """One thread of a process, as the kernel reports it in /proc."""

    tid: int
    comm: str  # name of the thread
    state: str  # R, S, D, T, t or Z
    wchan: str  # the kernel function in which the thread waits
    syscall: str  # "futex", "clock_nanosleep", "read", ... or "running", or "" if unreadable
    wakes_at_s: float | None  # end of a timed sleep or wait, if readable
    timed: bool | None  # the wait has a timeout; None = not readable
    cpu_s: float
    fd: int | None = None  # descriptor of the system call; for a poll, the first one
    target: str = ""  # what `fd` is: "pipe:[123]", "socket:[456]", a path; file of a shared lock; "" if unreadable
    # Living processes that could end this wait: they have the other end of the pipe, FIFO or socket open, they hold the
    # lock, or they are the child that the thread waits for. None = no such wait, or some process could not be read.
    held_by: tuple[int, ...] | None = None
    io_bytes: int | None = None  # bytes read and written by this thread; None = not readable
    read_bytes: int | None = None  # the part of `io_bytes` that the thread has read; None = not readable
    timeout_s: float | None = None  # time limit of a poll or select, counted from its start; None = unknown or none
    idle_s: float | None = None  # for a main thread: time since it last ran on a core; None = unknown
    wake_count: int = 0  # wake-ups from the same sleep, counted between snapshots, since it last did other work


@dataclass(frozen=True, kw_only=True)
class Socket:
    """One TCP socket of a process."""

    inode: int
    local: str  # the local address, "127.0.0.1:4711"
    peer: str  # the address of the other end
    state: str  # the kernel's name of the state: "ESTABLISHED", "SYN_SENT", ...
    unacked_bytes: int  # bytes written and not acknowledged by the other end
    unread_bytes: int  # bytes received and not read; for a listening socket, the number of connections not yet accepted
    retransmits: int  # consecutive retransmissions of the oldest unacknowledged segment
    acked_bytes: int | None = None  # bytes that the other end has acknowledged; None = the kernel refuses the query
    received_bytes: int | None = None  # bytes received; None = the kernel refuses the query
    peer_rank: int | None = None  # the other end belongs to this rank or to a child process of this rank
    in_job: bool = False  # the other end belongs to a process of the run, including its launcher
    is_store: bool = False  # a connection to the job's key-value store, whichever process and host has it


@dataclass(frozen=True, kw_only=True)
class SignalMasks:
    """The signal masks of a process's main thread, one bit per signal."""

    pending: int
    blocked: int
    ignored: int
    caught: int


@stored_as(open_ends="holds", is_frozen="frozen")
@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of the run: a rank, or a child process of a rank."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float  # CPU time so far
    io_bytes: int | None  # bytes read and written so far; None = not readable
    rss_bytes: int
    tasks: tuple[Task, ...] = ()
    open_ends: tuple[
        str, ...
    ] = ()  # open ends of pipes, FIFOs, sockets: "pipe:[123] w", "/tmp/fifo r", "socket:[456] rw"
    sockets: tuple[Socket, ...] = ()
    traced_by: int | None = None  # process id of the debugger that is attached at this moment
    is_frozen: bool = False  # frozen by its control group
    signals: SignalMasks | None = None  # None = not read


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The state of one GPU according to nvidia-smi. A value that nvidia-smi does not report is None."""

    index: int
    name: str
    utilisation: float | None  # 0 to 1
    used_bytes: int | None
    total_bytes: int | None
    ecc_errors: int | None  # number of uncorrected memory errors since the driver was loaded
    pids: tuple[int, ...]  # processes that use the GPU
    used_by: dict[int, int] = field(default_factory=dict)  # process id -> bytes; only if nvidia-smi reports the bytes
    # Its health. Drivers before version 535 do not report it in this form.
    bus: str = ""  # PCI address, "00000000:65:00.0"
    needs_reset: bool | None = None  # defective memory is replaced at the next reset
    has_failed_repair: bool | None = None  # defective memory could not be replaced
    slowdowns: tuple[str, ...] = ()  # what slows it down: "thermal" (it is too hot) or "power brake" (power supply)
    link_width: int | None = None  # lanes of its PCIe connection
    max_link_width: int | None = None  # lanes that the GPU and its slot have
    errors: tuple[str, ...] = ()  # the driver's errors since the run began, "79, GPU has fallen off the bus."
    node: str = ""  # the name of its node in a job on several nodes


@dataclass(frozen=True, kw_only=True)
class MemoryAtEvent:
    """The memory that a rank used at one event. Values from torch's CUDA allocator are None on a CPU."""

    moment: str  # "boot" (after start-up), "dump" (a memory dump during training) or "last" (the latest heartbeat)
    step: int
    rss_bytes: int | None  # resident memory of the process
    allocated_bytes: int | None  # allocated by tensors
    reserved_bytes: int | None  # reserved by torch's allocator


@dataclass(frozen=True, kw_only=True)
class SentSignal:
    """A signal that was sent to a process of the run, and its sender."""

    pid: int  # 0 = the signal went to every process of the job
    rank: int | None  # None = the process is the launcher or a child process of a rank
    signal: str  # "SIGTERM"
    sender: str  # "harness", "torchrun", "kernel (out of memory)"
    at_s: float | None  # None = unknown


@stored_as(kill_messages="killed")
@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of the node while the run was watched. Values that could not be read are None."""

    total_bytes: int | None
    available_bytes: int | None  # at the end of the run
    limit_bytes: int | None  # the smallest memory limit of the run's control groups
    used_bytes: int | None  # memory use of the control group with that limit, at the end of the run
    oom_kills: int | None  # number of processes that the kernel killed in these control groups since the launch
    kill_messages: tuple[str, ...]  # lines of the kernel's log: "Out of memory: Killed process 71 (python) ..."


GPU_FIELDS = (
    "index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
HEALTH_FIELDS = (
    "pci.bus_id", "remapped_rows.pending", "retired_pages.pending", "remapped_rows.failure",
    "clocks_event_reasons.hw_thermal_slowdown", "clocks_event_reasons.sw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
_MAX_GPUS = 64
_MAX_PIDS = 64


def parse_gpus(table: str, processes: str, *, with_health: bool = False) -> tuple[Gpu, ...]:
    """Return the state of each GPU according to two CSV outputs of nvidia-smi.

    `table` has the columns GPU_FIELDS, and then HEALTH_FIELDS if `with_health`. `processes` has the columns
    PROCESS_FIELDS. Both have no header and no units. Raise ValueError if a line has another form.
    """
    pids: dict[str, dict[int, float | None]] = {}
    for uuid, pid, used in _rows(processes, len(PROCESS_FIELDS)):
        pids.setdefault(uuid, {})[int(pid)] = _number(used)
    columns = len(GPU_FIELDS) + (len(HEALTH_FIELDS) if with_health else 0)
    return tuple(_with_health(_gpu(row, pids), row) for row in list(_rows(table, columns))[:_MAX_GPUS])


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    """Yield the cells of each CSV line. Raise ValueError if a line does not have exactly `columns` cells."""
    for line, row in enumerate(csv.reader(text.splitlines(), skipinitialspace=True), start=1):
        if len(row) != columns:
            raise ValueError(f"nvidia-smi, line {line}: {len(row)} values, expected {columns}: {','.join(row)[:100]}")
        yield [word.strip() for word in row]


def _gpu(row: list[str], pids: Mapping[str, Mapping[int, float | None]]) -> Gpu:
    index, uuid, name, utilisation, used, total, errors = row[: len(GPU_FIELDS)]
    percent, used_mib, total_mib = _number(utilisation), _number(used), _number(total)
    ecc_errors, memory_of_pid = _number(errors), pids.get(uuid, {})
    listed_pids = sorted(memory_of_pid)[:_MAX_PIDS]
    return Gpu(
        index=int(index),
        name=name[:80],
        utilisation=None if percent is None else percent / 100,
        used_bytes=None if used_mib is None else int(used_mib) << 20,
        total_bytes=None if total_mib is None else int(total_mib) << 20,
        ecc_errors=None if ecc_errors is None else int(ecc_errors),
        pids=tuple(listed_pids),
        used_by={pid: int(mib) << 20 for pid in listed_pids if (mib := memory_of_pid[pid]) is not None},
    )


def _with_health(gpu: Gpu, row: Sequence[str]) -> Gpu:
    if len(row) == len(GPU_FIELDS):
        return gpu
    bus, rows_pending, pages_pending, failure, hw_thermal, sw_thermal, brake, width, most = row[len(GPU_FIELDS) :]
    known_repairs = {"Yes", "No"}.intersection((rows_pending, pages_pending))
    link_width, max_link_width = _number(width), _number(most)
    return replace(
        gpu,
        bus=bus[:80],
        needs_reset="Yes" in known_repairs if known_repairs else None,
        has_failed_repair={"Yes": True, "No": False}.get(failure),
        slowdowns=(("thermal",) if "Active" in (hw_thermal, sw_thermal) else ())
        + (("power brake",) if brake == "Active" else ()),
        link_width=None if link_width is None else int(link_width),
        max_link_width=None if max_link_width is None else int(max_link_width),
    )


def with_gpu_errors(gpus: Sequence[Gpu], messages: Iterable[str], node: str) -> tuple[Gpu, ...]:
    """Return the GPUs of a node with their errors in messages of the kernel's log.

    A GPU that the driver has lost is in its messages, but not in the list of nvidia-smi. It is added with the index -1.
    """
    errors: dict[str, list[str]] = {}
    for error in filter(None, map(_GPU_ERROR.search, messages)):
        errors.setdefault(_slot(error[1]), []).append(f"{error[2]}, {error[3]}" if error[3] else error[2])
    known = [replace(gpu, node=node, errors=tuple(errors.pop(_slot(gpu.bus), ()))) for gpu in gpus]
    if not all(gpu.bus for gpu in gpus):
        return tuple(known)  # a message may be about a listed GPU whose address is unknown
    lost = [
        replace(_LOST_GPU, bus=bus, node=node, errors=tuple(own_errors))
        for bus, own_errors in list(errors.items())[:_MAX_GPUS]
    ]
    return (*known, *lost)


_LOST_GPU = Gpu(
    index=-1, name="", utilisation=None, used_bytes=None, total_bytes=None, ecc_errors=None, pids=()
)  # fmt: skip


def _slot(bus: str) -> str:
    """Return a PCI address without its function, as in "0000:65:00". nvidia-smi and the driver's log differ in form."""
    domain, _, slot = bus.lower().partition(".")[0].partition(":")
    return f"{domain[-4:]}:{slot}"


def _number(word: str) -> float | None:
    """Return the number in a cell of nvidia-smi output, or None if it contains none, as in "[N/A]"."""
    return float(word) if word.replace(".", "", 1).isdigit() else None


_RECORD = re.compile(r"^\d+,\d+,(\d+),[^;]*;(.*)")  # level, number, microseconds since boot, flags; text
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+).*")
# https://docs.nvidia.com/deploy/xid-errors/ lists the numbers.
_GPU_ERROR = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")
_CLOCK_SLACK_US = 2_000_000  # the log's clock and CLOCK_MONOTONIC drift apart by a little
_MAX_LINE = 300


def kill_messages_since(records: Iterable[str], began_us: int) -> Iterator[str]:
    """Yield the kernel messages since `began_us` after boot about processes killed for lack of memory."""
    return _messages_since(records, began_us, _KILLED)


def gpu_errors_since(records: Iterable[str], began_us: int) -> Iterator[str]:
    """Yield the errors of GPUs that NVIDIA's driver has written to the kernel's log since `began_us` after boot."""
    return _messages_since(records, began_us, _GPU_ERROR)


def _messages_since(records: Iterable[str], began_us: int, pattern: re.Pattern[str]) -> Iterator[str]:
    for record in records:
        parts = _RECORD.match(record)
        message = pattern.search(parts[2]) if parts else None
        if parts and message and int(parts[1]) >= began_us - _CLOCK_SLACK_US:
            yield message[0][:_MAX_LINE]


def killed_pids(lines: Iterable[str]) -> Iterator[int]:
    """Yield the process id of each killed process mentioned in `lines`, which are kernel messages."""
    return (int(message[1]) for line in lines if (message := _KILLED.search(line)))


def sigterm_reaction(process: Process) -> str:
    """Return how a process would react to SIGTERM, according to its state and masks, or "" if this is unknown."""
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


@stored_as(logged_ranks="seen", connected_ranks="connected")
@dataclass(frozen=True, kw_only=True)
class NcclInfo:
    """NCCL's configuration and connections according to its log. A value that is not in the log is None."""

    version: str | None
    channels: int | None  # number of channels for collectives
    p2p_channels: int | None  # number of channels for point-to-point transfers
    transports: tuple[str, ...]  # "P2P/CUMEM", "SHM/direct", "NET/IB"; the most used first
    network: str | None
    logged_ranks: tuple[int, ...]  # ranks whose log has a line of NCCL
    connected_ranks: tuple[int, ...]  # ranks of these that initialized every communicator that they began to initialize
    warnings: tuple[str, ...]


def read_nccl(logs: Mapping[int, Iterable[str]]) -> NcclInfo | None:
    """Return NCCL's configuration from the ranks' logs, or None if NCCL logged nothing."""
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
        logged_ranks=tuple(sorted(lines)),
        connected_ranks=tuple(rank for rank in sorted(lines) if _has_connected(lines[rank])),
        warnings=tuple(dict.fromkeys(warnings))[:_MAX_WARNINGS],
    )


@dataclass(frozen=True, kw_only=True)
class LaunchCount:
    """The number of operations of one kind that some ranks of a communicator have launched."""

    operation: str  # "AllReduce", "Broadcast", ...
    count: int
    ranks: tuple[int, ...]  # as numbered in the communicator


@dataclass(frozen=True, kw_only=True)
class NcclCommunicator:
    """A communicator of this run, according to NCCL's RAS service."""

    name: str  # its hash, which is also in NCCL's log
    size: int
    job_ranks: dict[int, int]  # rank in the communicator -> rank of the job; only ranks on this node
    missing: tuple[int, ...]  # ranks that did not answer the service, as numbered in the communicator
    launched: tuple[LaunchCount, ...]  # only the operations that some ranks have launched more often than others


def _has_connected(lines: Iterable[str]) -> bool:
    """Return whether the rank, according to its log, completed every NCCL communicator that it began to initialize."""
    counts = Counter(text for line in lines for text in ("Init START", "Init COMPLETE") if text in line)
    return counts["Init COMPLETE"] >= max(1, counts["Init START"])


def _first(expression: re.Pattern[str], lines: Iterable[str]) -> str | None:
    return next((match[1].strip() for line in lines if (match := expression.search(line))), None)
