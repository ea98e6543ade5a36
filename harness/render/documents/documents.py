"""The documents of a run: every format by itself, so that a fault of one never loses the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from nsa_harness.core.bisect.question import CountsAs
from nsa_harness.core.bisect.report import BisectReport
from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.report import Report, Trouble
from nsa_harness.render.bisect.bisect_json import bisect_json
from nsa_harness.render.bisect.bisect_md import bisect_md
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.junit import junit_xml
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.supervisor.store.reading import log_lines
from nsa_harness.supervisor.store.rundir import RunDir, write_document

_RANKS_SHOWN = 4  # stacks in BISECT.md
_STACK_LINES, _STACK_COLUMNS = 1000, 4000  # of each, as many as are read


def write_documents(
    run: RunDir, report: Report, playbook: Playbook, search: BisectReport | None = None
) -> tuple[Trouble, ...]:
    """Each document by itself: a fault of one format never loses the others. Returns what could not be written.

    `playbook`: what is asked of the runs of our program.
    `search`: the bisection whose probes the report holds; it has two documents of its own.
    """
    documents: list[tuple[Path, Callable[[], str]]] = [
        (run.report, lambda: to_json(report)),
        (run.summary, lambda: summary_md(report, playbook)),
        (run.junit, lambda: junit_xml(report)),
        (run.html, lambda: report_html(report, playbook, search)),
        (run.missing_params, lambda: _gathered(run, report, "  - MISSING: ")),
        (run.buckets, lambda: _gathered(run, report, "[DDP] ")),
    ]
    if search is not None:
        documents += [
            (run.search, lambda: bisect_json(search)),
            (run.search_summary, lambda: bisect_md(search, _stacks(run, search))),
        ]
    failed = []
    for path, render in documents:
        try:
            write_document(path, render())
        except Exception as error:
            failed.append(Trouble(what=path.name, why=f"{type(error).__name__}: {error}"))
            log_fault(run, f"{path.name} could not be written:\n{traceback.format_exc()}")
    return tuple(failed)


def log_fault(run: RunDir, text: str) -> None:
    """Not through a link or into a pipe: a stored run may come from somebody else."""
    if run.log.is_symlink() or (run.log.exists() and not run.log.is_file()):
        return
    with suppress(OSError), run.log.open("a", encoding="utf-8", errors="backslashreplace") as log:
        log.write(run.redaction.text(text))


def _stacks(run: RunDir, search: BisectReport) -> dict[str, str]:
    """Of the newest failing probe and the newest passing one: where each rank stood, by the name of the file."""
    # By the folders of the run: what somebody else's documents name may lead out of it.
    attempts = {attempt.path.name: attempt for attempt in run.attempts()}
    found: dict[str, str] = {}
    for counts_as in (CountsAs.BAD, CountsAs.GOOD):
        name = next((one.dir for one in reversed(search.probes) if one.counts_as is counts_as and one.dir), None)
        if name in attempts:
            files = sorted(attempts[name].dumps.glob("rank*.txt"))[:_RANKS_SHOWN]
            for path in files:
                found[str(path.relative_to(run.path))] = "".join(islice(log_lines(path, _STACK_COLUMNS), _STACK_LINES))
    return found


def _gathered(run: RunDir, report: Report, what: str) -> str:
    """One line for each trace line of that kind, over all attempts, with the attempt in front."""
    lines: list[str] = []
    for outcome in report.outcomes:
        traces = run.path / outcome.dir / "traces.log"
        if outcome.dir and traces.is_file():
            text = traces.read_text(encoding="utf-8", errors="replace")
            lines += [f"{outcome.dir} {line}" for line in text.splitlines() if what in line]
    return "".join(f"{line}\n" for line in lines)
