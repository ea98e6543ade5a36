"""Sets the umask so that nsa-harness's files are private.

The files of a launched program get their usual permissions. This module imports only os, because it runs at the start
of every command.
"""

from __future__ import annotations

import os

_original_umask: list[int] = []  # this process's umask before `keep_private`


def keep_private() -> None:
    """Make all new files of this process private, and those of its children started without `program_umask`."""
    before = os.umask(0o077)
    if not _original_umask:
        _original_umask.append(before)


def program_umask() -> int:
    """Return the umask for a launched program. It is -1, which changes nothing, without `keep_private`."""
    return _original_umask[0] if _original_umask else -1
