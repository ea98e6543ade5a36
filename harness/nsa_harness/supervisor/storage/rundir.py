"""Defines the directories and file names of a run, and finds and locks stored runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.errors import StillRunning, StoredRunError, UsageError
from nsa_harness.protocol import PROBE_FULL
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.safe_directory import BALLAST, SafeDirectory, fill_ballast, release_ballast

SPEC, _SECRETS, _JOURNAL = "spec.json", "secrets.json", "processes.jsonl"
NODES = "nodes"  # in an attempt of a job that an agent on each node observes: a directory for each node
_RUN_ID = "2*T*-*"  # pattern of the directory names that `create_run` makes
_MAX_BYTES = 16 << 20  # largest run.json or report.json that is read


class AttemptDir:
    """The directory of one attempt, with the paths of its files, safe access to them, and their redaction."""

    def __init__(
        self,
        path: Path,
        root: Path | None = None,
        redaction: Redaction | None = None,
        *,
        git_diff: bool = False,
        reads_values: bool = True,
    ) -> None:
        self.path = path
        self.directory = SafeDirectory(root or path)
        self.redaction = redaction or Redaction(path.parent / _SECRETS)
        self.git_diff = git_diff  # whether env.json has the uncommitted changes
        self.reads_values = reads_values  # whether values of the program's variables may be read
        self.spec = path / SPEC  # the only file with the unredacted command
        self.command = path / "command.txt"
        self.env = path / "env.json"
        self.output = path / "output.log"
        self.traces = path / "traces.log"
        self.result = path / "result.txt"
        self.logs = path / "logs"  # torchrun's --log-dir, with a stdout.log and a stderr.log per rank
        self.probe_files = path / "boards"  # the probe's files of all processes, moved there by the reaper
        self.dumps = path / "dumps"
        self.processes = path / _JOURNAL  # the reaper's journal
        self.watch = path / "watch.jsonl"  # the watcher's journal
        self.interruption_note = path / "interrupted"  # written by the reaper if nsa-harness was killed, not for Ctrl-C
        self.evidence = path / "evidence"
        self.verdict = path / "verdict.json"
        self.explanation = path / "explanation.json"  # why the ranks of a recorded attempt took different ways
        self.trace = path / "trace.json"
        self.repro = path / "repro"  # the smallest reproduction

    @property
    def ballast_file(self) -> Path:
        """The path of the file that reserves disk space for the end of the run."""
        return self.path.parent / BALLAST

    def append_record(self, path: Path, record: dict[str, Any]) -> None:
        """Append a record to a journal as one line of JSON. Raise OSError, without writing anything, if that fails."""
        self.directory.append(path, _json_line(record))

    def rank(self, rank: int) -> Path:
        return self.path / f"rank{rank}"

    def nodes(self) -> list[str]:
        """Return the names of the nodes whose agents have written to this attempt, or [] if it had no agents."""
        return [path.name for path in self.directory.subdirectories(self.path / NODES)]

    def node(self, name: str) -> AttemptDir:
        """Return the part of this attempt that only the agent of one node writes."""
        path = self.path / NODES / name
        redaction = Redaction(path / _SECRETS, is_on=self.redaction.is_on)
        return AttemptDir(path, self.directory.root, redaction, git_diff=self.git_diff, reads_values=self.reads_values)

    def with_files_of(self, name: str) -> AttemptDir:
        """Return this attempt as seen by the agent of one node. What is collected is written to the attempt itself."""
        view, node = copy(self), self.node(name)
        for attribute in ("probe_files", "dumps", "processes", "watch", "interruption_note", "output", "logs"):
            setattr(view, attribute, getattr(node, attribute))
        return view


class RunDir:
    """The directory of a run of one or more scenarios, with the paths of its files."""

    def __init__(self, path: Path, *, redact: bool = True, git_diff: bool = False, reads_values: bool = True) -> None:
        self.path = path
        self.directory = SafeDirectory(path)
        self.secrets = path / _SECRETS  # a hash of each secret, which keeps its number
        self.redaction = Redaction(self.secrets, is_on=redact)
        self.git_diff = git_diff
        self.reads_values = reads_values
        self.log = path / "test_execution.log"
        self.summary = path / "SUMMARY.md"
        self.report = path / "report.json"
        self.junit = path / "junit.xml"
        self.sarif = path / "report.sarif"
        self.html = path / "report.html"
        self.events = path / "events.jsonl"
        self.record = path / "run.json"
        self.plan = path / "plan.json"  # the unredacted launches, if they contain secrets
        self.lock = path / ".lock"  # locked while a controller is running the run
        self.missing_params = path / "all_missing_params.txt"
        self.buckets = path / "ddp_buckets.txt"
        # Files of a bisection.
        self.search = path / "bisect.json"
        self.search_summary = path / "BISECT.md"
        self.search_state = path / "bisection.json"  # the question of the bisection, and whether it has finished
        self.search_probes = path / "probes.jsonl"  # the journal of the bisection
        self.worktrees = path / "worktrees"  # checkouts of commits, while the bisection is running
        self.mixtures = path / "mixtures"  # intermediate configurations of two config files or environments
        self.repro = path / "repro"  # the failing configuration as a script
        self.hosts = path / "hosts.json"  # what a search for bad hosts compares
        # Files of a claim.
        self.claim_state = path / "claim_state.json"  # the inputs of the claim, and whether it has finished
        self.trials = path / "trials.jsonl"  # the results of its runs
        # Files of `why`, which also has the results of its runs in trials.jsonl.
        self.why = path / "why.json"  # the answer
        self.why_state = path / "why_state.json"  # the inputs of the question, and whether it is answered
        # Files of `ready`, a check before production.
        self.readiness = path / "READINESS.md"
        self.readiness_record = path / "readiness.json"
        self.readiness_state = path / "readiness_state.json"  # the inputs of the check, and whether it has finished

    @property
    def run_id(self) -> str:
        return self.path.name

    def attempt(self, scenario: str, number: int = 1) -> AttemptDir:
        return self._attempt(self.path / (scenario if number == 1 else f"{scenario}~{number}"))

    def attempts(self) -> Iterator[AttemptDir]:
        """Yield the stored attempts in the order of their launches."""
        exists = self.directory.exists
        paths = [
            path for path in self.directory.subdirectories(self.path) if exists(path / SPEC) or exists(path / _JOURNAL)
        ]
        return (self._attempt(path) for path in sorted(paths, key=self._start_ns))

    def _attempt(self, path: Path) -> AttemptDir:
        return AttemptDir(path, self.path, self.redaction, git_diff=self.git_diff, reads_values=self.reads_values)

    def _start_ns(self, attempt: Path) -> int:
        return self.directory.modified_ns(attempt / "spec.json") or self.directory.modified_ns(attempt)

    @property
    def is_stored_run(self) -> bool:
        """Whether this directory looks like the directory of a run of nsa-harness."""
        records = [self.record] if self.directory.is_file(self.record) else []
        specs = [path / SPEC for path in self.directory.subdirectories(self.path) if self.directory.exists(path / SPEC)]
        is_named_like_run = fnmatchcase(self.path.name, _RUN_ID) and bool(records or specs)
        return (
            is_named_like_run
            or any(self._has_keys(path, "schema", "plan") for path in records)
            or any(self._has_keys(path, "schema", "scenario", "program") for path in specs)
        )

    def _has_keys(self, path: Path, *keys: str) -> bool:
        try:
            document = json.loads(self.directory.read_whole_file(path, _MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(document, dict) and document.keys() >= set(keys)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options shared by all commands that launch runs."""

    command: str  # the command line of nsa-harness
    out: Path | None = None  # the parent of run directories; None: ./reports
    json: bool = False
    probe: str = PROBE_FULL  # off, board (only the status file) or full
    redact: bool = True
    git_diff: bool = False  # env.json contains the uncommitted changes
    reads_values: bool = True  # values of the program's variables may be read
    strict: bool = False
    verbose: bool = False  # the terminal also shows the evidence
    notify: tuple[str, ...] = field(default=(), repr=False)  # where notifications are sent; URLs contain tokens

    @property
    def parent(self) -> Path:
        return self.out or Path("reports")


