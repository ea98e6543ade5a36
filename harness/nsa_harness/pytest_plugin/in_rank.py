"""The part of the pytest plugin that runs in each rank: it runs one test, and writes its reports to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

OPTIONS = "options.json"  # the options of the pytest session that launched this rank
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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    import torch

    if exitstatus == 0 and torch.distributed.is_initialized():  # after a failure, the other ranks may not come
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
