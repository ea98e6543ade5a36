"""The node around a run: control groups, memory limits, processes that the kernel killed, and the state of the GPUs."""

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

from nsa_harness.core.evidence.host import GPU_FIELDS, PROCESS_FIELDS, Gpu, HostMemory, killed_since, parse_gpus
from nsa_harness.supervisor.capture.syscalls import kernel_text
from nsa_harness.supervisor.launch.machine import memory_bytes

_KMSG = Path("/dev/kmsg")
_KMSG_LIMIT_S = 0.3
_MAX_RECORDS = 20_000
_MAX_KILLED = 16


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """What is so now, at the launch; `ended` tells what has changed. The run lives in our own control groups."""

    # CLOCK_MONOTONIC, which is what the kernel's log counts in as long as the machine does not sleep.
    began_ns: int = field(default_factory=time.monotonic_ns)
    before: GroupMemory = field(default_factory=lambda: group_memory(os.getpid()))

    def ended(self, kmsg: Path = _KMSG) -> HostMemory:
        now, (total_bytes, available_bytes) = group_memory(os.getpid()), memory_bytes()
        counted = None not in (now.oom_kills, self.before.oom_kills)
        return HostMemory(
            total_bytes=total_bytes,
            available_bytes=available_bytes,
            limit_bytes=now.limit_bytes,
            used_bytes=now.used_bytes,
            oom_kills=(now.oom_kills or 0) - (self.before.oom_kills or 0) if counted else None,
            killed=tuple(islice(killed_since(_records(kmsg), self.began_ns // 1000), _MAX_KILLED)),
        )


def _records(kmsg: Path) -> Iterator[str]:
    """What the log holds now, a record a read. It never ends by itself, so it is read without waiting."""
    try:
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
        return " "  # overwritten while we read; the next one follows
    except OSError:
        return None


_LIMIT_S = 2.5  # for both questions


def gpu_state(tool: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """Every GPU of the node. Raises CommandFailed where there is no answer, ValueError for one of another form."""
    deadline = time.monotonic() + _LIMIT_S
    table = _ask(tool, "gpu", GPU_FIELDS, deadline)
    return parse_gpus(table, _ask(tool, "compute-apps", PROCESS_FIELDS, deadline))


def _ask(tool: str, what: str, fields: tuple[str, ...], deadline: float) -> str:
    query = f"--query-{what}={','.join(fields)}"
    return answer_of([tool, query, "--format=csv,noheader,nounits"], deadline - time.monotonic())


# Control groups of a process, version 1 and 2: whether it is frozen, its memory limit, and what the kernel killed.

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for "no limit"
_MAX_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The memory of a process's control groups; None = not readable."""

    limit_bytes: int | None  # the smallest of its group and those around it
    used_bytes: int | None  # of the group that has it, else of the innermost
    oom_kills: int | None  # since the groups were made


def frozen(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> bool:
    """A frozen process takes no signal and shows in state D or S, whatever it slept in."""
    return any(
        kernel_text(group / "freezer.state") == "FROZEN" or _counter(group / "cgroup.events", "frozen")
        for group in groups_of(pid, "freezer", root, proc)
    )


def group_memory(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> GroupMemory:
    """Limit, use and kills of the groups of `pid`, with those around it."""
    groups = list(groups_of(pid, "memory", root, proc))
    limits = {group: limit for group in groups if (limit := limit_bytes(group)) is not None}
    tightest = min(limits, key=lambda group: limits[group], default=groups[0] if groups else None)
    # A kill counts in its own group; version 2 counts it in all around it too, so the largest number has them all.
    kills = [count for group in groups if (count := _kills(group)) is not None]
    return GroupMemory(
        limit_bytes=min(limits.values(), default=None),
        used_bytes=None if tightest is None else used_bytes(tightest),
        oom_kills=max(kills, default=None),
    )


def groups_of(pid: int | str, controller: str, root: Path = ROOT, proc: Path = Path("/proc")) -> Iterator[Path]:
    """The directories of a process's groups and of those around them, innermost first; a limit of each one counts.

    Version 1 has a tree for each controller; version 2, whose line names none, has one for all. In a container the
    kernel names the path as the host sees it, and only the container's own group is mounted: then the mount itself is
    the group.
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
    """The first of the files that holds one."""
    texts = (kernel_text(file) for file in files)
    return next((int(text) for text in texts if text.isdigit()), None)


def limit_bytes(group: Path) -> int | None:
    limit = number_in(group / "memory.max", group / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def used_bytes(group: Path) -> int | None:
    return number_in(group / "memory.current", group / "memory.usage_in_bytes")


def _kills(group: Path) -> int | None:
    found = _counter(group / "memory.events", "oom_kill")
    return _counter(group / "memory.oom_control", "oom_kill") if found is None else found


def _counter(file: Path, name: str) -> int | None:
    for line in kernel_text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


# Diagnostic commands, with a limit that holds even if the command, or a child of it, does not die.

_MAX_OUTPUT_BYTES = 32 << 20
_MAX_ERROR_BYTES = 1 << 14
_DEATH_S = 0.2  # what a killed process needs to leave; one that hangs in the kernel is left behind


class CommandFailed(Exception):
    """Says which command gave no answer, and why."""


def answer_of(command: Sequence[str], limit_s: float, before_killed: Callable[[int], None] | None = None) -> str:
    """What the command prints. Its output goes to a file, so that no child that keeps a pipe open is waited for.

    `before_killed` is called with the process that is about to be killed. Raises CommandFailed when it cannot start,
    fails, or has not ended within `limit_s`; then it is killed.
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
            if before_killed:
                before_killed(process.pid)
            raise CommandFailed(f"{name}: no answer within {limit_s:.1f} s{_killed(process)}") from None
        if status != 0:
            raise CommandFailed(f"{name}: {_reason(_output(err.fileno(), _MAX_ERROR_BYTES)) or f'status {status}'}")
        return _output(out.fileno(), _MAX_OUTPUT_BYTES)


def _killed(process: subprocess.Popen[bytes]) -> str:
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
    """The line that names the error; a trace of the tool's own may follow it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.lower().startswith("error")]
    return (named or lines[-1:] or [""])[0][:300]