def create_run(parent: Path, *, redact: bool = True, git_diff: bool = False, reads_values: bool = True) -> RunDir:
    """Create a private run directory, to which `parent/latest` then links. Raise UsageError if that fails."""
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
    path = parent / run_id
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"cannot create a run directory below {parent}: {reason}; choose a directory with --out DIR"
        ) from None
    _link_latest(parent, run_id)
    return RunDir(path, redact=redact, git_diff=git_diff, reads_values=reads_values)


def _link_latest(parent: Path, run_id: str) -> None:
    """Make `parent/latest` a link to a run. A directory of this name is renamed if that is allowed."""
    latest, temporary = parent / "latest", parent / f".latest.{secrets.token_hex(8)}"
    try:
        if latest.is_dir() and not latest.is_symlink():
            latest.rename(parent / f"latest.before-{run_id}")
        temporary.symlink_to(run_id)
        temporary.replace(latest)
    except OSError:
        temporary.unlink(missing_ok=True)


@contextmanager
def lock_run(run: RunDir) -> Iterator[None]:
    """Lock the run for this process during the `with` block. Raise StoredRunError if it is locked already."""
    try:
        lock = FileLock(run.lock).acquire(timeout=0)
    except Timeout:
        raise StoredRunError(f"{run.path}: another nsa-harness is running it; wait until it has finished") from None
    with lock:
        fill_ballast(run.path)
        yield
        release_ballast(run.path)


