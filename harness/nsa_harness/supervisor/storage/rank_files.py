"""Copies the files of a rank, which its instrumentation and torchrun wrote, to the directory of the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.supervisor.storage.recordings import EXPERIMENT_FILE
from nsa_harness.supervisor.storage.rundir import AttemptDir

MAX_HALF_BYTES = 32 << 20
_PROBE_FILES = {  # name in the probe directory -> name in the rank's directory
    protocol.STATUS_FILE: "board",
    protocol.STACKS: "stacks.txt",
    protocol.RAISED: "raised.json",
    protocol.FLIGHT: "flight.json",
    protocol.HEALTH_SAMPLES: "looks.jsonl",
    protocol.COVERAGE: "coverage",
    protocol.TROUBLE: "trouble.jsonl",
    protocol.EXPERIMENT: EXPERIMENT_FILE,
}


def rank_logs(attempt: AttemptDir) -> dict[tuple[str, str], Path]:
    """Return the latest log of each rank and stream, such as ("7", "stderr"), that torchrun has made."""
    logs: dict[tuple[str, str], Path] = {}
    for stream in ("stdout", "stderr"):
        for path in attempt.directory.list_files(attempt.logs, f"*/attempt_*/*/{stream}.log"):
            logs[path.parent.name, stream] = path
    return logs


def copy_probe_files(
    attempt: AttemptDir, rank: int, pid: int | None, logs: Mapping[tuple[str, str], Path]
) -> Iterator[OSError]:
    """Copy the logs and, if `pid` is known, the status files of a rank to its directory. Yield each error.

    `logs`: see `rank_logs`.
    """
    rank_dir = attempt.rank(rank)
    try:
        attempt.directory.make_directory(rank_dir)
    except OSError as error:
        yield error
        return
    for source, name in [*_logs(attempt, rank, logs), *_probe_files(attempt, pid)]:
        try:
            if skipped_bytes := attempt.directory.copy_ends(source, rank_dir / name, MAX_HALF_BYTES):
                attempt.directory.note_incomplete(
                    rank_dir / name, f"{skipped_bytes} bytes in the middle of {source.name} were not copied"
                )
        except OSError as error:
            yield error


def _logs(attempt: AttemptDir, rank: int, logs: Mapping[tuple[str, str], Path]) -> Iterator[tuple[Path, str]]:
    """Yield the path of each log of a rank, and the name for its copy."""
    for stream in ("stdout", "stderr"):
        log_file = logs.get((str(rank), stream))
        if log_file is not None:
            yield log_file, f"{stream}.log"
        elif not attempt.directory.exists(attempt.logs) and rank == 0 and attempt.directory.exists(attempt.output):
            yield attempt.output, f"{stream}.log"


def _probe_files(attempt: AttemptDir, pid: int | None) -> Iterator[tuple[Path, str]]:
    """Yield the path of each file that the instrumentation wrote for a rank, and the name for its copy."""
    for pattern, name in _PROBE_FILES.items() if pid is not None else ():
        source = attempt.probe_files / pattern.format(pid=pid)
        is_empty = attempt.directory.is_file(source) and not attempt.directory.size_bytes(source)
        if attempt.directory.exists(source) and (not is_empty or pattern == protocol.STATUS_FILE):
            yield source, name
