"""The reserve of a run: room on its disk that is given up so that the end of the run can still be written.

An empty file says that it was needed: the disk was full.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = ".reserve"
_BYTES = 8 << 20  # the boards of some ranks, the evidence and all documents
_LEVELS = 3  # a document of a run lies at most so deep in it
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """The disk has no room, or the user's quota."""
    return isinstance(error, OSError) and error.errno in _FULL


def keep_reserve(run: Path) -> None:
    """To be called before each attempt: the room may have been needed, and be there again."""
    with suppress(OSError):
        descriptor = os.open(run / NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _BYTES)
        except OSError:
            os.ftruncate(descriptor, 0)
            raise
        finally:
            os.close(descriptor)


def release(run: Path) -> None:
    """A run that is over needs none."""
    with suppress(OSError):
        (run / NAME).unlink()


def with_room(path: Path, write: Callable[[], None]) -> None:
    """Again with the room of the reserve, where there is no other. Raises OSError."""
    try:
        write()
    except OSError as error:
        if not is_full(error) or not any(_emptied(home / NAME) for home in list(path.parents)[:_LEVELS]):
            raise
        write()


def _emptied(reserve: Path) -> bool:
    try:
        if reserve.lstat().st_size == 0:
            return False
        os.truncate(reserve, 0)
    except OSError:
        return False
    return True
