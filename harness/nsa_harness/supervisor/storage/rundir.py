"""The folders of a run with their file names, who has a run at the moment, and how a stored one is found.

Numbered dumps are named where they are taken; the guardian and the ranks write theirs themselves.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.errors import StillRunning, StoredRunError, UsageError
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.safe_directory import RESERVE, SafeDirectory, release_reserve

SPEC, _SECRETS, _JOURNAL = "spec.json", "secrets.json", "processes.jsonl"
_NAMED = "2*T*-*"  # what `create_run` calls a run
_MAX_SAID_BYTES = 16 << 20  # of a run.json


class AttemptDir:
    """One attempt of one scenario. What goes into its documents passes its `redaction`, which is that of its run."""

    def __init__(
        self, path: Path, root: Path | None = None, redaction: Redaction | None = None, *, git_diff: bool = False
    ) -> None:
        """`root`: of the run that it belongs to; without one it is opened as if it were a run of its own."""
        self.path = path
        self.door = SafeDirectory(root or path)
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
        self.processes = path / _JOURNAL  # the guardian's journal
        self.watch = path / "watch.jsonl"  # the watcher's journal
        self.abandoned = path / "interrupted"  # by the guardian, when the controller has died; Ctrl-C does not write it
        self.evidence = path / "evidence"
        self.verdict = path / "verdict.json"
        self.trace = path / "trace.json"
        self.repro = path / "repro"  # the least that repeats it

    @property
    def reserve(self) -> Path:
        """Of the run that it belongs to."""
        return self.path.parent / RESERVE

    def rank(self, rank: int) -> Path:
        return self.path / f"rank{rank}"


class RunDir:
    """One run of one or more scenarios."""

    def __init__(self, path: Path, *, redact: bool = True, git_diff: bool = False) -> None:
        self.path = path
        self.door = SafeDirectory(path)
        self.secrets = path / _SECRETS  # values of the environment that its programs have printed
        self.redaction = Redaction(self.secrets, on=redact)
        self.git_diff = git_diff
        self.log = path / "test_execution.log"
        self.summary = path / "SUMMARY.md"
        self.report = path / "report.json"
        self.junit = path / "junit.xml"
        self.ctrf = path / "ctrf-report.json"
        self.sarif = path / "report.sarif"
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
        self.mixtures = path / "mixtures"  # of two config files or environments
        self.repro = path / "repro"  # the failing configuration as a script
        self.readiness = path / "READINESS.md"  # this and what follows: of a check before production
        self.readiness_record = path / "readiness.json"
        self.readiness_state = path / "readiness_state.json"  # what it rests on, and whether it has ended

    @property
    def run_id(self) -> str:
        return self.path.name

    def attempt(self, scenario: str, number: int = 1) -> AttemptDir:
        return self._attempt(self.path / (scenario if number == 1 else f"{scenario}~{number}"))

    def attempts(self) -> Iterator[AttemptDir]:
        """The attempts on disk, in the order in which they were launched. A journal without a spec is one as well."""
        there = self.door.there
        found = [path for path in self.door.folders(self.path) if there(path / SPEC) or there(path / _JOURNAL)]
        return (self._attempt(path) for path in sorted(found, key=self._begun_ns))

    def _attempt(self, path: Path) -> AttemptDir:
        return AttemptDir(path, self.path, self.redaction, git_diff=self.git_diff)

    def _begun_ns(self, attempt: Path) -> int:
        return self.door.changed_ns(attempt / "spec.json") or self.door.changed_ns(attempt)

    @property
    def stored(self) -> bool:
        """It is a run of ours, by its name or by what it holds, and no folder of strangers that has files so called."""
        request = [self.request] if self.door.is_file(self.request) else []
        specs = [path / SPEC for path in self.door.folders(self.path) if self.door.there(path / SPEC)]
        named = fnmatchcase(self.path.name, _NAMED) and bool(request or specs)
        return (
            named
            or any(self._holds(path, "schema", "plan") for path in request)
            or any(self._holds(path, "schema", "scenario", "program") for path in specs)
        )

    def _holds(self, path: Path, *keys: str) -> bool:
        try:
            said = json.loads(self.door.whole(path, _MAX_SAID_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(said, dict) and said.keys() >= set(keys)


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
    aside = parent / f".latest.{secrets.token_hex(8)}"
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
        release_reserve(run.path)


@contextmanager
def at_rest(run: RunDir) -> Iterator[None]:
    """Nobody runs it, and nobody begins to as long as this holds. Raises StillRunning; writes nothing.

    A run without a lock, or whose lock may not be opened, was stored by somebody else.
    """
    try:
        lock = run.door.opened(run.lock)
    except OSError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StillRunning(f"{run.path}: still running; nothing was judged or written{_so_far(run)}") from None
        yield


def _so_far(run: RunDir) -> str:
    """What its attempts have come to, for whoever cannot wait."""
    told = []
    for attempt in run.attempts():
        verdict = "running"
        with suppress(OSError, ValueError):
            verdict = attempt.door.whole(attempt.result, 100).decode("ascii").strip()
        told.append(visible(f"{attempt.path.name} {verdict}"))
    return f"; so far: {', '.join(told)}" if told else ""


def find_run(path: Path | None, parent: Path, *, redact: bool = True) -> RunDir:
    """The stored run that `path` names: a run directory, an attempt or file inside one, a run id, or the newest run.

    Raises StoredRunError where there is none.
    """
    wanted = parent / "latest" if path is None else path
    for candidate in (wanted, parent / wanted):
        resolved = candidate.resolve()
        for directory in (resolved, *list(resolved.parents)[:2]) if resolved.exists() else ():
            run = RunDir(directory, redact=redact)
            if directory.is_dir() and run.stored:
                return run
    known = [path.name for path in newest(parent)[:_LOOKED_INTO] if RunDir(path).stored][:_HINTED]
    hint = f"the newest runs in {parent} are {', '.join(known)}" if known else f"{parent} holds no run"
    raise StoredRunError(f"{wanted}: not a stored run (no run.json and no */spec.json below it); {hint}")


_HINTED, _LOOKED_INTO = 3, 30


def newest(parent: Path) -> list[Path]:
    """What bears the name of a run, the newest first."""
    return [path for path in reversed(SafeDirectory(parent).folders(parent)) if fnmatchcase(path.name, _NAMED)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an attempt of a stored run ended, as its report says."""

    run_id: str
    spec_hash: str
    verdict: str
    wall_s: float


def ended_before(parent: Path, spec_hashes: Collection[str], but: str = "") -> Iterator[Ended]:
    """Of the newest runs below `parent`, the newest first, those attempts that had one of these specs.

    A report that cannot be read tells nothing, and is passed over. `but`: the run that is no earlier one.
    """
    for run in (RunDir(path) for path in newest(parent)[:_REMEMBERED] if path.name != but):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            for one in json.loads(run.door.whole(run.report, _MAX_SAID_BYTES))["outcomes"]:
                if one["spec_hash"] in spec_hashes:
                    wall_s = float(one["timing"]["wall_s"])
                    yield Ended(
                        run_id=run.run_id, spec_hash=one["spec_hash"], verdict=str(one["verdict"]), wall_s=wall_s
                    )


_REMEMBERED = 50


def write_document(path: Path, text: str) -> None:
    """A whole document, aside and renamed, into a folder that the caller has made or that a user has named.

    On a disk that is full the reserve of the run gives its room. Raises OSError.
    """
    SafeDirectory(path.parent).write(path, text)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """A whole line or nothing. Raises OSError."""
    SafeDirectory(path.parent).append(path, json.dumps(record, separators=(",", ":")) + "\n")
