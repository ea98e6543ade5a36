"""`nsa-harness watch`, `attach` and `read`: jobs that somebody else starts, observed or known by what they left."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_harness.cli.run import REPORT, GitDiff, NoRedact, Out, Probe, ProbeOption, Verbose
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.commands.watch import OnHang

_EXEC = "exec"
_ON_HANG = ("report", "kill")


def watch(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[limits.KEY=SECONDS]... -- COMMAND...",
            help="Limits such as limits.stall_s=60; your command follows `--`.",
        ),
    ] = None,
    on_hang: Annotated[
        str,
        typer.Option(
            envvar="NSA_HARNESS_ON_HANG",
            metavar="report|exec CMD|kill",
            help="What to do at a proven HANG, beside the report; `exec CMD` gives CMD the outcome on stdin.",
        ),
    ] = "report",
    deadline: Annotated[
        float | None,
        typer.Option(
            envvar="NSA_HARNESS_DEADLINE",
            metavar="SECONDS",
            min=0.001,
            help="A job that takes longer counts as a hang; none unless given.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", envvar="NSA_HARNESS_QUIET", help="Say nothing but a hang.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", envvar="NSA_HARNESS_JSON", help="Events on stderr: stdout is the command's.", **REPORT),
    ] = False,
    out: Out = None,
    probe: ProbeOption = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
) -> None:
    """Run a command as it is, observe it, and report a hang; it is not ended unless --on-hang=kill says so."""
    command: tuple[str, ...] = context.obj or ()
    if not command:
        raise UsageError("watch runs a command, which follows `--`: nsa-harness watch -- torchrun train.py")
    from nsa_harness.commands.watch import WatchRequest
    from nsa_harness.commands.watch import watch as run_watch
    from nsa_harness.core.scenario.observed_job import observed_limits

    kind, hook = _on_hang(on_hang)
    request = WatchRequest(
        command=command,
        limits=observed_limits(words or (), deadline),
        out=out,
        on_hang=kind,
        hook=hook,
        probe=probe.value,
        json=as_json,
        quiet=quiet,
        typed=shlex.join(["nsa-harness", *sys.argv[1:]]),
        redact=not no_redact,
        git_diff=git_diff,
    )
    raise typer.Exit(run_watch(request))


def attach(
    pid: Annotated[
        int | None,
        typer.Argument(
            metavar="PID", min=1, help="torchrun, a rank, or a process above them; unless given, your only job here."
        ),
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[limits.KEY=SECONDS]...", help="Limits, as for watch.")
    ] = None,
    for_s: Annotated[
        float,
        typer.Option("--for", envvar="NSA_HARNESS_FOR", metavar="SECONDS", min=1.0, help="How long to look at most."),
    ] = 30.0,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="JSON lines on stdout, text on stderr.", **REPORT)
    ] = False,
    out: Out = None,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Look at a running job: does it move, or is it proven to hang? Nothing is done to it."""
    from nsa_harness.commands.watch import AttachRequest, chosen_job
    from nsa_harness.commands.watch import attach as run_attach
    from nsa_harness.core.scenario.observed_job import observed_limits

    request = AttachRequest(
        pid=chosen_job(_ask) if pid is None else pid,
        for_s=for_s,
        limits=observed_limits(words or ()),
        out=out,
        json=as_json,
        typed=shlex.join(["nsa-harness", *sys.argv[1:]]),
        redact=not no_redact,
        verbose=verbose,
    )
    raise typer.Exit(run_attach(request))


def read(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Logs and dumps, or folders that hold some.")],
    as_json: Annotated[bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="report.json on stdout.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(envvar="NSA_HARNESS_OUT", metavar="DIR", help="Write a report below it; else none is written."),
    ] = None,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Judge a job that nobody watched, from the logs and dumps that it left: torchrun's, Slurm's, NCCL's, py-spy's."""
    from nsa_harness.commands.read import ReadRequest
    from nsa_harness.commands.read import read as read_files

    request = ReadRequest(
        paths=tuple(paths),
        out=out,
        json=as_json,
        verbose=verbose,
        typed=shlex.join(["nsa-harness", *sys.argv[1:]]),
        redact=not no_redact,
    )
    raise typer.Exit(read_files(request))


def _ask(jobs: Sequence[str]) -> int | None:
    """Which of several jobs; None where nobody is there to say."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    for job in jobs:
        typer.echo(f"  {job}", err=True)
    return int(typer.prompt("PID of the job to look at", type=int, err=True))


def _on_hang(text: str) -> tuple[OnHang, str]:
    from nsa_harness.commands.watch import OnHang

    kind, _, hook = text.strip().partition(" ")
    if (kind == _EXEC and hook.strip()) or (kind in _ON_HANG and not hook):
        return OnHang(kind), hook.strip()
    raise UsageError(f"--on-hang: expected report, kill or 'exec CMD', got {text!r}")
