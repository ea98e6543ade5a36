"""`nsa-harness ci`: summarize the runs of many CI jobs, and write a workflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_harness.cli.options import GroupedCommand, argument, option
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.core.ci import JobReport, NightSummary, UnreadFile
    from nsa_harness.core.comparison.history import Entry

_MATRIX = "Workflow file whose matrix lists the expected jobs. A job without a report is then reported as missing."
_BEFORE = (
    "Directory with the artifact of the last night: its summary.json or its reports. The summary then lists new"
    " failures first, and flaky and fixed scenarios apart."
)

_ABOUT = "Summarize the runs of many CI jobs, or write a workflow."
app = typer.Typer(name="ci", help=_ABOUT, short_help=_ABOUT, no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
def summary(
    directories: Annotated[list[Path], argument("DIR...", "Directories with runs, at any depth.")],
    matrix_file: Annotated[Path | None, option("--matrix FILE", _MATRIX, envvar="NSA_HARNESS_CI_MATRIX")] = None,
    out: Annotated[
        Path | None, option("--out FILE", "Also write the full summary to this file.", envvar="NSA_HARNESS_CI_OUT")
    ] = None,
    before: Annotated[Path | None, option("--before DIR", _BEFORE, envvar="NSA_HARNESS_CI_BEFORE")] = None,
    as_json: Annotated[bool, option("--json", "Print the summary as JSON.")] = False,
) -> None:
    """Merge the reports of many runs into one summary.

    The summary is Markdown. The exit code is the exit code of all runs together, as of one `nsa-harness run`.
    """
    from nsa_harness.core.ci import UnreadFile, compare_nights
    from nsa_harness.render.ci_summary import ci_summary_json, ci_summary_md, cut
    from nsa_harness.supervisor.storage.reports import matrix_jobs

    rows = {} if matrix_file is None else matrix_jobs(matrix_file)
    jobs = {} if isinstance(rows, UnreadFile) else rows
    night = _night(directories, jobs, [rows] if isinstance(rows, UnreadFile) else [])
    comparison = (
        None if before is None else compare_nights(night, _attempts(directories, jobs), _earlier_attempts(before, jobs))
    )
    text = ci_summary_json(night, comparison, jobs) if as_json else ci_summary_md(night, comparison, _ci_run())
    if out is not None:
        _write(out, text)
    sys.stdout.write(text if as_json else cut(text))
    raise typer.Exit(night.exit_code)


@app.command(cls=GroupedCommand)
def init(
    script: Annotated[str, argument("SCRIPT|SCENARIO", "What to run: your script, or a scenario.")],
    ranks: Annotated[int, option("--ranks N", "Number of ranks for your script.", min=1)] = 2,
    gitlab: Annotated[bool, option("--gitlab/--github", "Write .gitlab-ci.yml, or a workflow for GitHub.")] = False,
    yes: Annotated[bool, option("--yes", "Write the file without asking.", envvar="NSA_HARNESS_CI_YES")] = False,
) -> None:
    """Write a CI workflow that runs a script or scenario into your repository.

    Shows the file and asks before it writes. A file that exists is never changed: the difference is shown instead.
    """
    from nsa_harness.commands.ci_init import is_written, workflow_file, write_workflow

    path, text = workflow_file(script, ranks, "gitlab" if gitlab else "github")
    if is_written(path, text):
        print(f"{path} is there already, with the same content")
        return
    print(f"# {path}\n\n{text}")
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing was written: there is no terminal to ask on; --yes writes the file without asking")
    if not yes:
        typer.confirm(f"Write {path}?", abort=True, err=True)
    write_workflow(path, text)
    print(f"wrote {path}")


def _night(
    directories: Sequence[Path], jobs: Mapping[str, Mapping[str, Any]], unread: Sequence[UnreadFile]
) -> NightSummary:
    """Return a summary of the reports below `directories`. Jobs of the matrix without a report are missing."""
    from nsa_harness.core.ci import UnreadFile, night_summary
    from nsa_harness.supervisor.storage.reports import stored_reports

    files = stored_reports(directories, tuple(jobs))
    reports = [_parse_report(item.job, item.file, item.text) for item in files.reports]
    return night_summary(
        [item for item in reports if not isinstance(item, UnreadFile)],
        [*unread, *files.unread, *(item for item in reports if isinstance(item, UnreadFile))],
        tuple(jobs),
        frozenset(name for name, row in jobs.items() if row.get("may_fail")),
    )


def _attempts(directories: Sequence[Path], jobs: Collection[str]) -> dict[tuple[str, str], list[Entry]]:
    """Return the attempts in all readable reports below `directories`, for each job and scenario."""
    from nsa_harness.supervisor.storage.history import DAMAGES, entries_of
    from nsa_harness.supervisor.storage.reports import stored_reports

    found: dict[tuple[str, str], list[Entry]] = {}
    for item in stored_reports(directories, tuple(jobs)).reports:
        with suppress(*DAMAGES):
            for entry in entries_of(Path(item.file).parent):
                found.setdefault((item.job, entry.scenario), []).append(entry)
    return {key: sorted(group, key=lambda entry: entry.run_id) for key, group in found.items()}


def _earlier_attempts(before: Path, jobs: Collection[str]) -> dict[tuple[str, str], list[Entry]]:
    """Return the attempts of the last night, and of the nights before it if `before` has the last summary as JSON."""
    from nsa_harness.render.ci_summary import nights_from_json
    from nsa_harness.supervisor.storage.history import DAMAGES
    from nsa_harness.supervisor.storage.reports import summaries

    found = _attempts([before], jobs)
    stored = summaries(before)
    problems = [f"{item.file}: {item.why}" for item in stored.unread]
    for item in stored.reports:
        try:
            nights = nights_from_json(item.text)
        except (*DAMAGES, IndexError) as error:
            problems.append(f"{item.file}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        for key, group in nights.items():
            known = {(entry.run_id, entry.directory) for entry in group}
            others = [entry for entry in found.get(key, ()) if (entry.run_id, entry.directory) not in known]
            found[key] = sorted([*group, *others], key=lambda entry: entry.run_id)
    for problem in problems:
        print(f"note: the last night is not known: {problem}", file=sys.stderr)
    return found


def _ci_run() -> str:
    """Return the URL of this run of a GitHub workflow or GitLab pipeline, or "" elsewhere."""
    server, repository, run = (os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    if server and repository and run:
        return f"{server}/{repository}/actions/runs/{run}"
    return os.environ.get("CI_PIPELINE_URL", "")


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
