"""Gives safe access to the files of a run, even if someone else has created them.

An attacker could have created a run to harm the user who judges it. So a path in a run is never opened in one call.
Each directory of the path is opened separately, from the run's directory down, and links are refused. The size of what
is read is limited.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

if TYPE_CHECKING:  # the reaper imports this module, and must start in milliseconds
    from nsa_harness.core.report import Trouble

_TAIL_BYTES = 1 << 20  # bytes that are read from the end of a log
_MAX_LOG_CHARS = 256 << 20
_MAX_RECORD_BYTES = 8 << 20  # longest line of a journal
_MAX_HALF_BYTES = 16 << 20  # read at the beginning of a long journal, and the same amount at its end
_MAX_HALF_RECORDS = 50_000
_MAX_ENTRIES = 100_000  # entries that are read per directory
_MAX_NOTES = 32
_BUFFER_BYTES = 1 << 16
_READS_PER_CLOCK = 16
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe would block.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Budget:
    """Limits for reading a run's files: bytes, and CPU time, which does not depend on how busy the machine is."""

    def __init__(self, left_bytes: int = 1 << 30, seconds: float = 10.0) -> None:
        self.remaining_bytes = left_bytes
        self._reads = 0
        self._is_late = False
        self._until_s = time.thread_time() + seconds

    def add_ranks(self, ranks: int) -> None:
        """Increase the budget for a run with this number of ranks."""
        self.remaining_bytes += ranks * (64 << 20)
        self._until_s += ranks * 0.2

    @property
    def exceeded_limit(self) -> str:
        """The limit that was exceeded ("bytes" or "time"), or "" if no limit was exceeded."""
        if self.remaining_bytes <= 0:
            return "bytes"
        # A system call reads the clock, and may take longer than reading a small file.
        if self._reads % _READS_PER_CLOCK == 0:
            self._is_late = time.thread_time() > self._until_s
        self._reads += 1
        return "time" if self._is_late else ""


