"""The Python interface of nsa-harness: plan launches and run them from another program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nsa_harness.commands.session import run_directory, session
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.protocol import PROBE_FULL
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.launch.project_file import read_project_file
from nsa_harness.supervisor.storage.rundir import RunOptions


def plan(
    *words: str, script: str | os.PathLike[str] | None = None, ranks: int | None = None, args: Sequence[str] = ()
) -> tuple[RunSpec | Skip, ...]:
    """Plan the launches of a script, or of the scenarios selected by `words`, without launching anything.

    `words` takes the same arguments as `nsa-harness run`: scenario names, globs, paths of YAML files, and overrides
    such as "train.steps=2". `script` is a Python file that torchrun will start with `ranks` processes (default: those
    of pyproject.toml, or 2) and `args`. For a scenario that this machine cannot run, the tuple contains a `Skip` with
    the reason.

    Raises UsageError if an argument is invalid, ScenarioError with all mistakes of the scenario files, and MissingNeed
    if an argument requires something that this machine lacks, such as a GPU.
    """
    directory = Path.cwd()
    program = (
        None
        if script is None
        else Script(
            file=os.fspath(script), ranks=default_ranks(directory) if ranks is None else ranks, args=tuple(args)
        )
    )
    invocation = Invocation(arguments=words, script=program, working_dir=directory, environ=dict(os.environ))
    return plan_launches(invocation, machine_facts()).specs


def run_one(spec: RunSpec | Skip, *, out: str | os.PathLike[str] | None = None, probe: str = PROBE_FULL) -> Outcome:
    """Launch one run, wait until it ends or hangs, and return its outcome.

    The run gets its own directory below `out` (default: ./reports), with the same documents as `nsa-harness run`
    writes. `probe` chooses the instrumentation in the ranks: "full", "board" (progress events only) or "off". Nothing
    is printed. When the function returns, no process of the run is left.

    A run that fails or hangs raises no exception; its outcome has the verdict. Raises UsageError if `out` cannot be
    written. After Ctrl-C, ends all processes, writes the documents, and raises KeyboardInterrupt.
    """
    options = options_of_project("nsa_harness.run_one", None if out is None else Path(out), probe)
    end_dead_runs()
    return run_in_own_directory(spec, options)[0]


def default_ranks(working_dir: Path) -> int:
    """Return the number of ranks that the project's pyproject.toml sets, or 2."""
    project = read_project_file(working_dir)
    ranks = project.options().get("ranks") if project else None
    return ranks if isinstance(ranks, int) else 2


def options_of_project(command: str, out: Path | None, probe: str = PROBE_FULL) -> RunOptions:
    """Return the options of a run that is not started from the command line.

    What the report may contain follows from the project's settings `no-redact`, `no-values` and `git-diff`.
    """
    project = read_project_file(Path.cwd())
    settings = project.options() if project else {}
    return RunOptions(
        command=command, out=out, probe=probe, redact=not settings.get("no-redact"),
        git_diff=bool(settings.get("git-diff")), reads_values=not settings.get("no-values"),
    )  # fmt: skip


def run_in_own_directory(
    spec: RunSpec | Skip,
    options: RunOptions,
    *,
    facts: MachineFacts | None = None,
    devices: tuple[int, ...] | None = None,
    server: ForkServer | None = None,
) -> tuple[Outcome, Path]:
    """Launch one run without printing anything, and return its outcome and its directory.

    `facts`: the facts about this machine, if they are known. `devices` and `server`: as for `Session.launch`. Raises
    KeyboardInterrupt after Ctrl-C, when the documents are written.
    """
    with run_directory(options) as run, session(run, options, [spec], screen=Listener(), facts=facts) as running:
        if isinstance(spec, Skip):
            from nsa_harness.commands.judge import record_skip

            outcome = record_skip(run.attempt(spec.scenario), spec)
        else:
            outcome = running.launch(spec, devices=devices, server=server)
        running.announce(outcome)
        (final,) = running.write_documents([outcome]).outcomes
        if running.interrupted:
            raise KeyboardInterrupt
    return final, run.path
