"""File permissions: nsa-harness's files are private, a launched program's are as without nsa-harness.

Imports nothing but os, since it runs at the start of every command.
"""

from __future__ import annotations

import os

_given: list[int] = []  # this process's umask before `keep_private`


def keep_private() -> None:
    """Make all files private that this process writes, and its children unless they get `program_umask`."""
    before = os.umask(0o077)
    if not _given:
        _given.append(before)


def program_umask() -> int:
    """Return the umask that a program would have without nsa-harness, for Popen; -1 leaves the current one."""
    return _given[0] if _given else -1