class SafeDirectory:
    """Safe access to the files below the trusted directory `root`, with which all paths begin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.budget: Budget | None = None  # None: unlimited, for commands that do not judge a run
        self.pinned: dict[Path, tuple[int, int]] = {}  # directory -> the device and inode that it must still have
        self._notes: list[Trouble] = []
        self._unlisted_notes = 0

    def pin(self, path: Path) -> tuple[int, int]:
        """Refuse from now on any other directory at `path`. Return its device and inode. Raise OSError on failure."""
        with self._open_directory(path) as folder:
            self.pinned[path] = _device_and_inode(folder)
        return self.pinned[path]

    def is_in_place(self, path: Path) -> bool:
        """Return whether the directory `path` is accessible, and still the one that was pinned."""
        with suppress(OSError), self._open_directory(path):
            return True
        return False

    # Reading.

    def open_file(self, path: Path) -> BinaryIO:
        """Open a regular file for reading. Raise OSError if the path is a link, a device or another special file."""
        with self._open_directory(path.parent) as folder:
            descriptor = _call_in_directory(os.open, path, _READ, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return io.BufferedReader(_BudgetedFile(descriptor, self, path), _BUFFER_BYTES)
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))

    def read_whole_file(self, path: Path, most_bytes: int) -> bytes:
        """Return the contents of a file. Raise OSError if unreadable, and ValueError if larger than `most_bytes`."""
        with self.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Read one byte more, because the file may have grown. A file that is too large is not read.
            data = b"" if size > most_bytes else file.read(most_bytes + 1)
        if size > most_bytes or len(data) > most_bytes:
            raise ValueError(f"larger than {most_bytes} bytes")
        return data

    def read_tail(self, path: Path) -> str:
        """Return the end of a log as text, or "" if there is no readable log."""
        try:
            with self.open_file(path) as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                return log.read(_TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def read_lines(self, path: Path, most_chars: int) -> Iterator[str]:
        """Yield the lines of a log, split after `most_chars` characters, or nothing if it is unreadable."""
        try:
            with io.TextIOWrapper(self.open_file(path), encoding="utf-8", errors="replace") as log:
                read_chars = 0
                while line := log.readline(most_chars):
                    read_chars += len(line)
                    if read_chars > _MAX_LOG_CHARS:
                        self.note_incomplete(path, f"only the first {_MAX_LOG_CHARS >> 20} MiB were read")
                        return
                    yield line
        except OSError:
            return

    def read_records(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the records of a journal. Lines that are not JSON objects are skipped."""
        try:
            with self.open_file(path) as journal:
                for line in self._journal_lines(journal, path):
                    record = _parse_or_none(line)
                    if isinstance(record, dict):
                        yield record
        except OSError:
            return

    def _journal_lines(self, journal: BinaryIO, path: Path) -> Iterator[bytes]:
        """Yield the lines of a journal. If it is far too long, only its first and last lines are read."""
        size = os.fstat(journal.fileno()).st_size
        head_end = size if size <= 2 * _MAX_HALF_BYTES else _MAX_HALF_BYTES
        yield from islice(_lines_until(journal, head_end), _MAX_HALF_RECORDS)
        position = journal.tell()
        if position >= size:
            return
        journal.seek(max(position, size - _MAX_HALF_BYTES))
        last_lines = deque[bytes](maxlen=_MAX_HALF_RECORDS)
        skipped_lines = journal.tell() > position
        for line in _lines_until(journal, size):
            skipped_lines = skipped_lines or len(last_lines) == _MAX_HALF_RECORDS
            last_lines.append(line)
        if skipped_lines:
            self.note_incomplete(path, f"{size} bytes: only the first and the last records were read")
        yield from last_lines

    # Listing files.

    def exists(self, path: Path) -> bool:
        """Return whether there is a file, directory or link with this path. A path through a link does not exist."""
        return self._status(path) is not None

    def is_file(self, path: Path) -> bool:
        facts = self._status(path)
        return facts is not None and stat.S_ISREG(facts.st_mode)

    def size_bytes(self, path: Path) -> int:
        """Return the size of a regular file, or 0 if there is no such file."""
        facts = self._status(path)
        return facts.st_size if facts is not None and stat.S_ISREG(facts.st_mode) else 0

    def modified_ns(self, path: Path) -> int:
        """Return the time at which a file was last changed, or 0 if the file does not exist."""
        facts = self._status(path)
        return 0 if facts is None else facts.st_mtime_ns

    def subdirectories(self, path: Path) -> list[Path]:
        """Return the subdirectories of a directory, sorted by name."""
        return [path / name for name, is_folder in self._entries(path) if is_folder]

    def list_files(self, path: Path, pattern: str) -> list[Path]:
        """Return the files below a directory that match the pattern, sorted by name. `*` does not match `/`."""
        *parents, last = pattern.split("/")
        directories = [path]
        for part in parents:
            directories = [
                folder
                for directory in directories
                for folder in self.subdirectories(directory)
                if fnmatchcase(folder.name, part)
            ]
        entries = (
            (directory, name)
            for directory in directories
            for name, is_folder in self._entries(directory)
            if not is_folder
        )
        return [directory / name for directory, name in entries if fnmatchcase(name, last)]

    def _status(self, path: Path) -> os.stat_result | None:
        try:
            with self._open_directory(path.parent) as folder:
                return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        except (OSError, ValueError):  # a name with a NUL
            return None

    def _entries(self, path: Path) -> list[tuple[str, bool]]:
        try:
            with self._open_directory(path) as folder:
                listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return []
        try:
            with os.scandir(listing) as entries:
                names = [
                    (entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _MAX_ENTRIES + 1)
                ]
        except OSError:  # some directories of the kernel can be opened, but not listed
            return []
        finally:
            os.close(listing)
        if len(names) > _MAX_ENTRIES:
            self.note_incomplete(path, f"it contains more than {_MAX_ENTRIES} files; the others were ignored")
        return sorted(names[:_MAX_ENTRIES])

    # Writing.

    def write(self, path: Path, text: str) -> None:
        """Write a document by renaming a temporary file. A full disk frees the run's ballast. Raise OSError."""
        data = text.encode("utf-8", errors="backslashreplace")
        write_with_ballast(path, lambda: self._write_atomically(path, data))

    def create(self, path: Path, text: str) -> bool:
        """Create a file, and return whether it did not exist. No reader sees the file without its text."""
        with self._open_directory(path.parent) as folder:
            temporary = f".{path.name[:200]}.{os.urandom(8).hex()}"
            descriptor = _call_in_directory(os.open, path.with_name(temporary), _NEW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary, dir_fd=folder)
            return True

    def _write_atomically(self, path: Path, data: bytes) -> None:
        with self.replace_file(path) as file:
            file.write(data)

    @contextmanager
    def replace_file(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a new file that replaces `path` when the `with` block ends."""
        with self._open_directory(path.parent) as folder:
            temporary = f".{path.name[:200]}.{os.urandom(8).hex()}"
            descriptor = _call_in_directory(os.open, path.with_name(temporary), _NEW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    yield file
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def append(self, path: Path, text: str) -> None:
        """Append text to a file. Raise OSError, without writing anything, if that fails."""
        data = text.encode("utf-8", errors="backslashreplace")
        with self.open_for_append(path) as file:
            count = os.write(file.fileno(), data)
            if count != len(data):
                os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - count)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def open_for_append(self, path: Path) -> TextIO:
        """Open a log for appending. Raise OSError if it is a pipe, or if it also has another name (a hard link)."""
        with self._open_directory(path.parent) as folder:
            descriptor = _call_in_directory(os.open, path, _APPEND, 0o600, dir_fd=folder)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
            return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file, or a file with a second name", str(path))

    def copy_ends(self, source: Path, target: Path, half_bytes: int) -> int:
        """Copy a file without its middle beyond twice `half_bytes`. Return the number of omitted bytes."""
        with self.open_file(source) as original, self.replace_file(target) as copy:
            size = os.fstat(original.fileno()).st_size
            skipped_bytes = size - 2 * half_bytes
            if skipped_bytes <= 0:
                _copy_sparsely(original, copy, size)
            else:
                copy.writelines(_chunks(original, half_bytes))
                copy.write(f"\n[{skipped_bytes} bytes were cut here]\n".encode())
                original.seek(size - half_bytes)
                copy.writelines(_chunks(original, half_bytes))
        return max(0, skipped_bytes)

    def make_directory(self, path: Path) -> None:
        """Create a directory if it does not exist. Raise OSError if a file or link already has this name."""
        with self._open_directory(path.parent) as folder:
            try:
                os.mkdir(path.name, dir_fd=folder)
            except FileExistsError:
                os.close(_call_in_directory(os.open, path, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder))

    def remove(self, path: Path) -> None:
        """Remove a file or a link, if it exists. Raise OSError if that fails."""
        with self._open_directory(path.parent) as folder, suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)

    def move(self, path: Path, target: Path) -> None:
        """Rename a file or directory. Raise OSError if that fails."""
        with self._open_directory(path.parent) as source, self._open_directory(target.parent) as goal:
            os.rename(path.name, target.name, src_dir_fd=source, dst_dir_fd=goal)

    # Notes about files that were not read completely.

    def note_incomplete(self, path: Path, why: str) -> None:
        """Record that a file was not read or copied completely, with the reason."""
        from nsa_harness.core.report import Trouble

        name = os.path.relpath(path, self.root)
        if len(self._notes) < _MAX_NOTES:
            self._notes.append(Trouble(what=name, why=why))
        else:
            self._unlisted_notes += 1

    def take_notes(self) -> tuple[Trouble, ...]:
        """Return the notes recorded since the last call, and forget them."""
        from nsa_harness.core.report import Trouble

        more = (
            [Trouble(what="files of the run", why=f"{self._unlisted_notes} more were not read completely")]
            if self._unlisted_notes
            else []
        )
        notes, self._notes, self._unlisted_notes = (*self._notes, *more), [], 0
        return notes

    @contextmanager
    def _open_directory(self, path: Path) -> Iterator[int]:
        """Yield a file descriptor of the directory `path`. Raise OSError if the path contains a link."""
        parts = path.relative_to(self.root).parts if path.is_relative_to(self.root) else ("..",)
        if ".." in parts:
            raise OSError(errno.EINVAL, "a path that leads out of the run", str(path))
        folder = os.open(self.root, _DIRECTORY)
        try:
            current = self.root
            for part in parts:
                current = current / part
                child = _call_in_directory(os.open, current, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = child
                if self.pinned.get(current, _device_and_inode(folder)) != _device_and_inode(folder):
                    raise OSError(errno.ESTALE, "another directory has taken its place", str(current))
            yield folder
        finally:
            os.close(folder)


class _BudgetedFile(io.FileIO):
    """A file from which reading stops, as if at its end, once the budget for reading is exceeded."""

    def __init__(self, descriptor: int, directory: SafeDirectory, path: Path) -> None:
        super().__init__(descriptor, "rb")
        self._directory, self._path, self._is_cut = directory, path, False

    def readinto(self, buffer: Any) -> int:
        budget = self._directory.budget
        if budget is not None and (limit := budget.exceeded_limit):
            if not self._is_cut:
                self._directory.note_incomplete(
                    self._path, f"not read to its end: the {limit} that reading a run may take are spent"
                )
            self._is_cut = True
            return 0
        count = super().readinto(buffer) or 0
        if budget is not None:
            budget.remaining_bytes -= count
        return count


def safe_file(path: Path) -> tuple[SafeDirectory, Path]:
    """Return safe access to a file that the user named, and its resolved path. The user's own links are followed."""
    resolved_path = path.resolve()
    return SafeDirectory(resolved_path.parent), resolved_path


def _call_in_directory(call: Any, path: Path, *arguments: int, dir_fd: int) -> int:
    """Call `call`, a function of `os`, on the last component of a path, relative to the open directory `dir_fd`."""
    try:
        result: int = call(path.name, *arguments, dir_fd=dir_fd)
    except ValueError:  # a name with a NUL character
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path.name, dir_fd):
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    return result


