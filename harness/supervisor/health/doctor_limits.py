"""The limits that this process is under: its own, and those of its control groups (version 1 and 2)."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from harness.core.health.checkup_facts import CoreFacts, LimitFacts, MemoryFacts

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a number near 2^63


def limit_facts(proc: Path = _PROC, groups: Path = _GROUPS) -> LimitFacts:
    limit, used = tightest([_own_processes(proc), *_group_processes(proc, groups)])
    return LimitFacts(
        processes=limit,
        processes_used=used,
        open_files=_soft(resource.RLIMIT_NOFILE),
        core_bytes=_soft(resource.RLIMIT_CORE),
        core_pattern=_text(proc / "sys/kernel/core_pattern") or "core",
        address_space_bytes=_soft(resource.RLIMIT_AS),
    )


def memory_facts(proc: Path = _PROC, groups: Path = _GROUPS) -> MemoryFacts:
    """Of the machine, or of the control group that grants least."""
    lines = dict(line.split(":", 1) for line in _text(proc / "meminfo").splitlines() if ":" in line)
    total, available = (_kib(lines.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    for group in _group_paths("memory", proc, groups):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < min(total, _UNLIMITED_BYTES):
            total = limit
            available = min(available, max(0, limit - max(0, used - _reclaimable(group))))
    return MemoryFacts(total_bytes=total, available_bytes=available)


def core_facts(proc: Path = _PROC, groups: Path = _GROUPS) -> CoreFacts:
    quotas = [quota for group in _group_paths("cpu", proc, groups) if (quota := _quota(group)) is not None]
    return CoreFacts(usable=len(os.sched_getaffinity(0)), quota=min(quotas, default=None))


def tightest(limits: list[tuple[int | None, int]]) -> tuple[int | None, int]:
    """Of (limit, in use), the one that leaves least."""
    real = [(limit, used) for limit, used in limits if limit is not None]
    return min(real, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _own_processes(proc: Path) -> tuple[int | None, int]:
    """RLIMIT_NPROC counts the threads of the user; the kernel lets root pass."""
    limit = None if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)
    return limit, 0 if limit is None else sum(_threads(proc))


def _threads(proc: Path) -> Iterator[int]:
    """Of each process of this user."""
    for status in proc.glob("[0-9]*/status"):
        fields = dict(line.split(":\t", 1) for line in _text(status).splitlines() if ":\t" in line)
        if fields.get("Uid", "").split("\t")[0] == str(os.getuid()):
            yield int(fields.get("Threads", "1"))


def _group_processes(proc: Path, groups: Path) -> Iterator[tuple[int | None, int]]:
    for group in _group_paths("pids", proc, groups):
        yield _number(group / "pids.max"), _number(group / "pids.current") or 0


def _group_paths(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """The control groups of this process, innermost first, for one controller; a limit of each one counts."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, names, inside = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        # Version 1 has a tree for each controller; version 2, whose line names none, has one for all.
        root = groups / controller if names else groups
        # A container may see its own group as the root, under a path that is not there.
        inner = root / inside.strip("/")
        while inner != root:
            if inner.is_dir():
                yield inner
            inner = inner.parent
        if root.is_dir():
            yield root


def _reclaimable(group: Path) -> int:
    """Pages of files, which the kernel gives up before it kills."""
    fields = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _quota(group: Path) -> float | None:
    words = _text(group / "cpu.max").split() or [_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")]
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()):  # "max", and -1 in version 1
        return None
    return int(words[0]) / int(words[1])


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _kib(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdigit() else 0


def _number(*files: Path) -> int | None:
    """The first of the files that holds one."""
    texts = (_text(file) for file in files)
    return next((int(text) for text in texts if text.isdigit()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
