"""What a process of another mount or PID namespace calls a file, and what it calls itself."""

from __future__ import annotations

import os
from pathlib import Path

from nsa_harness.supervisor.capture.syscalls import process_names

_MAX_LINKS = 40  # as the kernel follows


def path_of(pid: int, file: str, proc: Path = Path("/proc")) -> Path:
    """Where a file that the process names lies for us: below its root where that is not ours.

    Links are followed within that root, as the process sees them: the kernel would follow an absolute one out of it.
    """
    home = proc / str(pid)
    if not _has_other_root(home, proc / "self"):
        return Path(file)
    root = home / "root"
    return root.joinpath(*_resolved(root, file if os.path.isabs(file) else os.path.join(_link(home / "cwd"), file)))


def inner_pid(pid: int, proc: Path = Path("/proc")) -> int:
    """What the process calls itself."""
    return process_names(pid, proc)[-1]


def _has_other_root(home: Path, own: Path) -> bool:
    other = _link(home / "root")
    same = _link(home / "ns" / "mnt") == _link(own / "ns" / "mnt") and other == _link(own / "root")
    return bool(other) and not same


def _resolved(root: Path, file: str) -> list[str]:
    """The names below `root` that lead to the file, none of which is a link."""
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
        left += [one for one in reversed(target.split("/")) if one not in ("", ".")]
    return found


def _link(path: Path) -> str:
    """Empty for what is no link, and where it may not be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
