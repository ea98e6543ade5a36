"""An index of all stored runs in a directory, so that a question about hundreds of runs takes less than a second.

The index is a SQLite file next to the runs. It can be deleted at any time: the runs remain the truth, and it is built
again from their reports.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_harness.core.comparison.history import RANK_STEP, Entry
from nsa_harness.supervisor.storage.rundir import RunDir, latest_runs
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

INDEX = ".history.sqlite"
_LAYOUT = 2  # of the index, and of what is read from a report
DAMAGES = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)  # raised for a damaged report
MAX_BYTES = 64 << 20
_MOST = 10**18  # no run has a larger number; a report that was changed by hand may
_TABLES = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, stamp TEXT NOT NULL, problem TEXT);
CREATE TABLE entries (
    run_id TEXT NOT NULL, number INTEGER NOT NULL, directory TEXT, scenario TEXT, spec_hash TEXT, verdict TEXT,
    cause TEXT, expected INTEGER, summary TEXT, numbers TEXT, surroundings TEXT, PRIMARY KEY (run_id, number)
);
CREATE INDEX by_scenario ON entries (scenario, run_id);
"""
# Name of a quantity -> where report.json has it.
_NUMBERS = {
    "step": ("detail", "metrics", "step_s_median"),
    "tokens per second": ("usage", "tokens_per_s"),
    "wall time": ("timing", "wall_s"),
    "memory per rank": ("usage", "peak_rss_bytes"),
    "GPU memory per rank": ("usage", "peak_gpu_bytes"),
    "first loss": ("detail", "metrics", "loss_first"),
    "last loss": ("detail", "metrics", "loss_last"),
}


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A run whose report cannot be read, and why."""

    run_id: str
    reason: str


class History:
    """The attempts of all stored runs below one directory.

    Opening it brings the index up to date: only new and changed reports are read. If the directory cannot be written,
    the index is kept in memory.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._connection = self._open()
        self._update()

    def close(self) -> None:
        self._connection.close()

    def entries(self, scenario: str | None = None) -> tuple[Entry, ...]:
        """Return the attempts of all scenarios, or of one, the oldest first."""
        where, values = ("WHERE scenario = ?", (scenario,)) if scenario is not None else ("", ())
        rows = self._connection.execute(
            "SELECT run_id, directory, scenario, spec_hash, verdict, cause, expected, summary, numbers, surroundings"
            f" FROM entries {where} ORDER BY run_id, number",
            values,
        )
        return tuple(
            Entry(
                run_id=row[0], directory=row[1], scenario=row[2], spec_hash=row[3], verdict=row[4], cause=row[5],
                expected=bool(row[6]), summary=row[7], numbers=json.loads(row[8]), surroundings=json.loads(row[9]),
            )
            for row in rows
        )  # fmt: skip

    def unreadable(self) -> tuple[Unreadable, ...]:
        """Return the runs whose report cannot be read."""
        rows = self._connection.execute("SELECT run_id, problem FROM runs WHERE problem IS NOT NULL ORDER BY run_id")
        return tuple(Unreadable(run_id=run_id, reason=reason) for run_id, reason in rows)

    def _open(self) -> sqlite3.Connection:
        file = self._parent / INDEX
        for path in (file, file, ":memory:"):
            try:
                connection = sqlite3.connect(path, timeout=10.0)
                if connection.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT:
                    with closing(connection.cursor()) as cursor:
                        cursor.executescript(
                            "DROP TABLE IF EXISTS runs; DROP TABLE IF EXISTS entries;"
                            f"{_TABLES} PRAGMA user_version = {_LAYOUT};"
                        )
                connection.execute("SELECT count(*) FROM entries").fetchone()
                return connection
            except sqlite3.Error:  # damaged, locked, or in a directory that cannot be written
                with suppress(OSError):
                    if not _is_locked(file):
                        file.unlink(missing_ok=True)
        raise AssertionError("SQLite cannot open a database in memory")

    def _update(self) -> None:
        known = dict(self._connection.execute("SELECT run_id, stamp FROM runs"))
        present = {path.name: path for path in latest_runs(self._parent)}
        with self._connection:
            for run_id in set(known) - set(present):
                self._forget(run_id)
            for run_id, path in present.items():
                stamp = _stamp(RunDir(path).report)
                if known.get(run_id) != stamp:
                    self._forget(run_id)
                    self._add(run_id, path, stamp)

    def _forget(self, run_id: str) -> None:
        for table in ("runs", "entries"):
            self._connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))

    def _add(self, run_id: str, path: Path, stamp: str) -> None:
        problem = None
        try:
            rows = entries_of(path)
        except FileNotFoundError:
            rows, problem = (), "no report; it is still running, or was ended before it was judged"
        except DAMAGES as error:
            rows, problem = (), f"{type(error).__name__}: {error}"
        self._connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (run_id, stamp, problem))
        self._connection.executemany(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    run_id, number, row.directory, row.scenario, row.spec_hash, row.verdict, row.cause, row.expected,
                    row.summary, json.dumps(dict(row.numbers)), json.dumps(dict(row.surroundings)),
                )
                for number, row in enumerate(rows)
            ],
        )  # fmt: skip


