"""The documents of a run: every format by itself, so that a fault of one never loses the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.core.bisect.told import BisectTold
from harness.core.report import Report
from harness.core.trouble import Trouble
from harness.render.html import report_html
from harness.render.junit import junit_xml
from harness.render.report_json import to_json
from harness.render.summary_md import summary_md
from harness.supervisor.stored.rundir import RunDir, write_document


def write_documents(run: RunDir, report: Report, search: BisectTold | None = None) -> tuple[Trouble, ...]:
    """Each document by itself: a fault of one format never loses the others. Returns what could not be written.

    `search`: the bisection whose probes the report holds.
    """
    documents: tuple[tuple[Path, Callable[[], str]], ...] = (
        (run.report, lambda: to_json(report)),
        (run.summary, lambda: summary_md(report)),
        (run.junit, lambda: junit_xml(report)),
        (run.html, lambda: report_html(report, search)),
        (run.missing_params, lambda: _gathered(run, report, "  - MISSING: ")),
        (run.buckets, lambda: _gathered(run, report, "[DDP] ")),
    )
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
        log.write(text)


def _gathered(run: RunDir, report: Report, what: str) -> str:
    """One line for each trace line of that kind, over all attempts, with the attempt in front."""
    lines: list[str] = []
    for outcome in report.outcomes:
        traces = run.path / outcome.dir / "traces.log"
        if outcome.dir and traces.is_file():
            text = traces.read_text(encoding="utf-8", errors="replace")
            lines += [f"{outcome.dir} {line}" for line in text.splitlines() if what in line]
    return "".join(f"{line}\n" for line in lines)
