"""Writes the recording of a process to a memory-mapped file, which survives SIGKILL. protocol.py defines the format."""

from __future__ import annotations

import _thread
import mmap
import os
import struct
import sys

from .. import protocol

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

FIRST_SIZE = 1 << 20
FULL_SHARE = 0.75  # of the limit, from which on the recorder writes no more values
_HEAD_SIZE = protocol.RECORD_HEAD.size
_pack_head = protocol.RECORD_HEAD.pack_into
_pack_numbers = [struct.Struct(f"<{count}q").pack_into for count in range(64)]


class RecordFile:
    """A writer of one recording. After the file has reached its limit, nothing more is written.

    The file grows in steps whose blocks are allocated first: writing to a memory-mapped file on a full disk would end
    the process.
    """

    def __init__(
        self, path: str, rank: int, world_size: int, limit: int = protocol.RECORDING_LIMIT, first_size: int = FIRST_SIZE
    ) -> None:
        self._path = path
        self.set_limit(limit)
        self._lock = _thread.allocate_lock()
        self._strings: dict[str, int] = {}
        # Old maps stay open. A program may have closed their descriptors, and the numbers may belong to other files.
        self._maps: list[mmap.mmap] = []
        self._size = min(first_size, limit)
        self._memory = self._map(os.O_CREAT | os.O_EXCL, self._size)
        self._position = protocol.RECORDING_HEADER_SIZE
        self._progress = 0
        self.is_full = False
        self.is_nearly_full = False
        self._flags = 0
        self.write_identity(rank, world_size)

    def set_limit(self, limit: int) -> None:
        """Set the most bytes of the file."""
        self._limit = limit
        self._nearly_full = int(FULL_SHARE * limit)

    def write_identity(self, rank: int, world_size: int) -> None:
        self._identity = rank, world_size
        major, minor = sys.version_info[:2]
        protocol.RECORDING_HEADER.pack_into(
            self._memory, 0, protocol.RECORDING_MAGIC, protocol.RECORDING_LAYOUT, os.getpid(), major, minor,
            rank, world_size, self._flags,
        )  # fmt: skip

    def write_worker(self, number: int) -> None:
        """Write which DataLoader worker this process is, as in RECORDING_CHILD, and its parent."""
        protocol.RECORDING_CHILD.pack_into(self._memory, protocol.RECORDING_CHILD_AT, number, os.getppid())

    def write(self, kind: int, numbers: Sequence[int]) -> None:
        """Append a record of numbers."""
        count = len(numbers)
        with self._lock:
            at = self._reserve(count * 8)
            if at:
                pack = _pack_numbers[count] if count < 64 else struct.Struct(f"<{count}q").pack_into
                pack(self._memory, at + _HEAD_SIZE, *numbers)
                _pack_head(self._memory, at, count * 8, kind)

    def string(self, text: str) -> int:
        """Return the number of a string, which is written when it is first used."""
        number = self._strings.get(text)
        return self._add_string(text) if number is None else number

    def _add_string(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        with self._lock:
            if text in self._strings:
                return self._strings[text]
            at = self._reserve(len(data))
            if not at:
                return 0
            self._memory[at + _HEAD_SIZE : at + _HEAD_SIZE + len(data)] = data
            _pack_head(self._memory, at, len(data), protocol.RECORD_STRING)
            self._strings[text] = len(self._strings)
            return self._strings[text]

    def count_progress(self) -> None:
        self._progress += 1
        protocol.RECORDING_PROGRESS.pack_into(self._memory, protocol.RECORDING_PROGRESS_AT, self._progress)

    def _reserve(self, size: int) -> int:
        """Return the offset for a record, or 0 if the file is full. There is always room for one more empty head."""
        at = self._position
        end = at + _HEAD_SIZE + (size + 7 & ~7)
        if self.is_full or (end + _HEAD_SIZE > self._size and not self._grow(end + _HEAD_SIZE)):
            return 0
        self._position = end
        if end > self._nearly_full:
            self.is_nearly_full = True
        return at

    def _grow(self, needed: int) -> bool:
        size = min(max(2 * self._size, needed), self._limit)
        try:
            if needed > size:
                raise OSError("the file has reached its limit")
            self._memory = self._map(0, size)
        except OSError:
            self.is_full = self.is_nearly_full = True
            self._flags |= protocol.RECORDING_FULL
            self.write_identity(*self._identity)
            return False
        self._size = size
        return True

    def _map(self, flags: int, size: int) -> mmap.mmap:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError:
            if flags:
                os.unlink(self._path)
            raise
        finally:
            os.close(descriptor)
        self._maps.append(memory)
        return memory


def thread_name() -> str:
    """Return the name of the calling thread without running code of the program, or "thread" if it is unknown."""
    threading: Any = sys.modules.get("threading")
    number = _thread.get_ident()
    if threading is None or number == threading.main_thread().ident:
        return "MainThread"
    thread = getattr(threading, "_active", {}).get(number)
    name = None if thread is None else vars(threading.Thread)["__dict__"].__get__(thread).get("_name")
    return name if type(name) is str else "thread"
