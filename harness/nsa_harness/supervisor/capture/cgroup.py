"""Control groups of a process, version 1 and 2: whether it is frozen, its memory limit, and what the kernel killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsa_harness.supervisor.capture.syscalls import kernel_text

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