def hold_lock(run: RunDir) -> FileLock | None:
    """Lock the run until this process exits, if that is possible: some network file systems have no locks."""
    lock = FileLock(run.lock)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        return None
    return lock


@contextmanager
def refuse_if_running(run: RunDir) -> Iterator[None]:
    """Raise StillRunning if the run is in progress. Otherwise prevent its resumption during the `with` block.

    Nothing is written. If there is no lock file that may be opened, the run was stored by another user, and the block
    runs without a lock.
    """
    try:
        lock = run.directory.open_file(run.lock)
    except OSError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StillRunning(
                f"{run.path}: still running; nothing was judged or written{_verdicts_so_far(run)}"
            ) from None
        yield


def _verdicts_so_far(run: RunDir) -> str:
    """Return the verdicts of the run's attempts so far, as text for an error message."""
    verdicts = []
    for attempt in run.attempts():
        verdict = "running"
        with suppress(OSError, ValueError):
            verdict = attempt.directory.read_whole_file(attempt.result, 100).decode("ascii").strip()
        verdicts.append(visible(f"{attempt.path.name} {verdict}"))
    return f"; so far: {', '.join(verdicts)}" if verdicts else ""


def find_run(path: Path | None, parent: Path, *, redact: bool = True) -> RunDir:
    """Return the stored run that a path or run id names, by default the latest. Raise StoredRunError if none is."""
    requested_path = parent / "latest" if path is None else path
    for candidate in (requested_path, parent / requested_path):
        target = candidate.resolve()
        _refuse_unreadable(target)
        for directory in (target, *list(target.parents)[:2]) if target.exists() else ():
            run = RunDir(directory, redact=redact)
            if directory.is_dir() and run.is_stored_run:
                return run
    run_ids = [path.name for path in latest_runs(parent)[:_MAX_INSPECTED_RUNS] if RunDir(path).is_stored_run][
        :_MAX_HINTED_RUNS
    ]
    hint = f"the latest runs in {parent} are {', '.join(run_ids)}" if run_ids else f"{parent} contains no run"
    raise StoredRunError(f"{requested_path}: not a stored run (no run.json and no */spec.json below it); {hint}")


def _refuse_unreadable(path: Path) -> None:
    """Raise StoredRunError if this user may not enter `path` or a directory above it, as in a run made with sudo."""
    for directory in (*reversed(path.parents), path):
        if not os.access(directory, os.X_OK):
            if directory.is_dir():
                owner, is_run = directory.stat().st_uid, fnmatchcase(directory.name, _RUN_ID)
                command = f"sudo chown -R {os.getuid()} {shlex.quote(str(directory))}"
                advice = f"; to take it over: {command}" if is_run else ""
                raise StoredRunError(
                    f"{directory}: belongs to the user with id {owner}, and you may not read it{advice}"
                )
            return


_MAX_HINTED_RUNS, _MAX_INSPECTED_RUNS = 3, 30


def latest_runs(parent: Path) -> list[Path]:
    """Return the run directories below `parent`, with the latest first."""
    return [path for path in reversed(SafeDirectory(parent).subdirectories(parent)) if fnmatchcase(path.name, _RUN_ID)]


def working_directory() -> Path | None:
    """Return the working directory of this process, or None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """The result of one attempt in a stored run, read from its report."""

    run_id: str
    spec_hash: str
    verdict: str
    wall_s: float


def earlier_results(parent: Path, spec_hashes: Collection[str], excluded_run: str = "") -> Iterator[StoredResult]:
    """Yield the results of earlier attempts with one of these specs, latest run first, without `excluded_run`."""
    for run in (RunDir(path) for path in latest_runs(parent)[:_MAX_EARLIER_RUNS] if path.name != excluded_run):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            for outcome in json.loads(run.directory.read_whole_file(run.report, _MAX_BYTES))["outcomes"]:
                if outcome["spec_hash"] in spec_hashes:
                    wall_s = float(outcome["timing"]["wall_s"])
                    yield StoredResult(
                        run_id=run.run_id,
                        spec_hash=outcome["spec_hash"],
                        verdict=str(outcome["verdict"]),
                        wall_s=wall_s,
                    )


_MAX_EARLIER_RUNS = 50


def write_document(path: Path, text: str) -> None:
    """Write a document by renaming a temporary file. A full disk frees the run's ballast. Raise OSError on failure."""
    SafeDirectory(path.parent).write(path, text)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line of JSON. Raise OSError, without writing anything, if that fails."""
    SafeDirectory(path.parent).append(path, _json_line(record))


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
