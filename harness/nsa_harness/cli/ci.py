"""`nsa-harness ci`: the matrix of a nightly, and the summary of the runs it left."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_harness.cli.help import GroupedCommand
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nsa_harness.core.ci import Axes, JobMatrix, NightSummary, Offer, RunnerKind, StoredReport, Unread

app = typer.Typer(
    name="ci", help="The matrix of a nightly, and the summary of its runs.", no_args_is_help=True, rich_markup_mode=None
)


_MATCHER_EXAMPLE = """Examples:

\b
nsa-harness ci matcher > "$RUNNER_TEMP/nsa-harness.json"
echo "::add-matcher::$RUNNER_TEMP/nsa-harness.json\""""


@app.command(cls=GroupedCommand)
def matrix(
    tag: Annotated[
        list[str] | None, typer.Option("-t", "--tag", envvar="NSA_HARNESS_TAG", help="Scenarios with this tag: plan.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(envvar="NSA_HARNESS_SHARDS", min=1, max=256, help="Parts of each plan: 2.")
    ] = None,
    torch: Annotated[
        str | None, typer.Option(envvar="NSA_HARNESS_TORCH", metavar="LIST", help="Versions, such as 2.11,2.13.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(envvar="NSA_HARNESS_GPUS", metavar="LIST", help="GPUs of a runner, such as 1,2.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(envvar="NSA_HARNESS_BACKEND", metavar="LIST", help="Of gloo, nccl and auto.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", envvar="NSA_HARNESS_CPU", help="A small matrix that runs anywhere.")
    ] = False,
    runner: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_RUNNER", metavar="LABELS", help="Of the GPU runners; {gpus} is a number."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help='One line, {"include": [...]}, for fromJSON.')
    ] = False,
) -> None:
    """Print the jobs of a nightly: scenario shard x backend x torch version x GPUs."""
    from nsa_harness.core.ci import axes
    from nsa_harness.core.ci import matrix as job_matrix

    wanted = axes(tags=tag or (), shards=shards, torch=torch, gpus=gpus, backends=backend, runner=runner, cpu=cpu)
    made = job_matrix(wanted, {kind: _offer(wanted, kind) for kind in wanted.kinds()})
    for line in made.left_out:
        print(f"note: {line}", file=sys.stderr)
    as_values = json.dumps({"include": [asdict(job) for job in made.jobs]})
    for line in [as_values] if as_json else _matrix_lines(made):
        print(line)


@app.command(cls=GroupedCommand)
def summary(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Where the runs lie, at any depth.")],
    matrix_file: Annotated[
        Path | None,
        typer.Option(
            "--matrix", envvar="NSA_HARNESS_CI_MATRIX", metavar="FILE", help="What `ci matrix --json` printed."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(envvar="NSA_HARNESS_CI_OUT", metavar="FILE", help="Write the whole summary here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="The summary as JSON.")] = False,
) -> None:
    """Merge the reports of many runs into one summary, in Markdown; the exit code is that of all of them together."""
    from nsa_harness.render.ci_summary import ci_summary_json, ci_summary_md, cut

    night = _night(directories, matrix_file)
    text = ci_summary_json(night) if as_json else ci_summary_md(night)
    if out is not None:
        _write(out, text)
    sys.stdout.write(text if as_json else cut(text))
    raise typer.Exit(night.exit_code)


@app.command(cls=GroupedCommand, epilog=_MATCHER_EXAMPLE)
def matcher() -> None:
    """Print a problem matcher, by which GitHub and its kin find verdicts in a log that has no annotations of ours."""
    from nsa_harness.render.documents.code_hosts import problem_matcher

    sys.stdout.write(problem_matcher())


def _offer(wanted: Axes, kind: RunnerKind) -> Offer:
    """What `run --shard` would launch on such a runner. The environment of this machine has no say in it."""
    from nsa_harness.core.ci import Offer, of_another_backend, without
    from nsa_harness.core.report import MachineFacts
    from nsa_harness.supervisor.launch.planning import Invocation, part, planned

    facts = MachineFacts(host="runner", cpus=1, gpus=("GPU",) * kind.gpus, torch=wanted.torch[0])
    asked = Invocation(words=(), tags=wanted.tags, working_dir=Path.cwd(), environ={})
    launches = planned(asked, facts).specs
    left_out: tuple[str, ...] = ()
    if kind.backend != "auto":
        forced = replace(
            asked,
            environ={"TORCH_BACKEND": kind.backend},
            expression=without(of_another_backend(launches, kind.backend)),
        )
        declared, launches = launches, planned(forced, facts).specs
        kept = {launch.scenario for launch in launches}
        left_out = tuple(launch.scenario for launch in declared if launch.scenario not in kept)
    shards = tuple(part(launches, (number, wanted.shards)) for number in range(1, wanted.shards + 1))
    return Offer(shards=shards, left_out=left_out)


def _matrix_lines(made: JobMatrix) -> Iterator[str]:
    """A table: one line a job, columns as wide as their longest word."""
    head = ("job", "runner", "limit", "tests")
    rows = [(job.name, ",".join(job.runner), f"{job.timeout_minutes} min", job.tests or "none") for job in made.jobs]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"{len(made.jobs)} job{'s' if len(made.jobs) > 1 else ''}"


def _night(directories: Sequence[Path], matrix_file: Path | None) -> NightSummary:
    from nsa_harness.core.ci import Unread, night_summary
    from nsa_harness.supervisor.storage.reports import matrix_jobs, stored_reports

    jobs = () if matrix_file is None else matrix_jobs(matrix_file)
    lost = (jobs,) if isinstance(jobs, Unread) else ()
    expected = () if isinstance(jobs, Unread) else jobs
    found = stored_reports(directories, expected)
    parsed = [_parsed(item.job, item.file, item.text) for item in found.reports]
    return night_summary(
        [item for item in parsed if not isinstance(item, Unread)],
        [*lost, *found.unread, *(item for item in parsed if isinstance(item, Unread))],
        expected,
    )


def _parsed(job: str, file: str, text: str) -> StoredReport | Unread:
    from nsa_harness.core.ci import StoredReport, Unread
    from nsa_harness.errors import StoredRunError
    from nsa_harness.render.documents.report_json import from_json

    try:
        return StoredReport(job=job, file=file, report=from_json(text, file))
    except StoredRunError as error:
        # Its first line repeats the file, its last one tells how to repeat a run.
        return Unread(file=file, why="no report: " + "; ".join(str(error).splitlines()[1:-1]).strip())


def _write(file: Path, text: str) -> None:
    from nsa_harness.supervisor.storage.rundir import write_document

    try:
        write_document(file, text)
    except OSError as error:
        raise UsageError(f"--out {file}: {error.strerror}; name a file in a directory that can be written") from None
