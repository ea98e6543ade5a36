"""Write the output files of a run. If one document cannot be written, the others still are."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.report import Artifact, Report, Trouble
from nsa_harness.core.search.question import ProbeResult
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.documents.case_reports import junit_xml
from nsa_harness.render.documents.code_hosts import sarif
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.experiments.bisect_json import bisect_json
from nsa_harness.render.experiments.bisect_md import bisect_md
from nsa_harness.render.text import escape
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.supervisor.storage.rundir import RunDir

_TRACE_COLUMNS = 4000  # characters of a line of traces.log that are read
_MAX_COLLECTED = 100_000  # maximum number of lines in a document that collects lines from all attempts
_MAX_RANKS = 4  # number of ranks whose stacks are shown in BISECT.md
_MAX_ENV_BYTES = 1 << 20
_STACK_LINES, _STACK_COLUMNS = 1000, 4000  # lines of a stack file and characters of a line that are read


def write_documents(
    run: RunDir,
    report: Report,
    playbook: Playbook,
    search: BisectReport | None = None,
    claim: LedgerLine | None = None,
    why: WhyReport | None = None,
) -> tuple[Trouble, ...]:
    """Write a run's output files, with the answer for which it was launched. Return an error for each failed file."""
    report = replace(report, files=tuple(_collected_files(run, report)))
    documents: list[tuple[Path, Callable[[], str]]] = [
        # SUMMARY.md is first, because on a full disk the last ones are lost.
        (run.summary, lambda: summary_md(report, playbook, claim, why)),
        (run.report, lambda: to_json(report, playbook, why)),
        (run.junit, lambda: junit_xml(report)),
        (run.sarif, lambda: sarif(report, _checkout(run))),
        (run.html, lambda: report_html(report, playbook, search, claim, why)),
        (run.missing_params, lambda: _collected_text(run, report, _MISSING)),
        (run.buckets, lambda: _collected_text(run, report, _BUCKET)),
    ]
    if search is not None:
        documents += [
            (run.search, lambda: bisect_json(search)),
            (run.search_summary, lambda: bisect_md(search, _stacks(run, search))),
        ]
    failures = []
    for path, render in documents:
        try:
            run.directory.write(path, render())
        except Exception as error:
            failures.append(Trouble(what=path.name, why=f"{type(error).__name__}: {error}"))
            log_fault(run, f"{path.name} could not be written:\n{traceback.format_exc()}")
    return tuple(failures)


def _checkout(run: RunDir) -> str:
    """Return the Git repository in which the programs were started, or "" if it is unknown."""
    for attempt in run.attempts():
        try:
            environment = json.loads(attempt.directory.read_whole_file(attempt.env, _MAX_ENV_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        git = environment.get("git") if isinstance(environment, dict) else None
        root = git.get("root") if isinstance(git, dict) else None
        if isinstance(root, str) and root.startswith("/"):
            return escape(root)
    return ""


def log_fault(run: RunDir, text: str) -> None:
    """Append `text` to the run's log if the log is writable."""
    with suppress(OSError):
        run.directory.append(run.log, run.redaction.text(text))


def _stacks(run: RunDir, search: BisectReport) -> dict[str, str]:
    """Map the path of each stack file to its text, for the last failing and the last passing test run."""
    # A stored bisection may come from somebody else, so only names of the run's own attempts are followed.
    attempts = {attempt.path.name: attempt for attempt in run.attempts()}
    stacks: dict[str, str] = {}
    for counts_as in (ProbeResult.BAD, ProbeResult.GOOD):
        probes = (probe for probe in reversed(search.probes) if probe.counts_as is counts_as and probe.dir)
        name = next((probe.dir for probe in probes), None)
        if name in attempts:
            for path in run.directory.list_files(attempts[name].dumps, "rank*.txt")[:_MAX_RANKS]:
                lines = run.directory.read_lines(path, _STACK_COLUMNS)
                stacks[str(path.relative_to(run.path))] = "".join(islice(lines, _STACK_LINES))
    return stacks


_MISSING, _BUCKET = "  - MISSING: ", "[DDP] "


def _collected_files(run: RunDir, report: Report) -> Iterator[Artifact]:
    """Yield the output files that contain selected log lines from all attempts."""
    has_gradient_trace = any(outcome.missing_gradients is not None for outcome in report.outcomes)
    none_missing = "no gradient was missing" if has_gradient_trace else "no run traced its gradients (trace.grads)"
    for path, marker, reason in (
        (run.missing_params, _MISSING, none_missing),
        (run.buckets, _BUCKET, "no run traced DDP's buckets (trace.buckets)"),
    ):
        count = sum(1 for _ in islice(_collected_lines(run, report, marker), _MAX_COLLECTED))
        yield Artifact(path=path.name, count=count, absent=None if count else reason)


def _collected_text(run: RunDir, report: Report, marker: str) -> str:
    """Return the log lines of all attempts that contain `marker`."""
    return "".join(islice(_collected_lines(run, report, marker), _MAX_COLLECTED))


def _collected_lines(run: RunDir, report: Report, marker: str) -> Iterator[str]:
    for outcome in report.outcomes:
        lines = run.directory.read_lines(run.path / outcome.dir / "traces.log", _TRACE_COLUMNS) if outcome.dir else ()
        yield from (f"{outcome.dir} {line.rstrip()}\n" for line in lines if marker in line)
