"""The part of the pytest plugin that runs in each rank: it runs one test, and writes its reports to a file."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import posix
import sys
import threading
from pathlib import Path

import pytest

OPTIONS = "options.json"  # the options of the pytest session that launched this rank
CALL = "call.pickle"  # the function to call instead of the test's body, with its arguments
RESULT = "rank{}.pickle"  # what that function returned
_RESULT_BYTES = 64 << 20
_GROUP = pytest.StashKey[object]()  # the process group that the rank has left
# Options that decide which tests run, how, and what is printed. A rank has its own.
_OWN = (
    "file_or_dir", "plugins", "inifilename", "rootdir", "override_ini", "importmode", "keyword", "markexpr", "maxfail",
    "exitfirst", "numprocesses", "maxprocesses", "dist", "tx", "px", "looponfail", "distload", "rsyncdir", "lf",
    "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset", "cacheshow", "cacheclear", "xmlpath",
    "junitprefix", "usepdb", "usepdb_cls", "trace", "collectonly", "basetemp", "verbose", "reportchars", "durations",
    "timeout", "timeout_method", "version", "help", "pastebin", "setuponly", "setupshow", "setupplan", "deselect",
    "nsa_scenarios", "nsa_out", "nsa_rank_reports", "nsa_backend", "runxfail", "pyargs", "confcutdir",
    "noconftest", "keepduplicates", "traceconfig", "debug", "no_header", "no_summary", "capture",
)  # fmt: skip


def options_to_pass(config: pytest.Config) -> str:
    """Return the options that a project's own plugins and conftest files have added, as JSON."""
    options = {}
    for name, value in vars(config.option).items():
        if name not in _OWN:
            try:
                options[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                continue
    return json.dumps(options)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nsa-harness, in a rank")
    group.addoption("--nsa-rank-reports", help="directory for the reports of this rank")
    group.addoption("--nsa-backend", help="backend of the process group that each rank gets")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    options = Path(config.getoption("--nsa-rank-reports"), OPTIONS)
    vars(config.option).update(json.loads(options.read_text(encoding="utf-8")))
    for name in ("timeout", "faulthandler"):  # the run has a deadline of its own
        if plugin := config.pluginmanager.get_plugin(name):
            config.pluginmanager.unregister(plugin)
    config.pluginmanager.register(_Reports(config), "nsa_rank_reports")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    backend = item.config.getoption("--nsa-backend")
    import torch

    if backend and not torch.distributed.is_initialized():
        if "nccl" in backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(backend)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if _call(config) else ():
        item.fixturenames = []  # type: ignore[attr-defined]  # the test that calls the function has set them up


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call the function of `nsa_ranks` instead of the test's body, and write its result to a file."""
    __tracebackhide__ = True
    if not (call := _call(pyfuncitem.config)):
        return None
    function, args, keywords = pickle.loads(call.read_bytes())
    result = function(*args, **keywords)
    try:
        data = pickle.dumps(result)
        reason = f"has {len(data):,} bytes; the limit is {_RESULT_BYTES:,}" if len(data) > _RESULT_BYTES else ""
    except Exception as error:  # whatever the class of the result raises
        reason = f"cannot be pickled: {error}"
    if reason:
        pytest.fail(f"the result of {function.__qualname__} {reason}", pytrace=False)
    call.with_name(RESULT.format(os.environ["RANK"])).write_bytes(data)
    return True


def _call(config: pytest.Config) -> Path | None:
    file = Path(config.getoption("--nsa-rank-reports"), CALL)
    return file if file.exists() else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    import torch

    if exitstatus == 0 and torch.distributed.is_initialized():  # after a failure, the other ranks may not come
        # A DDP model that is freed later must not be the last owner: it would join the threads of gloo with the GIL
        # held, while one of them may need it (seen with torch 2.13).
        session.config.stash[_GROUP] = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()


class _Reports:
    """Writes each report of this rank as one line of JSON, as soon as pytest has made it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file = Path(config.getoption("--nsa-rank-reports"), f"rank{os.environ['RANK']}.jsonl")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")


def main() -> None:
    """Run pytest and exit without taking the interpreter apart, which in a forked process would copy its memory."""
    status = int(pytest.console_main())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    posix._exit(status)


if __name__ == "__main__":
    main()
