"""Read the coverage file of a process: the lines of the program that it executed, in order of first execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from nsa_harness import protocol
from nsa_harness.core.recording.reading import numbers_of, read_header, records

_NS = 1_000_000_000
_MAX_TEXT = 1000  # characters of a path


@dataclass(frozen=True, kw_only=True)
class CoveredLine:
    """A line of the program, when a process executed it for the first time."""

    file: str
    line: int
    thread: int  # index in Coverage.threads
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The lines of the program that a process executed, in the order of their first execution."""

    files: tuple[str, ...]
    threads: tuple[str, ...]  # names of the threads, in the order of their first line
    # For each line: index of its file, its number, index of the first thread that executed it, and the time.
    entries: tuple[tuple[int, int, int, float], ...]
    is_complete: bool = True  # False: the file was full or damaged, or lines that all ranks executed are left out

    def lines(self) -> Iterator[CoveredLine]:
        for file, line, thread, at_s in self.entries:
            if 0 <= file < len(self.files) and 0 <= thread < len(self.threads):
                yield CoveredLine(file=self.files[file], line=line, thread=thread, at_s=at_s)

    def only_files(self, files: Set[str]) -> Coverage:
        """Return the coverage of these files only."""
        kept = tuple(entry for entry in self.entries if self.files[entry[0]] in files)
        return replace(self, entries=kept, is_complete=False)


def files_of_some_ranks(coverages: Sequence[Coverage]) -> frozenset[str]:
    """Return the files in which some ranks executed lines that other ranks did not."""
    return frozenset(file for file, _ in lines_of_some_ranks(coverages))


def lines_of_some_ranks(coverages: Sequence[Coverage]) -> set[tuple[str, int]]:
    """Return the lines, each as its file and number, that some ranks executed and others did not."""
    executed = ({(line.file, line.line) for line in coverage.lines()} for coverage in coverages)
    counts = Counter(line for lines in executed for line in lines)
    return {line for line, count in counts.items() if count < len(coverages)}


def read_coverage(data: bytes, launched_ns: int) -> Coverage:
    """Return the content of a coverage file. Raise ValueError if `data` is not a coverage file or is damaged.

    Times are in seconds since `launched_ns`. A process may be writing the file, so a record that is not complete yet
    ends the file.
    """
    *_, flags = read_header(data)
    strings: list[str] = []
    files: dict[str, int] = {}
    threads: list[str] = []
    entries = []
    for _, kind, body in records(data):
        try:
            if kind == protocol.RECORD_STRING:
                strings.append(body.decode("utf-8", "replace"))
            elif kind == protocol.RECORD_THREAD:
                _, name = numbers_of(body)
                threads.append(strings[name][:_MAX_TEXT])
            elif kind == protocol.RECORD_LINE:
                thread, name, line, at_ns = numbers_of(body)
                file = files.setdefault(strings[name][-_MAX_TEXT:], len(files))
                entries.append((file, line, thread, round((at_ns - launched_ns) / _NS, 4)))
                if not 0 <= thread < len(threads):
                    raise IndexError(thread)
            else:
                raise ValueError(kind)
        except (IndexError, ValueError):
            raise ValueError("damaged coverage file") from None
    is_complete = not flags & protocol.RECORDING_FULL
    return Coverage(files=tuple(files), threads=tuple(threads), entries=tuple(entries), is_complete=is_complete)
