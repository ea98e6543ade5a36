"""Runs the command line as a user would, in a directory of its own, and checks that nothing outlives a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.pytest_plugin import runs_of
from nsa_harness.pytest_plugin.launching import Answer, Runs
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import SPEC

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

    def outcome_of(self, name: str, text: str) -> dict[str, Any]:
        """Of a scenario that the command runs, as report.json has it."""
        self.scenario(name, text)
        return self.harness("run", name).outcome

    def outcome_of_script(self, file: Path, ranks: int, *words: str) -> dict[str, Any]:
        return self.harness("run", "--script", str(file), "--ranks", str(ranks), "--", *words).outcome


def forget_the_test() -> None:
    """pytest keeps the test's name in the environment, and each environment has a fork server of its own."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


class Undisturbed:
    """Nobody interrupts."""

    count = 0

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()


class Forks:
    """What a workspace does, with ranks forked from one server: where neither torchrun nor the command is the claim."""

    def __init__(self, directory: Path, runs: Runs) -> None:
        self._directory = directory
        self._runs = runs

    def outcome_of(self, name: str, text: str) -> dict[str, Any]:
        file = self._directory / f"{name}.yaml"
        file.write_text(text)
        return outcome_values(self.run(str(file)).outcome)

    def outcome_of_script(self, file: Path, ranks: int, *words: str) -> dict[str, Any]:
        return outcome_values(self.run(script=Script(file=str(file), ranks=ranks, args=words)).outcome)

    def run(
        self,
        *words: str,
        script: Script | None = None,
        change: Callable[[RunSpec], RunSpec] = lambda spec: spec,
        locked: Path | None = None,
    ) -> Answer:
        invocation = Invocation(arguments=words, script=script, working_dir=self._directory, environ={})
        (spec,) = plan_launches(invocation, self._runs.facts).specs
        assert isinstance(spec, RunSpec)
        answer = self._runs.run(change(spec), warm=True, locked=locked, out=self._directory / "reports")
        assert load_spec(answer.path / answer.outcome.dir / SPEC).launcher is Launcher.FORK, answer.outcome.spec.notes
        return answer


def _clean(environment: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("NSA_", "_NSA_"))}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> ForkServer:
    """Imports torch once, for all who fork."""
    return runs_of(pytestconfig).server


@pytest.fixture
def forks(tmp_path: Path, pytestconfig: pytest.Config) -> Forks:
    return Forks(tmp_path, runs_of(pytestconfig))


@pytest.fixture
def launcher(request: pytest.FixtureRequest) -> Workspace | Forks:
    """Quick tests fork, from a server that has imported torch; slow ones start the command, and that torchrun."""
    slow = request.node.get_closest_marker("slow") is not None
    launcher: Workspace | Forks = request.getfixturevalue("workspace" if slow else "forks")
    return launcher


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
