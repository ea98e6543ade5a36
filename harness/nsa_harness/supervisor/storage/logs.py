"""The logs of a launch within a bound: while one grows its middle goes back to the disk, and at the end a line says so.

Ranks write to files that they have opened themselves, and nobody may stand between. But the blocks of a file can be
taken from under whoever appends to it, and neither its size nor the place where the next line goes changes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nsa_harness.supervisor.storage.rundir import AttemptDir, append_line

HALF_BYTES = 64 << 20  # of a log, kept from its beginning, and from its end
_LOOK_S = 1.0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def bounded_logs(attempt: AttemptDir, half_bytes: int = HALF_BYTES) -> Iterator[None]:
    """As long as this holds they take no more room than that, and some; behind it they are no larger than that.

    A file system that cannot give back a part of a file gives it back at the end. What was left out is `trouble`.
    """
    over = threading.Event()
    looks = threading.Thread(target=_look, args=(attempt, half_bytes, over), name="logs", daemon=True)
    looks.start()
    try:
        yield
    finally:
        over.set()
        looks.join()
        _settle(attempt, half_bytes)


def _look(attempt: AttemptDir, half_bytes: int, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        for path in _large(attempt, half_bytes):
            with suppress(OSError):
                give_back_middle(path, half_bytes)


def _large(attempt: AttemptDir, half_bytes: int) -> list[Path]:
    logs = [attempt.output, *attempt.door.files(attempt.logs, "*/attempt_*/*/*.log")]
    return [path for path in logs if attempt.door.size_bytes(path) > 2 * half_bytes]


def give_back_middle(path: Path, half_bytes: int) -> None:
    """The file's blocks between its first and its last `half_bytes`. Raises OSError where that cannot be done."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = os.fstat(descriptor).st_size - 2 * half_bytes
        where = ctypes.c_int64(half_bytes), ctypes.c_int64(length)
        if length > 0 and _LIBC.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, *where):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def _settle(attempt: AttemptDir, half_bytes: int) -> None:
    """Nobody writes any more: what is left out is left out of the file's size too."""
    for path in _large(attempt, half_bytes):
        name, ends = os.path.relpath(path, attempt.path), f"its first and its last {_size(half_bytes)}"
        try:
            left_out = attempt.door.copy_ends(path, path, half_bytes)
            why = f"{left_out} bytes in its middle were not kept; a log keeps {ends}"
        except OSError as error:
            why = f"it could not be brought down to {ends}: {error}"
        append_line(attempt.watch, {"event": "trouble", "what": name, "why": why, "rank": None})


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
