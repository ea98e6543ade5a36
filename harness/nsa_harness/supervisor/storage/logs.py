"""Limits the disk space of a launch's logs, by freeing the middle of a growing log.

Ranks write to files that they have opened themselves, so nsa-harness cannot filter what they write. But it can free
disk blocks of a file while a rank appends to it: neither the file's size nor the position of the next line changes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nsa_harness.supervisor.storage.rundir import AttemptDir

HALF_BYTES = 64 << 20  # bytes at the beginning of a log that remain; the same number remains at its end
_INTERVAL_S = 1.0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def limit_logs(attempt: AttemptDir, half_bytes: int = HALF_BYTES) -> Iterator[None]:
    """Limit each log to about twice `half_bytes` during the `with` block. A missing middle is recorded as trouble."""
    is_finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(attempt, half_bytes, is_finished), name="logs", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_finished.set()
        watcher.join()
        _cut(attempt, half_bytes)


def _watch(attempt: AttemptDir, half_bytes: int, is_finished: threading.Event) -> None:
    while not is_finished.wait(_INTERVAL_S):
        for path in _large_logs(attempt, half_bytes):
            with suppress(OSError):
                free_middle(path, half_bytes)


def _large_logs(attempt: AttemptDir, half_bytes: int) -> list[Path]:
    logs = [attempt.output, *attempt.directory.list_files(attempt.logs, "*/attempt_*/*/*.log")]
    return [path for path in logs if attempt.directory.size_bytes(path) > 2 * half_bytes]


def free_middle(path: Path, half_bytes: int) -> None:
    """Free the disk blocks of a file except its first and last `half_bytes`. Raise OSError if that is unsupported."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = os.fstat(descriptor).st_size - 2 * half_bytes
        where = ctypes.c_int64(half_bytes), ctypes.c_int64(length)
        if length > 0 and _LIBC.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, *where):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def _cut(attempt: AttemptDir, half_bytes: int) -> None:
    """Remove the middle of each large log, after all processes have stopped writing."""
    for path in _large_logs(attempt, half_bytes):
        name, kept_parts = os.path.relpath(path, attempt.path), f"its first and last {_size(half_bytes)}"
        try:
            skipped_bytes = attempt.directory.copy_ends(path, path, half_bytes)
            reason = f"{skipped_bytes} bytes in the middle were removed; a log keeps {kept_parts}"
        except OSError as error:
            reason = f"it could not be reduced to {kept_parts}: {error}"
        attempt.append_record(attempt.watch, {"event": "trouble", "what": name, "why": reason, "rank": None})


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
