"""Runs the command line as a user would, in a directory of its own, and checks that nothing outlives a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
COMMAND = [str(Path(sys.executable).parent / "nsa-harness")]
LIMIT_S = 280


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One finished command."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def run_dir(self) -> Path:
        return (self.directory / "reports" / "latest").resolve()

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())

    @property
    def outcome(self) -> dict[str, Any]:
        (outcome,) = self.report["outcomes"]
        return outcome


class Workspace:
    """A directory with its own ./scenarios and ./reports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "scenarios").mkdir()

    def scenario(self, name: str, text: str) -> None:
        (self.directory / "scenarios" / f"{name}.yaml").write_text(text)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """The command as a process, its output in files: nobody has to read a pipe while a test waits."""
        out, err = self.directory / "out.txt", self.directory / "err.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                [*COMMAND, *words],
                cwd=self.directory,
                env={**_clean(os.environ), **environment},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def finished(self, process: subprocess.Popen[str]) -> Ran:
        code = process.wait(timeout=LIMIT_S)
        out, err = (self.directory / "out.txt").read_text(), (self.directory / "err.txt").read_text()
        return Ran(code=code, out=out, err=err, directory=self.directory)

    def harness(self, *words: str, **environment: str) -> Ran:
        return self.finished(self.start(*words, **environment))


def _clean(environment: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("NSA_", "_NSA_"))}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(autouse=True)
def nothing_outlives(tmp_path: Path) -> Iterator[None]:
    """No process of the test's runs, no board in memory."""
    yield
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert left == []
    runs = [path.name for path in (tmp_path / "reports").glob("2*")]
    assert [path for run in runs for path in Path("/dev/shm").glob(f"nsa-harness-{run}-*")] == []


def processes_of(directory: Path) -> list[psutil.Process]:
    """Living processes that a run below `directory` started: they carry its output directory in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            out = process.environ().get("NSA_OUT_DIR", "")
            if out.startswith(str(directory.resolve())) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
