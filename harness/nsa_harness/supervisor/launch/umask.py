"""Sets the umask: nsa-harness's own files are private, and a launched program's files are as without nsa-harness.

This module imports only os, because it runs at the start of every command.
"""

from __future__ import annotations

import os

_original_umask: list[int] = []  # this process's umask before `keep_private`


def keep_private() -> None:
    """Make all new files of this process private, and those of its children unless they get `program_umask`."""
    before = os.umask(0o077)
    if not _original_umask:
        _original_umask.append(before)


def program_umask() -> int:
    """Return the umask that a program would have without nsa-harness, for Popen.

    Return -1, which leaves the current umask, if `keep_private` was not called.
    """
    return _original_umask[0] if _original_umask else -1
