"""The artifacts of an attempt: which files exist and how long they are, why others are missing, and repro/."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.outcome.reproduction import Reproduction
from nsa_harness.core.report import Artifact, CountedIn, ProgramFile
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

_SCRIPT, _COMMAND = "repro/repro.py", "repro/command.txt"


def write_reproduction(attempt: AttemptDir, reproduction: Reproduction | None) -> tuple[Artifact, ...]:
    """Write the files of repro/. Return them as artifacts, each with the reason if it was not written."""
    return tuple(_write(attempt, reproduction))


def _write(attempt: AttemptDir, reproduction: Reproduction | None) -> Iterator[Artifact]:
    # Files of an earlier judgement may contradict the new judgement.
    for path in (_SCRIPT, _COMMAND):
        with suppress(OSError):
            attempt.directory.remove(attempt.path / path)
    absence_reason = "the run neither failed nor hung" if reproduction is None else _directory_error(attempt)
    if reproduction is None or absence_reason:
        yield from (Artifact(path=path, count=None, absent=absence_reason) for path in (_SCRIPT, _COMMAND))
        return
    if reproduction.script is None:
        yield Artifact(path=_SCRIPT, count=None, absent=reproduction.no_script_reason)
    else:
        attempt.directory.write(attempt.path / _SCRIPT, reproduction.script)
        yield Artifact(path=_SCRIPT, count=reproduction.script.count("\n"), absent=None)
    attempt.directory.write(attempt.path / _COMMAND, reproduction.command)
    yield Artifact(path=_COMMAND, count=reproduction.command.count("\n"), absent=None)


def _directory_error(attempt: AttemptDir) -> str:
    """Make repro/ and return "", or the reason why not: a link may lead anywhere if the run came from another user."""
    try:
        attempt.directory.make_directory(attempt.repro)
    except OSError as error:
        return f"repro {'is' if error.errno == errno.ELOOP else 'cannot be made:'} {error.strerror}"
    return ""


_MAX_COUNTED_BYTES = 64 << 20


def inventory(attempt: AttemptDir, evidence: Evidence, program_files: Sequence[ProgramFile]) -> tuple[Artifact, ...]:
    """Return the files that every run and the shipped program write, with the reason if a file is missing."""
    expected_files = tuple(_expected_files(evidence, program_files))
    return tuple(artifact for file in expected_files if (artifact := _artifact(attempt, file)) is not None)


def _artifact(attempt: AttemptDir, file: ProgramFile) -> Artifact | None:
    paths = attempt.directory.list_files(attempt.path, file.pattern)
    count = sum(_COUNTS[file.counted_in](attempt.directory, path) for path in paths)
    # An empty file of a foreign program is no artifact: collecting created its traces.log.
    if paths and (count or file.absent is not None):
        return Artifact(path=file.pattern, count=count, absent=None)
    return None if file.absent is None else Artifact(path=file.pattern, count=None, absent=file.absent)


def _expected_files(evidence: Evidence, program_files: Sequence[ProgramFile]) -> Iterator[ProgramFile]:
    lines, files = CountedIn.LINES, CountedIn.FILES
    # Without the probe it is unknown whether there was anything to write.
    has_probe = not evidence.is_attached or any(rank.status_file for rank in evidence.ranks)
    no_probe = "" if has_probe else "it is written by the probe, and the job was started without it"
    no_dumps = (
        "nothing was suspected" if evidence.ending is Ending.EXITED else "the run was over before stacks could be taken"
    )
    no_flight = (
        "the job offers no flight recorder that could be asked"
        if evidence.is_attached
        else "torch.distributed was not used, or the rank died before its exit"
    )
    for pattern, counted_in, absent in (
        ("output.log", lines, "it stays the job's own" if evidence.is_observed else "the program was not started"),
        ("heartbeat_rank*.jsonl", lines, no_probe or "not reached: no optimizer step was done"),
        ("dumps/rank*.txt", files, no_dumps),
        ("profile.txt", lines, no_dumps),
        ("step_ledger.txt", lines, no_probe or "no rank has both finished steps and a flight recorder"),
        ("rank*/flight.json", files, no_flight),
        ("rank*/raised.json", files, no_probe or "no rank raised"),
        ("rank*/stacks.txt", files, no_probe or "no rank died of a fatal signal"),
        ("env.json", files, "it could not be written"),
    ):
        yield ProgramFile(pattern=pattern, counted_in=counted_in, after="", absent=absent)
        yield from (file for file in program_files if file.after == pattern)


def _lines(directory: SafeDirectory, path: Path) -> int:
    if directory.size_bytes(path) > _MAX_COUNTED_BYTES:
        return directory.size_bytes(path) // 80
    try:
        with directory.open_file(path) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


_COUNTS: dict[CountedIn, Callable[[SafeDirectory, Path], int]] = {
    CountedIn.LINES: _lines,
    CountedIn.ROWS: lambda door, path: max(0, _lines(door, path) - 1),  # without the head of the table
    CountedIn.FILES: lambda _, __: 1,
}
