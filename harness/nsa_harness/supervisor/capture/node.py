"""Reads the state of a node: control groups, memory, processes killed by the kernel, and GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from nsa_harness.core.evidence.host import (
    GPU_FIELDS,
    HEALTH_FIELDS,
    PROCESS_FIELDS,
    Gpu,
    HostMemory,
    gpu_errors_since,
    kill_messages_since,
    parse_gpus,
)
from nsa_harness.supervisor.capture.syscalls import kernel_text
from nsa_harness.supervisor.launch.machine import memory_bytes

_KMSG = Path("/dev/kmsg")
_KMSG_LIMIT_S = 0.3
_MAX_RECORDS = 20_000
_MAX_KILLED = 16


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """The state of the memory when a run was launched, kept to find out later what has changed."""

    # CLOCK_MONOTONIC, which is also the clock of the kernel's log unless the machine was suspended.
    started_ns: int = field(default_factory=time.monotonic_ns)
    initial: GroupMemory = field(default_factory=lambda: group_memory(os.getpid()))

    def changes(self, kmsg: Path = _KMSG) -> HostMemory:
        """Return the node's current memory state, and the processes that the OOM killer has killed since the launch."""
        now, (total_bytes, available_bytes) = group_memory(os.getpid()), memory_bytes()
        is_countable = None not in (now.oom_kills, self.initial.oom_kills)
        return HostMemory(
            total_bytes=total_bytes,
            available_bytes=available_bytes,
            limit_bytes=now.limit_bytes,
            used_bytes=now.used_bytes,
            oom_kills=(now.oom_kills or 0) - (self.initial.oom_kills or 0) if is_countable else None,
            kill_messages=tuple(islice(kill_messages_since(_records(kmsg), self.started_ns // 1000), _MAX_KILLED)),
        )


def _records(kmsg: Path) -> Iterator[str]:
    """Yield the lines that are currently in the kernel log."""
    try:  # non-blocking, because a read at the end of the log would wait
        log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    deadline = time.monotonic() + _KMSG_LIMIT_S
    try:
        for _ in range(_MAX_RECORDS):
            record = _next_record(log)
            if record is None or time.monotonic() > deadline:
                return
            yield from record.splitlines()
    finally:
        os.close(log)


def _next_record(log: int) -> str | None:
    try:
        return os.read(log, 8192).decode(errors="replace") or None
    except BrokenPipeError:
        return " "  # this record has been overwritten; the next read returns the next record
    except OSError:
        return None


_GPU_LIMIT_S = 2.5  # time limit for all queries together
_MAX_GPU_ERRORS = 16


def gpu_errors(since_ns: int, kmsg: Path = _KMSG) -> tuple[str, ...]:
    """Return the errors of GPUs in the kernel's log since `since_ns` on the monotonic clock, () if it is unreadable."""
    return tuple(islice(gpu_errors_since(_records(kmsg), since_ns // 1000), _MAX_GPU_ERRORS))


def gpu_state(tool: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """Return the state of every GPU of the node. Raise CommandFailed or ValueError if nvidia-smi gives none."""
    deadline = time.monotonic() + _GPU_LIMIT_S
    with_health = True
    try:
        table = _query_gpus(tool, "gpu", (*GPU_FIELDS, *HEALTH_FIELDS), deadline)
    except CommandFailed:
        if time.monotonic() >= deadline:
            raise
        with_health = False  # an older driver refuses fields that it does not know
        table = _query_gpus(tool, "gpu", GPU_FIELDS, deadline)
    return parse_gpus(table, _query_gpus(tool, "compute-apps", PROCESS_FIELDS, deadline), with_health=with_health)


def _query_gpus(tool: str, kind: str, fields: tuple[str, ...], deadline: float) -> str:
    query = f"--query-{kind}={','.join(fields)}"
    return run_command([tool, query, "--format=csv,noheader,nounits"], deadline - time.monotonic())


# Control groups of a process (versions 1 and 2): whether it is frozen, its memory limit, and the number of OOM kills.

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for "no limit"
_MAX_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The memory limit, memory use and number of OOM kills of a control group. A value is None if it is unreadable."""

    limit_bytes: int | None  # the smallest limit of its group and the parent groups
    used_bytes: int | None  # memory used by the group with this limit; without a limit, by the innermost group
    oom_kills: int | None  # since the groups were created


def is_frozen(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> bool:
    """Return whether the process is frozen by its control group. A frozen process receives no signals."""
    return any(
        kernel_text(group / "freezer.state") == "FROZEN" or _counter(group / "cgroup.events", "frozen")
        for group in control_groups(pid, "freezer", root, proc)
    )


def group_memory(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> GroupMemory:
    """Return the memory limit, memory use and number of OOM kills in the control groups of a process."""
    groups = list(control_groups(pid, "memory", root, proc))
    limits = {group: limit for group in groups if (limit := limit_bytes(group)) is not None}
    tightest = min(limits, key=lambda group: limits[group], default=groups[0] if groups else None)
    # A kill is counted in its own group, and in version 2 also in all parent groups. So the largest number includes
    # all.
    kills = [count for group in groups if (count := _kills(group)) is not None]
    return GroupMemory(
        limit_bytes=min(limits.values(), default=None),
        used_bytes=None if tightest is None else used_bytes(tightest),
        oom_kills=max(kills, default=None),
    )


def control_groups(pid: int | str, controller: str, root: Path = ROOT, proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yield the directories of the control groups of a process for `controller`, innermost first.

    Version 1 has one tree per controller. Version 2 has a single tree, whose line in /proc/PID/cgroup names no
    controller. In a container, the kernel shows the host's path, but only the container's own group is mounted; the
    mount itself is then the group.
    """
    for line in kernel_text(proc / str(pid) / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part and part != ".."][:_MAX_DEPTH]
        for mount in (root / controller,) if names else (root / "unified", root):
            homes = (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
            yield from (home for home in homes if home.is_dir())


def number_in(*files: Path) -> int | None:
    """Return the number in the first of `files` that contains one, or None if no file does."""
    texts = (kernel_text(file) for file in files)
    return next((int(text) for text in texts if text.isdigit()), None)


def limit_bytes(group: Path) -> int | None:
    limit = number_in(group / "memory.max", group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def used_bytes(group: Path) -> int | None:
    return number_in(group / "memory.current", group / "memory.usage_in_bytes")


def _kills(group: Path) -> int | None:
    kills = _counter(group / "memory.events", "oom_kill")
    return _counter(group / "memory.oom_control", "oom_kill") if kills is None else kills


def _counter(file: Path, name: str) -> int | None:
    for line in kernel_text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


# Diagnostic commands. Their time limit is kept even if the command or one of its children cannot be killed.

_MAX_OUTPUT_BYTES = 32 << 20
_MAX_ERROR_BYTES = 1 << 14
_DEATH_S = 0.2  # a killed process exits within this time unless it is stuck in the kernel


class CommandFailed(Exception):
    """Raised if a diagnostic command fails. The message names the command and the reason."""


def run_command(command: Sequence[str], limit_s: float, before_kill: Callable[[int], None] | None = None) -> str:
    """Run a command and return its output. Raise CommandFailed if it fails or takes too long.

    `before_kill` is called with the pid of a command that takes longer than `limit_s`, before it is killed. The output
    goes to a file, because a child process that keeps a pipe open could block the reader.
    """
    name = os.path.basename(command[0])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise CommandFailed(f"{name}: {error.strerror or error}") from error
        try:
            status = process.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            if before_kill:
                before_kill(process.pid)
            raise CommandFailed(f"{name}: no result within {limit_s:.1f} s{_kill_and_wait(process)}") from None
        if status != 0:
            raise CommandFailed(f"{name}: {_reason(_output(err.fileno(), _MAX_ERROR_BYTES)) or f'status {status}'}")
        return _output(out.fileno(), _MAX_OUTPUT_BYTES)


def _kill_and_wait(process: subprocess.Popen[bytes]) -> str:
    """Kill a command and its process group. Return a note for the error message if it survives, or "" otherwise."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=_DEATH_S)
    except subprocess.TimeoutExpired:
        return ", and SIGKILL did not end it"
    return ""


def _output(file: int, limit_bytes: int) -> str:
    return os.pread(file, limit_bytes, 0).decode(errors="replace")


def _reason(text: str) -> str:
    """Return the line that states the error in `text`, a diagnostic tool's error output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    error_lines = [line for line in lines if line.lower().startswith("error")]
    return (error_lines or lines[-1:] or [""])[0][:300]
