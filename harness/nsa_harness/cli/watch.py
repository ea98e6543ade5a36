"""The commands `nsa-harness watch`, `attach` and `read`, which judge jobs that the user started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_harness.cli.options import (
    REPORT,
    GitDiff,
    JsonLines,
    NoRedact,
    Notify,
    NoValues,
    Out,
    Probe,
    ProbeMode,
    Verbose,
    argument,
    option,
    run_options,
    typed_command,
)
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.commands.watch import OnHang

_ON_HANG = (
    "What to do after a proven HANG, besides the report. exec CMD: run CMD with the verdict as JSON on stdin. kill: end"
    " the job."
)


def watch(
    context: typer.Context,
    limits: Annotated[
        list[str] | None,
        argument(
            "[limits.KEY=SECONDS]... -- COMMAND...", "Limits, such as limits.stall_s=60. Your command follows `--`."
        ),
    ] = None,
    on_hang: Annotated[str, option("--on-hang report|exec CMD|kill", _ON_HANG)] = "report",
    deadline: Annotated[
        float | None,
        option(
            "--deadline SECONDS",
            "Report a job that takes longer as FAIL slow, which is no hang, and apply --on-hang. Default: no deadline.",
            min=0.001,
        ),
    ] = None,
    shared: Annotated[
        Path | None,
        option(
            "--shared DIR",
            "For a job on several nodes: start this command on each node, with the same directory, which all nodes"
            " share. One report for the whole job is written to DIR.",
        ),
    ] = None,
    nodes: Annotated[
        int, option("--nodes N", "With --shared: number of nodes. Default: torchrun's --nnodes.", min=0)
    ] = 0,
    quiet: Annotated[bool, option("--quiet", "Print only stalls, recoveries and hangs.")] = False,
    as_json: Annotated[
        bool, option("--json", "Print events as JSON lines to stderr. stdout stays the command's.", REPORT)
    ] = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    no_values: NoValues = False,
    notify: Notify = None,
) -> None:
    """Run a command unchanged, observe it, and report a hang.

    nsa-harness never ends the command, except with --on-hang=kill.
    """
    command: tuple[str, ...] = context.obj or ()
    if not command:
        raise UsageError("no command to watch; it must follow `--`: nsa-harness watch -- torchrun train.py")
    from nsa_harness.commands.watch import WatchRequest
    from nsa_harness.commands.watch import watch as run_watch
    from nsa_harness.core.scenario.observed_job import observed_limits
    from nsa_harness.supervisor.launch.project_file import project_limits

    if nodes and shared is None:
        raise UsageError("--nodes N needs --shared DIR, a directory that all nodes of the job share")
    kind, hook = _parse_on_hang(on_hang)
    request = WatchRequest(
        command=command, limits=observed_limits(limits or (), deadline, defaults=project_limits(Path.cwd())),
        on_hang=kind, hook=hook, quiet=quiet, shared=shared, nodes=nodes,
        options=run_options(
            out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff, no_values=no_values, notify=notify
        ),
    )  # fmt: skip
    if shared is not None:
        from nsa_harness.commands.watch_node import watch_node

        raise typer.Exit(watch_node(request))
    raise typer.Exit(run_watch(request))


def _parse_on_hang(text: str) -> tuple[OnHang, str]:
    """Parse --on-hang into its action and the command after `exec`. Raise UsageError if it is invalid."""
    from nsa_harness.commands.watch import OnHang

    kind, _, hook = text.strip().partition(" ")
    if kind == "exec" and hook.strip():
        from nsa_harness.render.notifier import check_program

        check_program("--on-hang", hook)
    if (kind == "exec" and hook.strip()) or (kind in ("report", "kill") and not hook):
        return OnHang(kind), hook.strip()
    raise UsageError(f"--on-hang: expected report, kill or 'exec CMD', got {text!r}")


def attach(
    pid: Annotated[
        int | None,
        argument(
            "PID",
            "Process ID of torchrun, a rank, or a process above them. Default: your only job on this machine.",
            min=1,
        ),
    ] = None,
    limits: Annotated[list[str] | None, argument("[limits.KEY=SECONDS]...", "Limits, as for `watch`.")] = None,
    for_s: Annotated[float, option("--for SECONDS", "Longest time to observe the job.", min=1.0)] = 30.0,
    as_json: JsonLines = False,
    out: Out = None,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
    no_values: NoValues = False,
) -> None:
    """Report whether a running job makes progress or hangs.

    The job is not ended and gets no signal. py-spy reads its stacks, and a job with NCCL may be asked to write its
    flight recorder.
    """
    from nsa_harness.commands.watch import AttachRequest, chosen_job
    from nsa_harness.commands.watch import attach as run_attach
    from nsa_harness.core.scenario.observed_job import observed_limits
    from nsa_harness.supervisor.launch.project_file import project_limits

    pid = chosen_job(_choose_job) if pid is None else pid
    options = run_options(out, Probe.OFF, as_json=as_json, no_redact=no_redact, no_values=no_values, verbose=verbose)
    observed = observed_limits(limits or (), defaults=project_limits(Path.cwd()))
    request = AttachRequest(pid=pid, for_s=for_s, limits=observed, options=options)
    raise typer.Exit(run_attach(request))


def _choose_job(jobs: Sequence[str]) -> int | None:
    """Ask the user which job to inspect. Return its process ID, or None without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    for job in jobs:
        typer.echo(f"  {job}", err=True)
    return int(typer.prompt("PID of the job to attach to", type=int, err=True))


def read(
    paths: Annotated[list[Path], argument("PATH...", "Logs and dumps, or directories that contain them.")],
    as_json: Annotated[bool, option("--json", "Print report.json to stdout.")] = False,
    out: Annotated[
        Path | None, option("--out DIR", "Also write a report below this directory. Default: write no report.")
    ] = None,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Judge a dead job from its logs and dumps.

    Reads logs of torchrun and Slurm, flight recorder dumps of NCCL, and stacks of py-spy, faulthandler and pystack. The
    job need not have been observed.
    """
    from nsa_harness.commands.read import ReadRequest
    from nsa_harness.commands.read import read as read_files

    request = ReadRequest(
        paths=tuple(paths), out=out, json=as_json, verbose=verbose, command=typed_command(), redact=not no_redact
    )
    raise typer.Exit(read_files(request))
