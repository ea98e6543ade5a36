"""Launches runs for a pytest session."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from _pytest.config import default_plugins
from filelock import FileLock, Timeout

from nsa_harness import __version__
from nsa_harness.commands.api import default_ranks, options_of_project, run_in_own_directory
from nsa_harness.core.plan import Launcher, RunSpec, Skip
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.schedule import is_as_expected
from nsa_harness.render.terminal.screen import explaining_command
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.comm_lock import with_large_recorder
from nsa_harness.supervisor.storage.rundir import RunDir

_JUDGING_S = 15.0  # reserved for stacks, proof and report before pytest-timeout ends the test
_JUDGING_SHARE = 0.3  # of a short timeout
_MORE_S = 60.0  # added to pytest-timeout's limit while a run is in progress
_REPORTING_S = 5.0  # the least that a test keeps to report the answer of a run
_LEASE_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A run that has ended: its outcome, what `nsa-harness run` would print, and where its report is."""

    outcome: Outcome
    text: str
    path: Path


class Runs:
    """Launches the runs of one pytest session, from a process that has already imported torch where possible."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.facts = machine_facts()
        self.server = ForkServer(preload=("pytest", *(f"_pytest.{name}" for name in default_plugins)))
        end_dead_runs()

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def script(
        self,
        file: str | os.PathLike[str],
        args: Sequence[str],
        *,
        ranks: int | None,
        item: pytest.Item,
        settings: Sequence[str] = (),
        module: bool = False,
        directory: Path | None = None,
    ) -> RunSpec:
        """Return the launch of a program, named after the test, with a deadline before pytest-timeout's.

        `ranks`: None takes those of the project's settings, or 2. `directory`: the working directory of the program, if
        it is not that of pytest. Skips the test if this machine lacks what it needs. Raises UsageError if an argument
        is wrong.
        """
        directory = directory or Path.cwd()
        program = Script(
            file=os.fspath(file),
            ranks=default_ranks(directory) if ranks is None else ranks,
            args=tuple(args),
            module=module,
        )
        timeout = timeout_s(item)
        if timeout is not None and not any(word.startswith("limits.deadline_s=") for word in settings):
            reserve = min(_JUDGING_S, timeout * _JUDGING_SHARE)
            settings = (*settings, f"limits.deadline_s={timeout - reserve:.3f}")
        invocation = Invocation(
            arguments=tuple(settings), script=program, working_dir=directory, environ=dict(os.environ)
        )
        (spec,) = plan_launches(invocation, self.facts).specs
        if isinstance(spec, Skip):
            pytest.skip(spec.reason)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", item.name).strip("_.-")[:80] or "test"
        env = (*spec.env, ("PYTEST_ADDOPTS", ""))  # the options of this session are not those of a rank
        if directory != Path.cwd():
            spec = replace(spec, cwd=str(directory / (spec.cwd or "")))
        return replace(spec, scenario=name, about=item.nodeid, subject=item.nodeid, env=env)

    def run(
        self,
        spec: RunSpec,
        *,
        warm: bool = False,
        locked: str | os.PathLike[str] | None = None,
        out: Path | None = None,
    ) -> Answer:
        """Launch one run and wait for its end. Raise KeyboardInterrupt after Ctrl-C.

        `warm`: fork the ranks from a process that has imported torch, if that is safe for this program. `locked`: the
        comm.lock file with which the run is compared, or which is written with --nsa-lock. `out`: the parent of the
        run's directory, if it is not that of `--nsa-out`.
        """
        if locked is not None:
            from nsa_harness.commands.run import locked as with_lock
            from nsa_harness.commands.run import write_lock

            is_written = self._config.getoption("--nsa-lock")
            spec = with_large_recorder(spec) if is_written else with_lock(spec, Path(locked), "pytest --nsa-lock")
        # A variable that differs from test to test would need a fork server of its own for each.
        os.environ.pop("PYTEST_CURRENT_TEST", None)  # pytest sets it again before it next reads it
        if warm:
            spec = self.server.with_launcher(replace(spec, launcher=Launcher.FORK))
        options = options_of_project(command=f"pytest {spec.about}", out=out or self._out())
        with _longer_timeout(), ExitStack() as stack:
            devices = self._lease(spec, stack)
            outcome, path = run_in_own_directory(spec, options, facts=self.facts, devices=devices, server=self.server)
        if locked is not None and is_written and outcome.verdict.status is Status.PASS:
            was_written, lines = write_lock(RunDir(path).attempt(outcome.dir), spec.ranks, Path(locked))
            if not was_written:
                pytest.fail("\n".join(lines), pytrace=False)
        text = _answer(outcome, path)
        if not is_as_expected(outcome):
            # The files of a forked rank's test are gone, so it cannot be launched again.
            text += f"\n  next      {explaining_command(outcome, path, None if warm else path)}"
        return Answer(outcome=outcome, text=f"{text}\n  report    {path}", path=path)

    def _out(self) -> Path:
        directory = self._config.getoption("--nsa-out", None)
        if directory:
            return Path(self._config.invocation_params.dir, directory)
        return self._shared() / "nsa-harness"

    def _shared(self) -> Path:
        """Return the temporary directory of this pytest session, which the workers of pytest-xdist share."""
        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        base = factory.getbasetemp()
        return base.parent if hasattr(self._config, "workerinput") else base

    def _lease(self, spec: RunSpec, stack: ExitStack) -> tuple[int, ...] | None:
        """Reserve one GPU for each rank until the run has ended, among the workers of pytest-xdist.

        Returns None for a run without GPUs, or if only this process launches runs.
        """
        if spec.device != "cuda" or not hasattr(self._config, "workerinput"):
            return None
        # One worker at a time collects its GPUs, so that two workers never each hold half of what they need.
        with FileLock(self._shared() / "nsa-gpus.lock"):
            devices: list[int] = []
            while True:
                for number in range(len(self.facts.gpus)):
                    lock = FileLock(self._shared() / f"nsa-gpu{number}.lock")
                    if number in devices or len(devices) == spec.ranks:
                        continue
                    try:
                        lock.acquire(timeout=_LEASE_POLL_S)
                    except Timeout:
                        continue
                    stack.callback(lock.release)
                    devices.append(number)
                if len(devices) == spec.ranks:
                    return tuple(sorted(devices))


@contextmanager
def _longer_timeout() -> Iterator[None]:
    """Let pytest-timeout fire later during a run, so that it does not interrupt the judgement.

    The deadline of the run comes before pytest-timeout's limit, but judging takes long on a busy machine.
    """
    left_s, began_s = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    if left_s:
        signal.setitimer(signal.ITIMER_REAL, left_s + _MORE_S)
    try:
        yield
    finally:
        if left_s:
            left_s -= time.monotonic() - began_s
            signal.setitimer(signal.ITIMER_REAL, max(left_s, _REPORTING_S))


def _answer(outcome: Outcome, path: Path) -> str:
    """Return what `nsa-harness run` prints about an outcome."""
    screen = io.StringIO()
    terminal = Terminal(screen, version=__version__, playbook=PLAYBOOK, environ={"NO_COLOR": "1"}, verbose=False)
    terminal.on_outcome(outcome, path)
    terminal.close()
    return screen.getvalue().strip()


def timeout_s(item: pytest.Item) -> float | None:
    """Return the time limit that pytest-timeout sets for a test, in seconds, or None if there is none."""
    config = item.config
    if not config.pluginmanager.hasplugin("timeout"):
        return None
    marker = item.get_closest_marker("timeout")
    value = (marker.args[0] if marker.args else marker.kwargs.get("timeout")) if marker is not None else None
    if value is None:
        value = config.getoption("timeout", None)
    if value is None:
        value = config.getini("timeout")
    try:
        return float(value) or None  # 0 means no limit
    except (TypeError, ValueError):
        return None
