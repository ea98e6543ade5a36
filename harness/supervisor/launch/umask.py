"""The umask: what we write is for nobody else to read, and a program keeps the rights that it would have anyway."""

from __future__ import annotations

import os

_OURS = 0o077
_given: list[int] = []  # to this process; none until ours is set, and of a process that never sets it


def keep_private() -> None:
    """From here on, of this process and of all it starts without saying otherwise."""
    before = os.umask(_OURS)
    if not _given:
        _given.append(before)


def of_programs() -> int:
    """That of a program which is launched, as Popen takes it: -1 leaves it as it is."""
    return _given[0] if _given else -1
