"""`nsa-harness ci`: one summary of the runs of many jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_harness.cli.options import GroupedCommand, argument, option
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.core.ci import NightSummary, StoredReport, Unread

_MATRIX = "Workflow with the jobs as rows of its matrix, so that a missing job is noticed."

app = typer.Typer(name="ci", help="Summarize the runs of many CI jobs.", no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
def summary(
    directories: Annotated[list[Path], argument("DIR...", "Directories that contain the runs, at any depth.")],
    matrix_file: Annotated[
        Path | None,
        option("--matrix FILE", _MATRIX, envvar="NSA_HARNESS_CI_MATRIX"),
    ] = None,
    out: Annotated[
        Path | None, option("--out FILE", "Write the whole summary to this file as well.", envvar="NSA_HARNESS_CI_OUT")
    ] = None,
    as_json: Annotated[bool, option("--json", "Print the summary as JSON.")] = False,
) -> None:
    """Merge the reports of many runs into one summary.

    The summary is Markdown. The exit code is that of all runs together.
    """
    from nsa_harness.render.ci_summary import ci_summary_json, ci_summary_md, cut

    night = _night(directories, matrix_file)
    text = ci_summary_json(night) if as_json else ci_summary_md(night)
    if out is not None:
        _write(out, text)
    sys.stdout.write(text if as_json else cut(text))
    raise typer.Exit(night.exit_code)


def _night(directories: Sequence[Path], matrix_file: Path | None) -> NightSummary:
    from nsa_harness.core.ci import Unread, night_summary
    from nsa_harness.supervisor.storage.reports import matrix_jobs, stored_reports

    jobs = () if matrix_file is None else matrix_jobs(matrix_file)
    lost = (jobs,) if isinstance(jobs, Unread) else ()
    expected = () if isinstance(jobs, Unread) else jobs
    stored = stored_reports(directories, expected)
    parsed = [_parse_report(item.job, item.file, item.text) for item in stored.reports]
    return night_summary(
        [item for item in parsed if not isinstance(item, Unread)],
        [*lost, *stored.unread, *(item for item in parsed if isinstance(item, Unread))],
        expected,
    )


def _parse_report(job: str, file: str, text: str) -> StoredReport | Unread:
    from nsa_harness.core.ci import StoredReport, Unread
    from nsa_harness.errors import StoredRunError
    from nsa_harness.render.documents.report_json import from_json

    try:
        return StoredReport(job=job, file=file, report=from_json(text, file))
    except StoredRunError as error:
        # The first line of the message repeats the file, and the last line explains how to repeat a run.
        return Unread(file=file, why="no report: " + "; ".join(str(error).splitlines()[1:-1]).strip())


def _write(file: Path, text: str) -> None:
    from nsa_harness.supervisor.storage.rundir import write_document

    try:
        write_document(file, text)
    except OSError as error:
        raise UsageError(f"--out {file}: {error.strerror}; name a file in a directory that can be written") from None


# Commands that are gone: they take any words, and answer with what to do instead.

_GONE = {
    "matrix": "the jobs of a nightly are rows of its workflow, as in .github/workflows/nightly-gpu.yml, and"
    " `ci summary --matrix WORKFLOW` reads them there",
    "matcher": "`run` annotates verdicts if GITHUB_ACTIONS is set; pass this variable into your container",
}


def _declare_gone(name: str, instead: str) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, cls=GroupedCommand, hidden=True, context_settings=settings, help=f"Gone: {instead}.")
    def gone() -> None:
        raise UsageError(f"ci {name} is gone: {instead}")


for _name, _instead in _GONE.items():
    _declare_gone(_name, _instead)
