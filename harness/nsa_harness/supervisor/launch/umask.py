"""Whose files are whose: ours are private, those of a program as if we were not there.

Imports nothing, since it runs before the first word of any command.
"""

from __future__ import annotations

import os

_given: list[int] = []  # the umask of this process before ours, of one that has set it


def keep_private() -> None:
    """From here on nobody else may read what this process writes, nor what it starts without saying otherwise."""
    before = os.umask(0o077)
    if not _given:
        _given.append(before)


def program_umask() -> int:
    """What a program is launched with, as Popen takes it: the umask that it would have anyway; -1 leaves ours."""
    return _given[0] if _given else -1