def _is_locked(file: Path) -> bool:
    """Return whether another process is using the index."""
    try:
        with closing(sqlite3.connect(file, timeout=0.0)) as connection:
            connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError as error:
        return "locked" in str(error)
    except sqlite3.Error:
        return False
    return False


def _stamp(report: Path) -> str:
    """Return a text that changes when the report does."""
    try:
        state = report.stat()
    except OSError:
        return ""
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"


def entries_of(path: Path) -> tuple[Entry, ...]:
    """Return the attempts in the stored run at `path`, without diagnostic reruns.

    If the report is damaged, the exception is one of `DAMAGES`.
    """
    run = RunDir(path)
    report = json.loads(run.directory.read_whole_file(run.report, MAX_BYTES))
    outcomes = [one for one in report["outcomes"] if one["final"] or not one["detail"].get("deepening")]
    return tuple(
        Entry(
            run_id=path.name,
            directory=str(outcome["dir"]),
            scenario=str(outcome["scenario"]),
            spec_hash=str(outcome["spec_hash"]),
            summary=str(outcome["summary"]),
            numbers=dict(_numbers(outcome)),
            surroundings=_surroundings(run.directory, path / str(outcome["dir"]), report),
            **_own_ending(outcome, outcomes),
        )
        for outcome in outcomes
    )


def _own_ending(outcome: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how an attempt ended. The last attempt of a flaky scenario stores the verdict on all attempts instead.

    This attempt ended as expected if another one with its own verdict did, or if no attempt with another verdict did.
    """
    own = outcome["detail"].get("own_status")
    if own is None:
        verdict, expected, cause = outcome["verdict"], outcome["expected"], outcome["cause"]
    else:
        others = [other for other in outcomes if other["scenario"] == outcome["scenario"] and other is not outcome]
        alike = [other["expected"] for other in others if other["verdict"] == own]
        verdict, expected, cause = own, alike[0] if alike else not any(other["expected"] for other in others), None
    return {"verdict": str(verdict), "expected": bool(expected), "cause": cause and str(cause)}


def _numbers(outcome: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an attempt, by the names of `QUANTITIES`."""
    for name, keys in _NUMBERS.items():
        if (value := _number(outcome, keys)) is not None:
            yield name, value
    steps = [step for row in outcome["detail"].get("vitals") or () if (step := _number(row, ("step_s",))) is not None]
    if steps and _number(outcome, _NUMBERS["step"]) is None:
        yield RANK_STEP, max(steps)


def _number(outcome: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    value: Any = outcome
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None  # also false for NaN


def _surroundings(directory: SafeDirectory, attempt: Path, report: Mapping[str, Any]) -> dict[str, str]:
    """Return the host, versions, commit and environment of an attempt, each as a short text."""
    found = {"host": str(report["machine"]["host"])}
    try:
        facts = json.loads(directory.read_whole_file(attempt / "env.json", MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return found
    python, git = facts.get("python") or {}, facts.get("git") or {}
    found["python"] = str(python.get("version"))
    found |= {f"package {name}": str(version) for name, version in (facts.get("packages") or {}).items() if version}
    if git.get("commit"):
        found["commit"] = str(git["commit"])[:12] + (" with changes" if git.get("dirty") else "")
    for group in (facts.get("environment") or {}).values():
        found |= {f"variable {name}": str(value) for name, value in group.items()}
    return found
