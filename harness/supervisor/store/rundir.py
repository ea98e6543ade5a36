"""The folders of a run with their file names, and the two ways to write: whole documents aside, journals by lines.

Numbered dumps are named where they are taken; the guardian and the ranks write theirs themselves.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nsa_harness.errors import StoredRunError, UsageError
from nsa_harness.supervisor.store import reserve
from nsa_harness.supervisor.store.redaction import Redaction

SPEC, _SECRETS = "spec.json", "secrets.json"


class AttemptDir:
    """One attempt of one scenario. What goes into its documents passes its `redaction`, which is that of its run."""

    def __init__(self, path: Path, redaction: Redaction | None = None, *, git_diff: bool = False) -> None:
        self.path = path
        self.redaction = redaction or Redaction(path.parent / _SECRETS)
        self.git_diff = git_diff  # whether env.json has what was not committed
        self.spec = path / SPEC  # the one file with the command as it was given
        self.command = path / "command.txt"
        self.env = path / "env.json"
        self.output = path / "output.log"
        self.traces = path / "traces.log"
        self.result = path / "result.txt"
        self.logs = path / "logs"  # torchrun's --log-dir: one stdout.log and stderr.log a rank
        self.boards = path / "boards"  # brought home by the guardian
        self.dumps = path / "dumps"
        self.processes = path / "processes.jsonl"  # the guardian's journal
        self.watch = path / "watch.jsonl"  # the watcher's journal
        self.abandoned = path / "interrupted"  # by the guardian, when the controller has died; Ctrl-C does not write it
        self.evidence = path / "evidence"
        self.verdict = path / "verdict.json"
        self.repro = path / "repro"  # the least that repeats it

    @property
    def reserve(self) -> Path:
        """Of the run that it belongs to."""
        return self.path.parent / reserve.NAME

    def rank(self, rank: int) -> Path:
        return self.path / f"rank{rank}"


class RunDir:
    """One run of one or more scenarios."""

    def __init__(self, path: Path, *, redact: bool = True, git_diff: bool = False) -> None:
        self.path = path
        self.secrets = path / _SECRETS  # values of the environment that its programs have printed
        self.redaction = Redaction(self.secrets, on=redact)
        self.git_diff = git_diff
        self.log = path / "test_execution.log"
        self.summary = path / "SUMMARY.md"
        self.report = path / "report.json"
        self.junit = path / "junit.xml"
        self.html = path / "report.html"
        self.events = path / "events.jsonl"
        self.request = path / "run.json"
        self.plan = path / "plan.json"  # the launches as they were given, where run.json cannot say them
        self.lock = path / ".lock"  # held while a controller runs it
        self.missing_params = path / "all_missing_params.txt"
        self.buckets = path / "ddp_buckets.txt"
        self.search = path / "bisect.json"  # this and what follows: of a bisection
        self.search_summary = path / "BISECT.md"
        self.search_state = path / "bisection.json"  # which question it is, and whether it has ended
        self.search_probes = path / "probes.jsonl"  # its journal
        self.worktrees = path / "worktrees"  # of commits, while it runs
        self.repro = path / "repro"  # the failing configuration as a script

    @property
    def run_id(self) -> str:
        return self.path.name

    def attempt(self, scenario: str, number: int = 1) -> AttemptDir:
        return self._attempt(self.path / (scenario if number == 1 else f"{scenario}~{number}"))

    def attempts(self) -> Iterator[AttemptDir]:
        """The attempts on disk, in the order in which they were launched. A journal without a spec is one as well."""
        found = {path.parent for name in ("spec.json", "processes.jsonl") for path in self._entries(name)}
        return (self._attempt(path) for path in sorted(found, key=_begun_ns))

    def _attempt(self, path: Path) -> AttemptDir:
        return AttemptDir(path, self.redaction, git_diff=self.git_diff)

    def _entries(self, name: str) -> Iterator[Path]:
        """Links that lead nowhere included, which a glob leaves out."""
        folders = (path for path in sorted(self.path.iterdir()) if path.is_dir())
        return (path / name for path in folders if os.path.lexists(path / name))


def create_run(parent: Path, *, redact: bool = True, git_diff: bool = False) -> RunDir:
    """A new run directory below `parent`; `parent/latest` points at it. Raises UsageError where none can be made.

    Nobody else may enter it: the logs of a program hold what it prints.
    """
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
    path = parent / run_id
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"cannot make a run directory below {parent}: {reason}; name a folder with --out DIR"
        ) from None
    aside = parent / f".latest.{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(run_id)
    aside.replace(parent / "latest")
    return RunDir(path, redact=redact, git_diff=git_diff)


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """The run belongs to this process. Raises StoredRunError while another controller has it."""
    try:
        held = FileLock(run.lock).acquire(timeout=0)
    except Timeout:
        raise StoredRunError(f"{run.path}: another nsa-harness is running it; wait for its end") from None
    with held:
        yield
        reserve.release(run.path)


def find_run(path: Path | None, parent: Path, *, redact: bool = True) -> RunDir:
    """The stored run that `path` names: a run directory, an attempt or file inside one, a run id, or the newest run.

    Raises StoredRunError where there is none.
    """
    wanted = parent / "latest" if path is None else path
    for candidate in (wanted, parent / wanted):
        resolved = candidate.resolve()
        for directory in (resolved, *list(resolved.parents)[:2]) if resolved.exists() else ():
            run = RunDir(directory, redact=redact)
            if directory.is_dir() and (run.request.is_file() or any(directory.glob("*/spec.json"))):
                return run
    known = sorted((entry.name for entry in parent.glob("2*T*-*")), reverse=True)[:3] if parent.is_dir() else []
    hint = f"the newest runs in {parent} are {', '.join(known)}" if known else f"{parent} holds no run"
    raise StoredRunError(f"{wanted}: not a stored run (no run.json and no */spec.json below it); {hint}")


def _begun_ns(attempt: Path) -> int:
    return next(
        (path.lstat().st_mtime_ns for path in (attempt / "spec.json", attempt) if os.path.lexists(path)),
        0,
    )


def own_folder(path: Path) -> None:
    """Makes the folder. Raises OSError where something else has its name: what is written there would go elsewhere."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    path.mkdir(exist_ok=True)


def write_document(path: Path, text: str) -> None:
    """Write aside and rename: a reader sees the old document or the new one, never half of one. Ours alone to read.

    On a disk that is full the reserve of the run gives its room. Raises OSError.
    """
    reserve.with_room(path, lambda: _write_aside(path, text))


def _write_aside(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.touch(mode=0o600)
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def append_line(path: Path, record: dict[str, Any]) -> None:
    """A whole line or nothing. Raises OSError."""
    line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
