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
    for controller, path in _memberships(pid, proc):
        if controller == "freezer":
            for home in _homes(root, path, "freezer"):
                if kernel_text(home / "freezer.state") == "FROZEN":
                    return True
        elif controller == "":
            for home in _homes(root, path, "unified", ""):
                if _counter(home / "cgroup.events", "frozen"):
                    return True
    return False


def group_memory(pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> GroupMemory:
    """Limit, use and kills of the groups of `pid`, with those around it."""
    groups = [group for group in _memory_groups(pid, root, proc) if group.exists()]
    limits = {group: limit for group in groups if (limit := _limit(group)) is not None}
    tightest = min(limits, key=lambda group: limits[group], default=groups[0] if groups else None)
    # A kill counts in its own group; version 2 counts it in all around it too, so the largest number has them all.
    kills = [count for group in groups if (count := _kills(group)) is not None]
    return GroupMemory(
        limit_bytes=min(limits.values(), default=None),
        used_bytes=None if tightest is None else _used(tightest),
        oom_kills=max(kills, default=None),
    )


def _memberships(pid: int, proc: Path) -> Iterator[tuple[str, str]]:
    """Controller ("" for version 2) and path of each group; nothing where unreadable."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield from ((controller, path) for controller in controllers.split(","))


def _homes(root: Path, path: str, *mounts: str) -> Iterator[Path]:
    """The directories of a group and of those around it, innermost first, below the mounts that exist.

    In a container the kernel names the path as the host sees it, and only the container's own group is mounted: then
    the mount itself is the group.
    """
    for mount in mounts:
        base = root / mount if mount else root
        parts = [part for part in path.split("/") if part and part != ".."][:_MAX_DEPTH]
        for depth in range(len(parts), -1, -1):
            home = base.joinpath(*parts[:depth])
            if home.is_dir():
                yield home


def _memory_groups(pid: int, root: Path, proc: Path) -> Iterator[Path]:
    for controller, path in _memberships(pid, proc):
        if controller == "memory":
            yield from _homes(root, path, "memory")
        elif controller == "" and (root / "cgroup.controllers").exists():
            yield from _homes(root, path, "")


def _limit(group: Path) -> int | None:
    word = kernel_text(group / "memory.max") or kernel_text(group / "memory.limit_in_bytes")
    return int(word) if word.isdigit() and int(word) < _UNLIMITED else None


def _used(group: Path) -> int | None:
    word = kernel_text(group / "memory.current") or kernel_text(group / "memory.usage_in_bytes")
    return int(word) if word.isdigit() else None


def _kills(group: Path) -> int | None:
    found = _counter(group / "memory.events", "oom_kill")
    return _counter(group / "memory.oom_control", "oom_kill") if found is None else found


def _counter(file: Path, name: str) -> int | None:
    for line in kernel_text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None
