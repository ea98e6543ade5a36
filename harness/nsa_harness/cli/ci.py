"""`nsa-harness ci`: summarize the runs of many CI jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_harness.cli.options import GroupedCommand, argument, option
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.core.ci import JobReport, NightSummary, UnreadFile

_MATRIX = "Workflow file whose matrix lists the expected jobs. A job without a report is then reported as missing."

_ABOUT = "Summarize the runs of many CI jobs."
app = typer.Typer(name="ci", help=_ABOUT, short_help=_ABOUT, no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
def summary(
    directories: Annotated[list[Path], argument("DIR...", "Directories with runs, at any depth.")],
    matrix_file: Annotated[Path | None, option("--matrix FILE", _MATRIX, envvar="NSA_HARNESS_CI_MATRIX")] = None,
    out: Annotated[
        Path | None, option("--out FILE", "Also write the full summary to this file.", envvar="NSA_HARNESS_CI_OUT")
    ] = None,
    as_json: Annotated[bool, option("--json", "Print the summary as JSON.")] = False,
) -> None:
    """Merge the reports of many runs into one summary.

    The summary is Markdown. The exit code is the exit code of all runs together, as of one `nsa-harness run`.
    """
    from nsa_harness.render.ci_summary import ci_summary_json, ci_summary_md, cut

    night = _night(directories, matrix_file)
    text = ci_summary_json(night) if as_json else ci_summary_md(night)
    if out is not None:
        _write(out, text)
    sys.stdout.write(text if as_json else cut(text))
    raise typer.Exit(night.exit_code)


def _night(directories: Sequence[Path], matrix_file: Path | None) -> NightSummary:
    """Return a summary of the reports below `directories`. Jobs of the matrix without a report are missing."""
    from nsa_harness.core.ci import UnreadFile, night_summary
    from nsa_harness.supervisor.storage.reports import matrix_jobs, stored_reports

    jobs = () if matrix_file is None else matrix_jobs(matrix_file)
    unread_matrix = (jobs,) if isinstance(jobs, UnreadFile) else ()
    expected_jobs = () if isinstance(jobs, UnreadFile) else jobs
    files = stored_reports(directories, expected_jobs)
    reports = [_parse_report(item.job, item.file, item.text) for item in files.reports]
    return night_summary(
        [item for item in reports if not isinstance(item, UnreadFile)],
        [*unread_matrix, *files.unread, *(item for item in reports if isinstance(item, UnreadFile))],
        expected_jobs,
    )


def _parse_report(job: str, file: str, text: str) -> JobReport | UnreadFile:
    from nsa_harness.core.ci import JobReport, UnreadFile
    from nsa_harness.errors import StoredRunError
    from nsa_harness.render.documents.report_json import from_json

    try:
        return JobReport(job=job, file=file, report=from_json(text, file))
    except StoredRunError as error:
        # The first line of the message repeats the file name, and the last line explains how to repeat the run.
        return UnreadFile(file=file, why="no report: " + "; ".join(str(error).splitlines()[1:-1]).strip())


def _write(file: Path, text: str) -> None:
    from nsa_harness.supervisor.storage.rundir import write_document

    try:
        write_document(file, text)
    except OSError as error:
        raise UsageError(f"--out {file}: {error.strerror}; name a file in a writable directory") from None


# Removed commands. They accept any arguments and only print what to do instead.

_REMOVED = {
    "matrix": "list the jobs in the matrix of the workflow, as in .github/workflows/nightly-gpu.yml;"
    " `ci summary --matrix WORKFLOW` reads them from there",
    "matcher": "`run` prints annotations if GITHUB_ACTIONS is set; pass this variable into your container",
}


def _declare_removed(name: str, instead: str) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, cls=GroupedCommand, hidden=True, context_settings=settings, help=f"Removed: {instead}.")
    def fail() -> None:
        raise UsageError(f"`nsa-harness ci {name}` was removed: {instead}")


for _name, _instead in _REMOVED.items():
    _declare_removed(_name, _instead)
