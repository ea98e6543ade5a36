"""The files that a job left, wherever somebody keeps them: found below folders, read within bounds, recognised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.core.evidence.flight import MAX_BYTES
from nsa_harness.core.evidence.job_files import JobFile, is_document, left_file
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.supervisor.storage.safe_directory import Budget, SafeDirectory, named

_MAX_FILES = 4096  # of a job of 1024 ranks each has two logs and two dumps
_MAX_DEPTH = 12
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 8 << 20  # of a log: what begins a failure may stand far before its end
_SNIFFED_BYTES = 1 << 14
_ALL_BYTES, _SECONDS = 128 << 20, 60.0
# What a job mostly leaves goes first, where there is more than is read. What a file is, its content says.
_PROMISING = re.compile(r"rank|log|err|out|trace|dump|stack|spy|slurm|nccl|core|\.txt$|\.json$|pickle|attempt_", re.I)
_PROGRAM = (".py", ".pyc", ".so", ".md", ".yaml", ".yml", ".toml", ".sh")  # lies beside logs, and quotes what they say


@dataclass(kw_only=True)
class JobFiles:
    """What was found, and what of it could not be used."""

    files: list[JobFile] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)
    newest_ns: int = 0  # change of a file that was read


def left_files(paths: Sequence[Path]) -> JobFiles:
    """Everything below these. Never raises for what a file is: it has a line of `trouble`."""
    found = JobFiles()
    budget = Budget(_ALL_BYTES, _SECONDS)
    for path in paths:
        if not path.exists():
            why = "a link that leads nowhere" if path.is_symlink() else "no such file or directory"
            found.trouble.append(Trouble(what=str(path), why=why))
        elif path.is_dir():
            _read_folder(path, budget, found)
        else:
            door, file = named(path)
            _read(door, file, str(path), budget, found)
    return found


def _read_folder(path: Path, budget: Budget, found: JobFiles) -> None:
    door = SafeDirectory(path.resolve())
    below = list(_below(door, door.root, path, found))
    wanted = sorted(below, key=lambda file: (not _PROMISING.search(file.relative_to(door.root).as_posix()), file))
    for file in wanted[:_MAX_FILES]:
        _read(door, file, str(path / file.relative_to(door.root)), budget, found)
    if len(wanted) > _MAX_FILES:
        why = f"{len(wanted)} files: {len(wanted) - _MAX_FILES} of them were not looked at; name those that matter"
        found.trouble.append(Trouble(what=str(path), why=why))


def _below(door: SafeDirectory, folder: Path, path: Path, found: JobFiles, depth: int = 0) -> Iterator[Path]:
    shown = path / folder.relative_to(door.root)
    if RunDir(folder).stored:
        why = f"a run of nsa-harness, which `nsa-harness report {shown}` judges; it was not read here"
        found.trouble.append(Trouble(what=str(shown), why=why))
        return
    yield from (file for file in door.files(folder, "*") if file.suffix not in _PROGRAM)
    for below in door.folders(folder):
        if below.name.startswith("."):
            continue
        if depth == _MAX_DEPTH:
            found.trouble.append(Trouble(what=str(shown), why=f"more than {_MAX_DEPTH} folders deep: not looked at"))
            return
        yield from _below(door, below, path, found, depth + 1)


def _read(door: SafeDirectory, file: Path, shown: str, budget: Budget, found: JobFiles) -> None:
    door.budget = budget
    try:
        data, cut = _data(door, file)
    except OSError as error:
        found.trouble.append(Trouble(what=shown, why=(error.strerror or type(error).__name__).lower()))
        return
    except ValueError as error:
        found.trouble.append(Trouble(what=shown, why=str(error)))
        return
    changed_ns = door.changed_ns(file)
    found.newest_ns = max(found.newest_ns, changed_ns)
    found.files.append(left_file(shown, data, changed_ns))
    found.trouble += [Trouble(what=shown, why=cut)] if cut else []
    found.trouble += [Trouble(what=shown, why=one.why) for one in door.cuts()]


def _data(door: SafeDirectory, file: Path) -> tuple[bytes, str]:
    """A document whole; of a log its beginning and its end, and what was left out. Raises OSError, ValueError."""
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
