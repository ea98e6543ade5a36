"""Runs the body of one test in several processes under torchrun, and turns their reports into its result."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.core.report import Status
from nsa_harness.errors import HarnessError
from nsa_harness.pytest_plugin import IN_RANK
from nsa_harness.pytest_plugin.in_rank import CALL, OPTIONS, RESULT, options_to_pass
from nsa_harness.pytest_plugin.launching import Answer, Runs
from nsa_harness.texts.words import ranks as ranks_text

_LIMIT_BYTES = 8_000_000  # of the reports of one rank
_JUDGED = (Status.PASS, Status.FAIL)

Reports = Mapping[int, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The arguments of `pytest.mark.ranks`."""

    count: int
    backend: str | None = "gloo"
    locked: str | Path | None = None


def run_on_ranks(item: pytest.Function, marker: pytest.Mark, runs: Runs) -> None:
    """Run the test in each rank. Fail or skip it here, as the ranks did."""
    _run(item, _launch(marker), runs, b"")


def call_on_ranks(item: pytest.Item, launch: Launch, runs: Runs, call: tuple[Any, ...]) -> list[Any]:
    """Call a function in each rank and return its results. `call`: the function, its arguments and its keywords.

    Fails or skips the test, as the ranks did. Raises TypeError if the call cannot be pickled.
    """
    __tracebackhide__ = True
    try:
        pickled = pickle.dumps(call)
    except Exception as error:  # whatever the class of an argument raises
        raise TypeError(
            f"nsa_ranks: the function must be at the top level of a module, and all arguments picklable: {error}"
        ) from None
    return [pickle.loads(result) for result in _run(item, launch, runs, pickled)]


def _run(item: pytest.Item, launch: Launch, runs: Runs, call: bytes) -> list[bytes]:
    """Run the test in each rank, or `call` instead of its body. Return the pickled results of the calls."""
    config = item.config
    with tempfile.TemporaryDirectory(prefix="nsa-harness-test-") as directory:
        words = [
            f"{item.path}::{item.nodeid.partition('::')[2]}",
            "-p", "nsa_harness.pytest_plugin", "-p", IN_RANK,
            *(word for name in config.option.plugins for word in ("-p", name)),
            "-q", "--no-header", "--no-summary", "--runxfail", "-p", "no:cacheprovider", "-o", "addopts=",
            f"--rootdir={config.rootpath}", *([f"-c={config.inipath}"] if config.inipath else ()),
            f"--import-mode={config.getoption('importmode')}", f"--nsa-rank-reports={directory}",
            f"--nsa-backend={launch.backend or ''}",
        ]  # fmt: skip
        Path(directory, OPTIONS).write_text(options_to_pass(config), encoding="utf-8")
        if call:
            Path(directory, CALL).write_bytes(call)
        try:
            spec = runs.script(IN_RANK, words, ranks=launch.count, item=item, module=True)
            answer = runs.run(spec, warm=True, locked=launch.locked and item.path.parent / launch.locked)
        except HarnessError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        ranks = range(launch.count)
        _conclude(answer, {rank: _reports(Path(directory, f"rank{rank}.jsonl"), config) for rank in ranks})
        return [Path(directory, RESULT.format(rank)).read_bytes() for rank in ranks] if call else []


def _launch(marker: pytest.Mark) -> Launch:
    """Return the arguments of the marker. Fail the test if they are wrong."""

    def ranks(count: int, backend: str | None = "gloo", locked: str | Path | None = None) -> Launch:
        return Launch(count=count, backend=backend, locked=locked)

    try:
        launch = ranks(*marker.args, **marker.kwargs)
    except TypeError as error:
        reason = str(error).partition("() ")[2]
        pytest.fail(f"@pytest.mark.ranks: {reason}; expected ranks(count, backend='gloo', locked=None)", pytrace=False)
    if isinstance(launch.count, bool) or not isinstance(launch.count, int) or launch.count < 1:
        pytest.fail(f"@pytest.mark.ranks: expected a number of ranks, got {launch.count!r}", pytrace=False)
    return launch


def _reports(file: Path, config: pytest.Config) -> list[Any]:
    """Return the reports of one rank. A rank that was ended may have left an incomplete last line."""
    try:
        text = file.read_bytes()[:_LIMIT_BYTES].decode(errors="replace")
    except FileNotFoundError:
        return []
    reports = []
    for line in text.split("\n"):
        try:
            reports.append(config.hook.pytest_report_from_serializable(config=config, data=json.loads(line)))
        except ValueError:
            break
    return reports


def _conclude(answer: Answer, reports: Reports) -> None:
    failed = {rank: report for rank, group in reports.items() for report in group[::-1] if report.failed}
    if failed:
        texts = [_failure_text(failed, len(reports))]
        culprit = answer.outcome.culprit
        if answer.outcome.verdict.status not in _JUDGED:
            texts.append(answer.text)
        elif culprit is not None and culprit.ranks and not failed.keys() & {*culprit.ranks}:
            # The ranks that failed are victims, such as of a rank that did not make the same calls and ended.
            texts.append(f"why: {answer.outcome.verdict.summary}")
        pytest.fail("\n".join([*texts, f"report: {answer.path}"]), pytrace=False)
    if answer.outcome.verdict.status is not Status.PASS:
        pytest.fail(answer.text, pytrace=False)
    skipped = {rank: report for rank, group in reports.items() for report in group if report.skipped}
    if len(skipped) == len(reports):
        pytest.skip(_skip_reason(next(iter(skipped.values()))))
    if skipped:
        reason = _skip_reason(next(iter(skipped.values())))
        pytest.fail(f"only {ranks_text(skipped)} skipped the test: {reason}\nreport: {answer.path}", pytrace=False)
    if silent := [rank for rank, group in reports.items() if not any(report.when == "call" for report in group)]:
        pytest.fail(f"{ranks_text(silent)} did not run the test\nreport: {answer.path}", pytrace=False)


def _failure_text(failed: Mapping[int, Any], count: int) -> str:
    """Return what the failed ranks reported, the first failure first. Ranks with the same text share it."""
    in_order = sorted(failed, key=lambda rank: getattr(failed[rank], "stop", 0.0))
    ranks_of: dict[str, list[int]] = {}
    for rank in in_order:
        ranks_of.setdefault(_text(failed[rank]), []).append(rank)
    parts = []
    for text, ranks in ranks_of.items():
        everyone = f"all {count} ranks" if len(ranks) == count > 1 else ranks_text(sorted(ranks))
        parts.append(f"{everyone} failed:\n{text}")
    return "\n".join(parts)


def _text(report: Any) -> str:
    when = "" if getattr(report, "when", "call") == "call" else f"in {report.when}: "
    sections = "".join(f"\n---- {name} ----\n{text.rstrip()}" for name, text in report.sections if text.strip())
    return f"{when}{report.longreprtext}{sections}"


def _skip_reason(report: Any) -> str:
    # pytest's (file, line, reason) has become a list on its way through JSON.
    reason = report.longrepr[2] if isinstance(report.longrepr, list) else report.longrepr
    return str(reason).removeprefix("Skipped: ")
