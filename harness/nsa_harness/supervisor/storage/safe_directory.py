"""The one door to the files of a run: beneath its directory, through no link, regular files only, within a budget.

A run may come from somebody else, who made it to harm whoever has it judged. So no name of it is opened as a path: each
folder on the way is opened by itself, from the run's directory down, and a link in it is refused, not followed.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from nsa_harness.core.report import Trouble

_TAIL_BYTES = 1 << 20  # of a log; the end of a run is at the end of its log
_MAX_LOG_CHARS = 256 << 20
_MAX_RECORD_BYTES = 8 << 20  # of a journal's line
_MAX_HALF_BYTES = 16 << 20  # of a journal, from its beginning and from its end
_MAX_HALF_RECORDS = 50_000
_MAX_ENTRIES = 100_000  # of a folder
_MAX_NOTES = 32
_BUFFER_BYTES = 1 << 16
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK a pipe of that name would be waited for.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Budget:
    """What reading a run may cost over all of its files. Time is this thread's own, which no busy machine shortens."""

    def __init__(self, left_bytes: int = 1 << 30, seconds: float = 10.0) -> None:
        self.left_bytes = left_bytes
        self._until_s = time.thread_time() + seconds

    def add_ranks(self, ranks: int) -> None:
        """A run of many ranks may cost more: each of them has logs, a board and a recorder of its own."""
        self.left_bytes += ranks * (64 << 20)
        self._until_s += ranks * 0.2

    @property
    def spent(self) -> str:
        """What has run out; empty while there is some left."""
        if self.left_bytes <= 0:
            return "bytes"
        return "time" if time.thread_time() > self._until_s else ""


