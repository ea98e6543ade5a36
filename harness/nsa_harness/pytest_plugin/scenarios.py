"""Collects scenario files as tests: one test for each combination of a scenario's matrix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Status
from nsa_harness.core.schedule import is_as_expected
from nsa_harness.errors import HarnessError
from nsa_harness.pytest_plugin import runs_of
from nsa_harness.pytest_plugin.launching import Answer
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches
from nsa_harness.supervisor.launch.scenario_files import yaml_files

_DIRECTORY = "scenarios"  # where `nsa-harness run` looks for scenarios, too
_NOT_SCENARIOS = ("base", "plans")  # directories of parents, and of plan files


class ScenarioCollector:
    """The hooks that `--nsa-scenarios` adds to pytest."""

    def __init__(self, config: pytest.Config, directory: str) -> None:
        root = Path(config.invocation_params.dir, directory or _DIRECTORY).resolve()
        if not root.is_dir():
            raise pytest.UsageError(f"--nsa-scenarios: no directory {directory or _DIRECTORY}")
        self._files = frozenset(
            file for file in yaml_files(root) if not set(_NOT_SCENARIOS) & set(file.relative_to(root).parts[:-1])
        )
        # Tests that are named on the command line are collected too; without any, only the scenarios are.
        names_tests = config.args_source is pytest.Config.ArgsSource.ARGS
        config.args = [*(config.args if names_tests else ()), str(root)]

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return ScenarioFile.from_parent(parent, path=file_path) if file_path.resolve() in self._files else None


class ScenarioFile(pytest.File):
    """A scenario file. Its tests are the launches that it describes."""

    def collect(self) -> Iterator[pytest.Item]:
        invocation = Invocation(arguments=(str(self.path),), working_dir=Path.cwd(), environ=dict(os.environ))
        try:
            specs = plan_launches(invocation, runs_of(self.config).facts).specs
        except HarnessError as error:
            raise self.CollectError(str(error)) from None
        for spec in specs:
            yield ScenarioItem.from_parent(self, name=spec.scenario, spec=spec)


class ScenarioItem(pytest.Item):
    """One launch of a scenario. It passes if the verdict is the one that the scenario expects."""

    def __init__(self, *, spec: RunSpec | Skip, **more: Any) -> None:
        super().__init__(**more)
        self._spec = spec
        self._answer: Answer | None = None
        for tag in spec.tags:
            name = re.sub(r"\W", "_", tag)
            self.config.addinivalue_line("markers", f"{name}: tag of scenarios of nsa-harness")
            self.add_marker(name)

    def setup(self) -> None:
        """Launch the scenario. A run that nsa-harness could not judge is an error of the test, not a failure."""
        if isinstance(self._spec, Skip):
            pytest.skip(self._spec.reason)
        self._answer = runs_of(self.config).run(self._spec)
        if self._answer.outcome.verdict.status is Status.ERROR:
            pytest.fail(self._answer.text, pytrace=False)

    def runtest(self) -> None:
        assert self._answer is not None
        self.user_properties.append(("nsa_harness_report", str(self._answer.path)))
        if not is_as_expected(self._answer.outcome):
            pytest.fail(self._answer.text, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