def _device_and_inode(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


def _is_link(name: str, folder: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece


_HOLE_BYTES = 1 << 14


def _copy_sparsely(original: BinaryIO, copy: BinaryIO, size: int) -> None:
    """Copy `size` bytes. A longer run of zeros, such as the unused part of a status file, becomes a hole."""
    copied_bytes = 0
    while copied_bytes < size and (piece := original.read(min(size - copied_bytes, _HOLE_BYTES))):
        if piece.count(0) == len(piece):
            copy.seek(len(piece), os.SEEK_CUR)
        else:
            copy.write(piece)
        copied_bytes += len(piece)
    copy.truncate(copied_bytes)


def _lines_until(journal: BinaryIO, end: int) -> Iterator[bytes]:
    while journal.tell() < end and (line := journal.readline(_MAX_RECORD_BYTES)):
        yield line


def _parse_or_none(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


# The ballast file of a run reserves disk space. If the disk is full, the file is made smaller, so the last files of the
# run can still be written. A ballast file that is no larger than the documents' share shows that the space was needed.

BALLAST = ".reserve"
_BALLAST_BYTES = 8 << 20  # enough for the status files of several ranks, the evidence and all documents
DOCUMENTS_BYTES = 64 << 10  # the share of the ballast that is kept for the documents of the run, such as SUMMARY.md
_LEVELS = 3  # number of directories between a run and its deepest document
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """Return whether the error means that the disk is full or the user's quota is exhausted."""
    return isinstance(error, OSError) and error.errno in _FULL


def fill_ballast(run: Path) -> None:
    """Create or refill the file that reserves disk space for the end of a run: 8 MiB, or half of the free space."""
    with suppress(OSError):
        descriptor = os.open(run / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            disk = os.fstatvfs(descriptor)
            free_bytes = disk.f_bavail * disk.f_frsize + os.fstat(descriptor).st_size
            os.posix_fallocate(descriptor, 0, max(1, min(_BALLAST_BYTES, free_bytes // 2)))
        except OSError:
            os.ftruncate(descriptor, 0)
            raise
        finally:
            os.close(descriptor)


def release_ballast(run: Path) -> None:
    """Remove the file that reserves disk space for the end of a run."""
    with suppress(OSError):
        (run / BALLAST).unlink()


def write_with_ballast(path: Path, write: Callable[[], None]) -> None:
    """Call `write`, and if the disk is full, free the run's ballast and call it again. Raise OSError on failure."""
    try:
        write()
    except OSError as error:
        if not is_disk_full(error) or not any(
            shrink_ballast(directory / BALLAST, 0 if directory == path.parent else DOCUMENTS_BYTES)
            for directory in list(path.parents)[:_LEVELS]
        ):
            raise
        write()


def shrink_ballast(ballast: Path, kept_bytes: int = DOCUMENTS_BYTES) -> bool:
    """Free the disk space that the ballast file reserves, except for `kept_bytes`. Return whether there was any."""
    try:
        descriptor = os.open(ballast, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or facts.st_size <= kept_bytes:
            return False
        os.ftruncate(descriptor, kept_bytes)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