class SafeDirectory:
    """Paths are given as they are made from `root`, which is trusted: whoever calls has named it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.budget: Budget | None = None  # none is set where nothing is judged
        self._cut: list[Trouble] = []
        self._more = 0

    # Reading.

    def opened(self, path: Path) -> BinaryIO:
        """A regular file. Raises OSError for anything else: a device is endless, and a link may lead anywhere."""
        with self._folder(path.parent) as folder:
            descriptor = _checked(os.open, path, _READ, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return io.BufferedReader(_Metered(descriptor, self, path), _BUFFER_BYTES)
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))

    def whole(self, path: Path, most_bytes: int) -> bytes:
        """All of a file. Raises OSError where it cannot be read, ValueError where it has more than that."""
        with self.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            # One more than there was: it may grow. What is too large is not read to say so.
            data = b"" if size > most_bytes else file.read(most_bytes + 1)
        if size > most_bytes or len(data) > most_bytes:
            raise ValueError(f"larger than {most_bytes} bytes")
        return data

    def tail(self, path: Path) -> str:
        """The end of a log, as text; empty when there is none."""
        try:
            with self.opened(path) as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                return log.read(_TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def text_lines(self, path: Path, most_chars: int) -> Iterator[str]:
        """A log from its beginning; a longer line comes in pieces. Nothing when there is none."""
        try:
            with io.TextIOWrapper(self.opened(path), encoding="utf-8", errors="replace") as log:
                read = 0
                while line := log.readline(most_chars):
                    read += len(line)
                    if read > _MAX_LOG_CHARS:
                        self.note(path, f"what follows the first {_MAX_LOG_CHARS >> 20} MiB was not read")
                        return
                    yield line
        except OSError:
            return

    def records(self, path: Path) -> Iterator[dict[str, Any]]:
        """The records of a journal. A torn or foreign line is passed over: the writer may have been killed in it."""
        try:
            with self.opened(path) as journal:
                for line in self._bounded(journal, path):
                    record = _parsed(line)
                    if isinstance(record, dict):
                        yield record
        except OSError:
            return

    def _bounded(self, journal: BinaryIO, path: Path) -> Iterator[bytes]:
        """Of a journal beyond all measure its beginning and its end, where the origin and the ending stand."""
        size = os.fstat(journal.fileno()).st_size
        head_end = size if size <= 2 * _MAX_HALF_BYTES else _MAX_HALF_BYTES
        yield from islice(_lines_until(journal, head_end), _MAX_HALF_RECORDS)
        at = journal.tell()
        if at >= size:
            return
        journal.seek(max(at, size - _MAX_HALF_BYTES))
        rest = deque[bytes](maxlen=_MAX_HALF_RECORDS)
        passed_over = journal.tell() > at
        for line in _lines_until(journal, size):
            passed_over = passed_over or len(rest) == _MAX_HALF_RECORDS
            rest.append(line)
        if passed_over:
            self.note(path, f"{size} bytes: of its records only the first and the last were read")
        yield from rest

    # What is there.

    def there(self, path: Path) -> bool:
        """Whatever it is: a link is there, wherever it leads, and what lies behind one is not."""
        return self._facts(path) is not None

    def is_file(self, path: Path) -> bool:
        facts = self._facts(path)
        return facts is not None and stat.S_ISREG(facts.st_mode)

    def is_link(self, path: Path) -> bool:
        facts = self._facts(path)
        return facts is not None and stat.S_ISLNK(facts.st_mode)

    def size_bytes(self, path: Path) -> int:
        """Of a regular file; 0 where there is none."""
        facts = self._facts(path)
        return facts.st_size if facts is not None and stat.S_ISREG(facts.st_mode) else 0

    def changed_ns(self, path: Path) -> int:
        """When it was written last; 0 where there is nothing."""
        facts = self._facts(path)
        return 0 if facts is None else facts.st_mtime_ns

    def folders(self, path: Path) -> list[Path]:
        """Those that lie directly in a folder, by name."""
        return [path / name for name, is_folder in self._entries(path) if is_folder]

    def files(self, path: Path, pattern: str) -> list[Path]:
        """What the pattern names below a folder and is no folder, by name; `*` stands for no `/`."""
        *above, last = pattern.split("/")
        places = [path]
        for part in above:
            places = [folder for place in places for folder in self.folders(place) if fnmatchcase(folder.name, part)]
        found = ((place, name) for place in places for name, is_folder in self._entries(place) if not is_folder)
        return [place / name for place, name in found if fnmatchcase(name, last)]

    def _facts(self, path: Path) -> os.stat_result | None:
        try:
            with self._folder(path.parent) as folder:
                return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        except (OSError, ValueError):  # a name with a NUL
            return None

    def _entries(self, path: Path) -> list[tuple[str, bool]]:
        try:
            with self._folder(path) as folder:
                listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return []
        try:
            with os.scandir(listing) as entries:
                found = [(one.name, one.is_dir(follow_symlinks=False)) for one in islice(entries, _MAX_ENTRIES + 1)]
        finally:
            os.close(listing)
        if len(found) > _MAX_ENTRIES:
            self.note(path, f"it holds more than {_MAX_ENTRIES} files; the others were not looked at")
        return sorted(found[:_MAX_ENTRIES])

    # Writing.

    def write(self, path: Path, text: str) -> None:
        """Aside and renamed: a reader sees the old document or the new one, never half of one.

        On a disk that is full the reserve of the run gives its room. Raises OSError.
        """
        data = text.encode("utf-8", errors="backslashreplace")
        with_room(path, lambda: self._write_aside(path, data))

    def _write_aside(self, path: Path, data: bytes) -> None:
        with self.replacing(path) as file:
            file.write(data)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[BinaryIO]:
        """A new file, which takes the name once it is whole. Nobody can know beforehand where it is written."""
        with self._folder(path.parent) as folder:
            aside = f".{path.name[:200]}.{secrets.token_hex(8)}"
            descriptor = _checked(os.open, path.with_name(aside), _NEW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    yield file
                os.rename(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside, dir_fd=folder)
                raise

    def append(self, path: Path, text: str) -> None:
        """All of it or nothing. Raises OSError as `appending` does, and where the disk is full."""
        data = text.encode("utf-8", errors="backslashreplace")
        with self.appending(path) as file:
            written = os.write(file.fileno(), data)
            if written != len(data):
                os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def appending(self, path: Path) -> TextIO:
        """A journal or log to go on with. Raises OSError where that would go elsewhere: into a pipe, or a file that has
        another name as well."""
        with self._folder(path.parent) as folder:
            descriptor = _checked(os.open, path, _APPEND, 0o600, dir_fd=folder)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
            return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file of its own", str(path))

    def copy_ends(self, source: Path, target: Path, half_bytes: int) -> int:
        """Copies a file, a large one without its middle, which a line stands for. Returns how many bytes that is.

        Raises OSError.
        """
        with self.opened(source) as read, self.replacing(target) as written:
            size = os.fstat(read.fileno()).st_size
            left_out = size - 2 * half_bytes
            written.writelines(_pieces(read, size if left_out <= 0 else half_bytes))
            if left_out > 0:
                written.write(f"\n[{left_out} bytes were cut here]\n".encode())
                read.seek(size - half_bytes)
                written.writelines(_pieces(read, half_bytes))
        return max(0, left_out)

    def make_folder(self, path: Path) -> None:
        """Raises OSError where something else has its name: what is written there would go elsewhere."""
        with self._folder(path.parent) as folder:
            try:
                os.mkdir(path.name, dir_fd=folder)
            except FileExistsError:
                os.close(_checked(os.open, path, _FOLDER | os.O_NOFOLLOW, dir_fd=folder))

    def remove(self, path: Path) -> None:
        """A file or a link, if it is there. Raises OSError."""
        with self._folder(path.parent) as folder, suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)

    # What was not read.

    def note(self, path: Path, why: str) -> None:
        """A reading that had to be cut."""
        name = os.path.relpath(path, self.root)
        if len(self._cut) < _MAX_NOTES:
            self._cut.append(Trouble(what=name, why=why))
        else:
            self._more += 1

    def cuts(self) -> tuple[Trouble, ...]:
        """Everything that was cut since it was asked last."""
        more = [Trouble(what="files of the run", why=f"{self._more} more were cut")] if self._more else []
        found, self._cut, self._more = (*self._cut, *more), [], 0
        return found

    @contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        """A descriptor of a folder of the run. Raises OSError where the way to it leads over a link."""
        parts = path.relative_to(self.root).parts
        if ".." in parts:
            raise OSError(errno.EINVAL, "a name that leads out of the run", str(path))
        folder = os.open(self.root, _FOLDER)
        try:
            at = self.root
            for part in parts:
                at = at / part
                below = _checked(os.open, at, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)


class _Metered(io.FileIO):
    """What is read counts, whoever reads. Once nothing is left, every file has ended, and that is noted."""

    def __init__(self, descriptor: int, door: SafeDirectory, path: Path) -> None:
        super().__init__(descriptor, "rb")
        self._door, self._path, self._ended = door, path, False

    def readinto(self, buffer: Any) -> int:
        budget = self._door.budget
        if budget is not None and (what := budget.spent):
            if not self._ended:
                self._door.note(self._path, f"not read to its end: the {what} that reading a run may take are spent")
            self._ended = True
            return 0
        count = super().readinto(buffer) or 0
        if budget is not None:
            budget.left_bytes -= count
        return count


def named(path: Path) -> tuple[SafeDirectory, Path]:
    """The door to one file that somebody named himself, with its name there: links on the way to it are his own."""
    resolved = path.resolve()
    return SafeDirectory(resolved.parent), resolved


def _checked(call: Any, path: Path, *words: int, dir_fd: int) -> int:
    """The call on the last name of the path, with the whole path in its error, and a link called one."""
    try:
        made: int = call(path.name, *words, dir_fd=dir_fd)
    except ValueError:  # a name with a NUL
        raise OSError(errno.EINVAL, "no name of a file", str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _leads_on(path.name, dir_fd):
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    return made


def _leads_on(name: str, folder: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece


def _lines_until(journal: BinaryIO, end: int) -> Iterator[bytes]:
    while journal.tell() < end and (line := journal.readline(_MAX_RECORD_BYTES)):
        yield line


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


# The reserve of a run: room on its disk that is given up so that its end can still be written. An empty file says that
# it was needed.

RESERVE = ".reserve"
_RESERVED_BYTES = 8 << 20  # the boards of some ranks, the evidence and all documents
_LEVELS = 3  # a document of a run lies at most so deep in it
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """The disk has no room, or the user's quota."""
    return isinstance(error, OSError) and error.errno in _FULL


def keep_reserve(run: Path) -> None:
    """To be called before each attempt: the room may have been needed, and be there again."""
    with suppress(OSError):
        descriptor = os.open(run / RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVED_BYTES)
        except OSError:
            os.ftruncate(descriptor, 0)
            raise
        finally:
            os.close(descriptor)


def release_reserve(run: Path) -> None:
    """A run that is over needs none."""
    with suppress(OSError):
        (run / RESERVE).unlink()


def with_room(path: Path, write: Callable[[], None]) -> None:
    """Again with the room of the reserve, where there is no other. Raises OSError."""
    try:
        write()
    except OSError as error:
        if not is_full(error) or not any(_emptied(home / RESERVE) for home in list(path.parents)[:_LEVELS]):
            raise
        write()


def _emptied(reserve: Path) -> bool:
    try:
        descriptor = os.open(reserve, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or facts.st_size == 0:
            return False
        os.ftruncate(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
