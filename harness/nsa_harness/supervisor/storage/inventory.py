"""Lists the files of an attempt, or why they are missing, and writes the files that reproduce it."""

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
    """Write the files of the directory repro/. Return an artifact per file, with a reason if it was not written."""
    return tuple(_write(attempt, reproduction))


def _write(attempt: AttemptDir, reproduction: Reproduction | None) -> Iterator[Artifact]:
    # Files from an earlier judgement may contradict the new judgement.
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
    """Create the directory repro/ of an attempt. Return the error message, or "" on success."""
    try:
        attempt.directory.make_directory(attempt.repro)
    except OSError as error:
        return f"repro {'is' if error.errno == errno.ELOOP else 'cannot be created:'} {error.strerror}"
    return ""


_MAX_COUNTED_BYTES = 64 << 20


def inventory(attempt: AttemptDir, evidence: Evidence, program_files: Sequence[ProgramFile]) -> tuple[Artifact, ...]:
    """Return the files of an attempt and the additional `program_files`. A missing file is listed with the reason."""
    expected_files = tuple(_expected_files(evidence, program_files, has_nodes=bool(attempt.nodes())))
    return tuple(artifact for file in expected_files if (artifact := _artifact(attempt, file)) is not None)


def _artifact(attempt: AttemptDir, file: ProgramFile) -> Artifact | None:
    paths = attempt.directory.list_files(attempt.path, file.pattern)
    count = sum(_COUNTS[file.counted_in](attempt.directory, path) for path in paths)
    # An empty file of a user's program does not count: collecting the evidence creates an empty traces.log.
    if paths and (count or file.absent is not None):
        return Artifact(path=file.pattern, count=count, absent=None)
    return None if file.absent is None else Artifact(path=file.pattern, count=None, absent=file.absent)


def _expected_files(
    evidence: Evidence, program_files: Sequence[ProgramFile], *, has_nodes: bool
) -> Iterator[ProgramFile]:
    lines, files = CountedIn.LINES, CountedIn.FILES
    # Without the probe it is unknown whether there was anything to write.
    has_probe = not evidence.is_attached or any(rank.status_file for rank in evidence.ranks)
    no_probe = "" if has_probe else "the probe writes it, and the job was started without the probe"
    no_dumps = (
        "no stall was suspected" if evidence.ending is Ending.EXITED else "the run ended before stacks could be taken"
    )
    no_flight = (
        "the job has no flight recorder that can be read from outside"
        if evidence.is_attached
        else "torch.distributed was not used, or the rank died before its exit"
    )
    for pattern, counted_in, absent in (
        (
            "output.log",
            lines,
            "the job's output is not captured" if evidence.is_observed else "the program was not started",
        ),
        ("heartbeat_rank*.jsonl", lines, no_probe or "no optimizer step was finished"),
        ("nodes/*/dumps/rank*.txt" if has_nodes else "dumps/rank*.txt", files, no_dumps),
        ("profile.txt", lines, no_dumps),
        ("step_ledger.txt", lines, no_probe or "no rank has both finished steps and a flight recorder"),
        ("rank*/flight.json", files, no_flight),
        ("rank*/raised.json", files, no_probe or "no rank raised an exception"),
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
    CountedIn.ROWS: lambda directory, path: max(0, _lines(directory, path) - 1),  # without the header row
    CountedIn.FILES: lambda _, __: 1,
}
