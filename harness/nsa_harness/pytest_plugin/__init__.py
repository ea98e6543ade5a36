"""The pytest plugin: tests that run on every rank, scenarios as tests, and runs of a script from a test.

Nothing of nsa-harness is imported until a test needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nsa_harness.core.report import Outcome
    from nsa_harness.pytest_plugin.launching import Runs

IN_RANK = "nsa_harness.pytest_plugin.in_rank"
_MARKER = (
    'ranks(count, backend="gloo", locked=None): run the body of the test in `count` processes under torchrun.'
    " nsa-harness judges the run: a hang fails the test, with its cause, rank and line. `locked`: a comm.lock file."
)
_runs = pytest.StashKey["Runs"]()
_test = pytest.StashKey[pytest.Item]()  # the test that is in progress


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nsa-harness")
    group.addoption(
        "--nsa-scenarios",
        nargs="?",
        const="",
        metavar="DIR",
        help="run the scenario files below DIR as tests (default: scenarios)",
    )
    group.addoption("--nsa-out", metavar="DIR", help="directory for the reports of runs (default: pytest's own)")
    group.addoption(
        "--nsa-lock", action="store_true", help="write the comm.lock files of tests with `locked` instead of comparing"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    directory = config.getoption("--nsa-scenarios", None)
    if directory is not None:
        from nsa_harness.pytest_plugin.scenarios import ScenarioCollector

        config.pluginmanager.register(ScenarioCollector(config, directory), "nsa_scenarios")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _runs in config.stash:
        config.stash[_runs].close()


def runs_of(config: pytest.Config) -> Runs:
    """Return the object that launches runs for this pytest session. It is created when the first run needs it."""
    if _runs not in config.stash:
        from nsa_harness.pytest_plugin.launching import Runs

        config.stash[_runs] = Runs(config)
    return config.stash[_runs]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_rank(config):
        return
    for item in items:
        if item.get_closest_marker("ranks") is not None and isinstance(item, pytest.Function):
            item.fixturenames = []  # the fixtures of the test are set up in each rank, not here


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_test] = item


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None or _is_rank(pyfuncitem.config):
        return None
    from nsa_harness.pytest_plugin.ranks import run_on_ranks

    run_on_ranks(pyfuncitem, marker, runs_of(pyfuncitem.config))
    return True


def _is_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin(IN_RANK)


@pytest.fixture(scope="session")
def nsa_run(pytestconfig: pytest.Config) -> Callable[..., Outcome]:
    """Run a script under torchrun and return its Outcome: `nsa_run("train.py", "--steps", "2", ranks=2)`.

    The paths of the script and of `locked` start at the working directory or, if the script is not there, at pytest's
    rootdir. `ranks`: by default those of pyproject.toml, or 2. `locked`: the comm.lock file with which the run is
    compared. `warm`: fork the ranks from a process that has imported torch, if that is safe for the script. Settings
    are keywords with `__` for a dot, such as `limits__stall_s=20`. A run that fails or hangs raises nothing; compare
    `outcome.verdict.status`. If the test then fails, its text contains the answer of nsa-harness.
    """

    def run(
        script: str | Path,
        *args: str,
        ranks: int | None = None,
        locked: str | Path | None = None,
        warm: bool = False,
        **settings: Any,
    ) -> Outcome:
        __tracebackhide__ = True  # an argument that is wrong is shown at the line of the test
        from nsa_harness.errors import HarnessError

        words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        directory = Path.cwd() if Path(script).is_file() else pytestconfig.rootpath
        runs, item = runs_of(pytestconfig), pytestconfig.stash[_test]
        try:
            spec = runs.script(script, args, ranks=ranks, settings=words, item=item, directory=directory)
            answer = runs.run(spec, warm=warm, locked=None if locked is None else directory / locked)
        except HarnessError as error:
            raise error.with_traceback(None) from None
        item.add_report_section("call", "nsa-harness", answer.text)
        return answer.outcome

    return run


@pytest.fixture(scope="session")
def nsa_ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """Call a function on every rank and return the list of its results: `nsa_ranks(mean_loss, 8, ranks=2)`.

    `ranks`, `backend` and `locked` are those of `pytest.mark.ranks`. All other arguments are passed to the function.
    The function must be at the top level of a module; its arguments and results are pickled. If it raises, skips or
    hangs on a rank, the test ends as a test with `pytest.mark.ranks` does. Raises TypeError if the function or an
    argument cannot be pickled.
    """

    def call(
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        backend: str | None = "gloo",
        locked: str | Path | None = None,
        **keywords: Any,
    ) -> list[Any]:
        __tracebackhide__ = True
        from nsa_harness.pytest_plugin.ranks import Launch, call_on_ranks

        launch = Launch(count=ranks, backend=backend, locked=locked)
        return call_on_ranks(pytestconfig.stash[_test], launch, runs_of(pytestconfig), (function, args, keywords))

    return call
