"""Find the files that a job has left, read them up to a limit, and recognise their kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.core.evidence.flight import MAX_BYTES
from nsa_harness.core.evidence.job_files import JobFile, is_document, read_job_file
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.supervisor.storage.safe_directory import Budget, SafeDirectory, named

_MAX_FILES = 4096  # 1024 ranks with two logs and two dumps each
_MAX_DEPTH = 12
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 8 << 20  # read of a log: the first error may be far before its end
_SNIFFED_BYTES = 1 << 14
_ALL_BYTES, _SECONDS = 128 << 20, 60.0
# Names that jobs use are read first, in case there are too many files. The content decides what a file is.
_PROMISING = re.compile(r"rank|log|err|out|trace|dump|stack|spy|slurm|nccl|core|\.txt$|\.json$|pickle|attempt_", re.I)
_PROGRAM = (".py", ".pyc", ".so", ".md", ".yaml", ".yml", ".toml", ".sh")  # found next to logs, and quote them


@dataclass(kw_only=True)
class JobFiles:
    """The files of a job, and the reasons why some could not be used."""

    files: list[JobFile] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)
    newest_ns: int = 0  # latest change of a file that was read


def left_files(paths: Sequence[Path]) -> JobFiles:
    """Return all files below these paths. Never raises for an unusable file: that becomes a line of `trouble`."""
    files = JobFiles()
    budget = Budget(_ALL_BYTES, _SECONDS)
    for path in paths:
        if not path.exists():
            why = "a link that leads nowhere" if path.is_symlink() else "no such file or directory"
            files.trouble.append(Trouble(what=str(path), why=why))
        elif path.is_dir():
            _read_folder(path, budget, files)
        else:
            door, file = named(path)
            _read(door, file, str(path), budget, files)
    return files


def _read_folder(path: Path, budget: Budget, files: JobFiles) -> None:
    door = SafeDirectory(path.resolve())
    below = list(_below(door, door.root, path, files))
    wanted = sorted(below, key=lambda file: (not _PROMISING.search(file.relative_to(door.root).as_posix()), file))
    for file in wanted[:_MAX_FILES]:
        _read(door, file, str(path / file.relative_to(door.root)), budget, files)
    if len(wanted) > _MAX_FILES:
        why = f"{len(wanted)} files: {len(wanted) - _MAX_FILES} of them were not looked at; name those that matter"
        files.trouble.append(Trouble(what=str(path), why=why))


def _below(door: SafeDirectory, folder: Path, path: Path, files: JobFiles, depth: int = 0) -> Iterator[Path]:
    shown = path / folder.relative_to(door.root)
    if RunDir(folder).stored:
        why = f"a run of nsa-harness, which `nsa-harness report {shown}` judges; it was not read here"
        files.trouble.append(Trouble(what=str(shown), why=why))
        return
    yield from (file for file in door.files(folder, "*") if file.suffix not in _PROGRAM)
    for below in door.folders(folder):
        if below.name.startswith("."):
            continue
        if depth == _MAX_DEPTH:
            files.trouble.append(Trouble(what=str(shown), why=f"more than {_MAX_DEPTH} folders deep: not looked at"))
            return
        yield from _below(door, below, path, files, depth + 1)


def _read(door: SafeDirectory, file: Path, shown: str, budget: Budget, files: JobFiles) -> None:
    door.budget = budget
    try:
        data, cut = _data(door, file)
    except OSError as error:
        files.trouble.append(Trouble(what=shown, why=(error.strerror or type(error).__name__).lower()))
        return
    except ValueError as error:
        files.trouble.append(Trouble(what=shown, why=str(error)))
        return
    changed_ns = door.changed_ns(file)
    files.newest_ns = max(files.newest_ns, changed_ns)
    files.files.append(read_job_file(shown, data, changed_ns))
    files.trouble += [Trouble(what=shown, why=cut)] if cut else []
    files.trouble += [Trouble(what=shown, why=note.why) for note in door.cuts()]


def _data(door: SafeDirectory, file: Path) -> tuple[bytes, str]:
    """Return a whole document, or the beginning and end of a log, and a note on what was skipped.

    Raises OSError, and ValueError for a pickle that is too large.
    """
    size = door.size_bytes(file)
    with door.opened(file) as opened:
        head = opened.read(_SNIFFED_BYTES)
        if is_document(head) and size <= MAX_BYTES:
            return head + opened.read(MAX_BYTES - len(head)), ""
        if head[:1] == b"\x80":
            raise ValueError(f"a pickle of {size} bytes; at most {MAX_BYTES} are read")
        head += opened.read(_HEAD_BYTES + _TAIL_BYTES - len(head) if size <= _HEAD_BYTES + _TAIL_BYTES else _HEAD_BYTES)
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            return head, ""
        opened.seek(size - _TAIL_BYTES)
        tail = opened.read(_TAIL_BYTES).partition(b"\n")[2]
    left_out = size - len(head) - len(tail)
    return head + b"\n" + tail, f"{left_out} bytes in its middle were not read"
