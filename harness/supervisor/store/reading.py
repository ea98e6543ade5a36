"""Files of a run, read: only regular ones and within a bound, for a stored run may come from somebody else."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_TAIL_BYTES = 1 << 20  # of a log; the end of a run is at the end of its log
_MAX_LOG_CHARS = 256 << 20
_MAX_RECORD_BYTES = 8 << 20  # of a journal's line
_MAX_HALF_BYTES = 32 << 20  # of a journal, from its beginning and from its end


def opened(path: Path) -> BinaryIO:
    """A regular file. Raises OSError for anything else: a pipe would be waited for, a device is endless."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", str(path))


def read_whole(path: Path, most_bytes: int) -> bytes:
    """All of a file. Raises OSError where it cannot be read, ValueError where it has more than that."""
    with opened(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes} bytes")
    return data


def log_tail(path: Path) -> str:
    """The end of a log, as text; empty when there is none."""
    try:
        with opened(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def log_lines(path: Path, most_chars: int) -> Iterator[str]:
    """A log from its beginning; a longer line comes in pieces. Nothing when there is none."""
    try:
        with io.TextIOWrapper(opened(path), encoding="utf-8", errors="replace") as log:
            read = 0
            while read < _MAX_LOG_CHARS and (line := log.readline(most_chars)):
                read += len(line)
                yield line
    except OSError:
        return


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal. A torn or foreign line is passed over: the writer may have been killed in it."""
    try:
        with opened(path) as journal:
            for line in _bounded(journal):
                record = _parsed(line)
                if isinstance(record, dict):
                    yield record
    except OSError:
        return


def _bounded(journal: BinaryIO) -> Iterator[bytes]:
    """Of a journal beyond all measure its beginning and its end, where the origin and the ending stand."""
    size = os.fstat(journal.fileno()).st_size
    yield from _lines_until(journal, size if size <= 2 * _MAX_HALF_BYTES else _MAX_HALF_BYTES)
    if size > 2 * _MAX_HALF_BYTES:
        journal.seek(size - _MAX_HALF_BYTES)
        yield from _lines_until(journal, size)


def _lines_until(journal: BinaryIO, end: int) -> Iterator[bytes]:
    while journal.tell() < end and (line := journal.readline(_MAX_RECORD_BYTES)):
        yield line


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
