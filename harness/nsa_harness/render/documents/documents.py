"""The documents of a run. Each format is written on its own, so that an error in one does not lose the others."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nsa_harness.core.comparison.decisions import Playbook
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
from nsa_harness.supervisor.storage.rundir import RunDir

_TRACE_COLUMNS, _MAX_GATHERED = 4000, 100_000  # of a line; lines of one document
_MAX_RANKS = 4  # with stacks in BISECT.md
_MAX_ENV_BYTES = 1 << 20
_STACK_LINES, _STACK_COLUMNS = 1000, 4000  # read from each stack file


def write_documents(
    run: RunDir, report: Report, playbook: Playbook, search: BisectReport | None = None
) -> tuple[Trouble, ...]:
    """Write each document. Return the documents that could not be written, with the reasons.

    `playbook`: the questions about runs of nsa-harness's own program.
    `search`: the bisection whose probes are in the report; it adds two documents.
    """
    report = replace(report, files=tuple(_gathered_files(run, report)))
    documents: list[tuple[Path, Callable[[], str]]] = [
        (run.report, lambda: to_json(report, playbook)),
        (run.summary, lambda: summary_md(report, playbook)),
        (run.junit, lambda: junit_xml(report)),
        (run.sarif, lambda: sarif(report, _checkout(run))),
        (run.html, lambda: report_html(report, playbook, search)),
        (run.missing_params, lambda: _gathered(run, report, _MISSING)),
        (run.buckets, lambda: _gathered(run, report, _BUCKET)),
    ]
    if search is not None:
        documents += [
            (run.search, lambda: bisect_json(search)),
            (run.search_summary, lambda: bisect_md(search, _stacks(run, search))),
        ]
    failed = []
    for path, render in documents:
        try:
            run.door.write(path, render())
        except Exception as error:
            failed.append(Trouble(what=path.name, why=f"{type(error).__name__}: {error}"))
            log_fault(run, f"{path.name} could not be written:\n{traceback.format_exc()}")
    return tuple(failed)


def _checkout(run: RunDir) -> str:
    """Return the repository in which the programs were started, from env.json, or "" if it is not known."""
    for attempt in run.attempts():
        try:
            stored = json.loads(attempt.door.whole(attempt.env, _MAX_ENV_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        git = stored.get("git") if isinstance(stored, dict) else None
        root = git.get("root") if isinstance(git, dict) else None
        if isinstance(root, str) and root.startswith("/"):
            return escape(root)
    return ""


def log_fault(run: RunDir, text: str) -> None:
    """Append to the run's log if it is writable: a stored run may be read-only or belong to another user."""
    with suppress(OSError):
        run.door.append(run.log, run.redaction.text(text))


def _stacks(run: RunDir, search: BisectReport) -> dict[str, str]:
    """Return the stack files of the latest failing and the latest passing probe, by name."""
    # Only directories of the run: a name in a foreign document may lead out of it.
    attempts = {attempt.path.name: attempt for attempt in run.attempts()}
    stacks: dict[str, str] = {}
    for counts_as in (ProbeResult.BAD, ProbeResult.GOOD):
        name = next((one.dir for one in reversed(search.probes) if one.counts_as is counts_as and one.dir), None)
        if name in attempts:
            for path in run.door.files(attempts[name].dumps, "rank*.txt")[:_MAX_RANKS]:
                lines = run.door.text_lines(path, _STACK_COLUMNS)
                stacks[str(path.relative_to(run.path))] = "".join(islice(lines, _STACK_LINES))
    return stacks


_MISSING, _BUCKET = "  - MISSING: ", "[DDP] "


def _gathered_files(run: RunDir, report: Report) -> Iterator[Artifact]:
    """Yield the files made of all attempts together. An empty one is written too, with the reason."""
    traced = any(outcome.missing_gradients is not None for outcome in report.outcomes)
    none_missing = "no gradient was missing" if traced else "no run traced its gradients (trace.grads)"
    for path, marker, reason in (
        (run.missing_params, _MISSING, none_missing),
        (run.buckets, _BUCKET, "no run traced the buckets of DDP (trace.buckets)"),
    ):
        count = sum(1 for _ in islice(_gathered_lines(run, report, marker), _MAX_GATHERED))
        yield Artifact(path=path.name, count=count, absent=None if count else reason)


def _gathered(run: RunDir, report: Report, marker: str) -> str:
    """Return the trace lines with this marker of all attempts, each after the name of its attempt."""
    return "".join(islice(_gathered_lines(run, report, marker), _MAX_GATHERED))


def _gathered_lines(run: RunDir, report: Report, marker: str) -> Iterator[str]:
    for outcome in report.outcomes:
        lines = run.door.text_lines(run.path / outcome.dir / "traces.log", _TRACE_COLUMNS) if outcome.dir else ()
        yield from (f"{outcome.dir} {line.rstrip()}\n" for line in lines if marker in line)
