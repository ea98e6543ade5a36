"""Sets the umask so that nsa-harness's files are private.

The files of a launched program get their usual permissions. This module imports only os, because it runs at the start
of every command.
"""

from __future__ import annotations

import os

_original_umask: list[int] = []  # this process's umask before `keep_private`


def keep_private() -> None:
    """Set the umask of this process so that all its new files are private.

    Children inherit this umask unless they are started with `program_umask`.
    """
    before = os.umask(0o077)
    if not _original_umask:
        _original_umask.append(before)


def program_umask() -> int:
    """Return the umask that a launched program should have.

    It is -1, which leaves the umask unchanged, if `keep_private` was not called.
    """
    return _original_umask[0] if _original_umask else -1
