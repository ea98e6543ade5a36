"""The documents of a run: every format by itself, so that a fault of one never loses the others."""

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
from nsa_harness.core.search.question import CountsAs
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
_RANKS_SHOWN = 4  # stacks in BISECT.md
_MAX_ENV_BYTES = 1 << 20
_STACK_LINES, _STACK_COLUMNS = 1000, 4000  # of each, as many as are read


def write_documents(
    run: RunDir, report: Report, playbook: Playbook, search: BisectReport | None = None
) -> tuple[Trouble, ...]:
    """Each document by itself: a fault of one format never loses the others. Returns what could not be written.

    `playbook`: what is asked of the runs of our program.
    `search`: the bisection whose probes the report holds; it has two documents of its own.
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
    """The repository that its programs were started in, as env.json says; empty where none is known."""
    for attempt in run.attempts():
        try:
            said = json.loads(attempt.door.whole(attempt.env, _MAX_ENV_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        git = said.get("git") if isinstance(said, dict) else None
        root = git.get("root") if isinstance(git, dict) else None
        if isinstance(root, str) and root.startswith("/"):
            return escape(root)
    return ""


def log_fault(run: RunDir, text: str) -> None:
    """Where the log can be written at all: a stored run may be read-only, or made by somebody else."""
    with suppress(OSError):
        run.door.append(run.log, run.redaction.text(text))


def _stacks(run: RunDir, search: BisectReport) -> dict[str, str]:
    """Of the newest failing probe and the newest passing one: where each rank stood, by the name of the file."""
    # By the folders of the run: what somebody else's documents name may lead out of it.
    attempts = {attempt.path.name: attempt for attempt in run.attempts()}
    found: dict[str, str] = {}
    for counts_as in (CountsAs.BAD, CountsAs.GOOD):
        name = next((one.dir for one in reversed(search.probes) if one.counts_as is counts_as and one.dir), None)
        if name in attempts:
            for path in run.door.files(attempts[name].dumps, "rank*.txt")[:_RANKS_SHOWN]:
                lines = run.door.text_lines(path, _STACK_COLUMNS)
                found[str(path.relative_to(run.path))] = "".join(islice(lines, _STACK_LINES))
    return found


_MISSING, _BUCKET = "  - MISSING: ", "[DDP] "


def _gathered_files(run: RunDir, report: Report) -> Iterator[Artifact]:
    """What is made of all attempts together. They are written also where there is nothing to gather: that is said."""
    traced = any(outcome.missing_gradients is not None for outcome in report.outcomes)
    none_missing = "no gradient was missing" if traced else "no run traced its gradients (trace.grads)"
    for path, what, nothing in (
        (run.missing_params, _MISSING, none_missing),
        (run.buckets, _BUCKET, "no run traced the buckets of DDP (trace.buckets)"),
    ):
        count = sum(1 for _ in islice(_gathered_lines(run, report, what), _MAX_GATHERED))
        yield Artifact(path=path.name, count=count, absent=None if count else nothing)


def _gathered(run: RunDir, report: Report, what: str) -> str:
    """One line for each trace line of that kind, over all attempts, with the attempt in front."""
    return "".join(islice(_gathered_lines(run, report, what), _MAX_GATHERED))


def _gathered_lines(run: RunDir, report: Report, what: str) -> Iterator[str]:
    for outcome in report.outcomes:
        lines = run.door.text_lines(run.path / outcome.dir / "traces.log", _TRACE_COLUMNS) if outcome.dir else ()
        yield from (f"{outcome.dir} {line.rstrip()}\n" for line in lines if what in line)
