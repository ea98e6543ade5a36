"""Finds the files that a job has left behind, and reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.core.evidence.flight import MAX_BYTES
from nsa_harness.core.evidence.job_files import JobFile, is_document, read_job_file
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.supervisor.storage.safe_directory import Budget, SafeDirectory, safe_file

_MAX_FILES = 4096  # enough for 1024 ranks with two logs and two dumps each
_MAX_DEPTH = 12
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 8 << 20  # parts of a log that are read; the first error may be far before its end
_KERNEL_DIRECTORIES = frozenset(map(Path, ("/proc", "/sys")))
_DETECTION_BYTES = 1 << 14
_MAX_TOTAL_BYTES, _MAX_TOTAL_S = 128 << 20, 60.0
# Files with such names are read first, in case there are too many files. The content decides what kind a file is.
_LIKELY_NAMES = re.compile(
    r"rank|log|err|out|trace|dump|stack|spy|slurm|nccl|core|\.txt$|\.json$|pickle|attempt_", re.I
)
# Files next to logs that may quote logs.
_SOURCE_SUFFIXES = (".py", ".pyc", ".so", ".md", ".yaml", ".yml", ".toml", ".sh")


@dataclass(kw_only=True)
class JobFiles:
    """The files that were read from a job, and the reasons why other files could not be used."""

    files: list[JobFile] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)
    latest_change_ns: int = 0  # latest change of a file that was read


def read_job_files(paths: Sequence[Path]) -> JobFiles:
    """Read all files at or below `paths`, and record each failure in `trouble` of the result."""
    files = JobFiles()
    budget = Budget(_MAX_TOTAL_BYTES, _MAX_TOTAL_S)
    for path in paths:
        if not path.exists():
            reason = "a link that leads nowhere" if path.is_symlink() else "no such file or directory"
            files.trouble.append(Trouble(what=str(path), why=reason))
        elif path.is_dir():
            _read_directory(path, budget, files)
        else:
            directory, file = safe_file(path)
            _read(directory, file, str(path), budget, files)
    return files


def _read_directory(path: Path, budget: Budget, files: JobFiles) -> None:
    directory = SafeDirectory(path.resolve())
    all_files = list(_files_below(directory, directory.root, path, files))
    sorted_files = sorted(
        all_files, key=lambda file: (not _LIKELY_NAMES.search(file.relative_to(directory.root).as_posix()), file)
    )
    for file in sorted_files[:_MAX_FILES]:
        _read(directory, file, str(path / file.relative_to(directory.root)), budget, files)
    if len(sorted_files) > _MAX_FILES:
        skipped_count = len(sorted_files) - _MAX_FILES
        reason = f"{len(sorted_files)} files: {skipped_count} of them were not read; name the files that matter"
        files.trouble.append(Trouble(what=str(path), why=reason))


def _files_below(directory: SafeDirectory, folder: Path, path: Path, files: JobFiles, depth: int = 0) -> Iterator[Path]:
    label = path / folder.relative_to(directory.root)
    if folder in _KERNEL_DIRECTORIES or not _KERNEL_DIRECTORIES.isdisjoint(folder.parents):
        files.trouble.append(Trouble(what=str(label), why="contains files of the kernel, not of a job: not read"))
        return
    if RunDir(folder).is_stored_run:
        reason = f"a run of nsa-harness, which was not read; to judge it, run `nsa-harness report {label}`"
        files.trouble.append(Trouble(what=str(label), why=reason))
        return
    yield from (file for file in directory.list_files(folder, "*") if file.suffix not in _SOURCE_SUFFIXES)
    for child in directory.subdirectories(folder):
        if child.name.startswith("."):
            continue
        if depth == _MAX_DEPTH:
            files.trouble.append(Trouble(what=str(label), why=f"more than {_MAX_DEPTH} directories deep: not read"))
            return
        yield from _files_below(directory, child, path, files, depth + 1)


def _read(directory: SafeDirectory, file: Path, label: str, budget: Budget, files: JobFiles) -> None:
    directory.budget = budget
    try:
        data, cut_note = _file_data(directory, file)
    except OSError as error:
        files.trouble.append(Trouble(what=label, why=(error.strerror or type(error).__name__).lower()))
        return
    except ValueError as error:
        files.trouble.append(Trouble(what=label, why=str(error)))
        return
    changed_ns = directory.modified_ns(file)
    files.latest_change_ns = max(files.latest_change_ns, changed_ns)
    files.files.append(read_job_file(label, data, changed_ns))
    files.trouble += [Trouble(what=label, why=cut_note)] if cut_note else []
    files.trouble += [Trouble(what=label, why=note.why) for note in directory.take_notes()]


def _file_data(directory: SafeDirectory, file: Path) -> tuple[bytes, str]:
    """Return a file's contents, and a note if part was skipped. Raise OSError or ValueError if it is unusable."""
    size = directory.size_bytes(file)
    with directory.open_file(file) as stream:
        head = stream.read(_DETECTION_BYTES)
        if is_document(head) and size <= MAX_BYTES:
            return head + stream.read(MAX_BYTES - len(head)), ""
        if head[:1] == b"\x80":
            raise ValueError(f"a pickle of {size} bytes; at most {MAX_BYTES} are read")
        head += stream.read(_HEAD_BYTES + _TAIL_BYTES - len(head) if size <= _HEAD_BYTES + _TAIL_BYTES else _HEAD_BYTES)
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            return head, ""
        stream.seek(size - _TAIL_BYTES)
        tail = stream.read(_TAIL_BYTES).partition(b"\n")[2]
    skipped_bytes = size - len(head) - len(tail)
    return head + b"\n" + tail, f"{skipped_bytes} bytes in the middle were not read"
