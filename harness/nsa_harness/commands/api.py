"""The Python interface: plan launches and run them from another program, such as a test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nsa_harness.commands.session import run_directory, session
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Outcome
from nsa_harness.protocol import PROBE_FULL
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, planned
from nsa_harness.supervisor.storage.rundir import RunOptions


def plan(
    *words: str, script: str | os.PathLike[str] | None = None, ranks: int = 2, args: Sequence[str] = ()
) -> tuple[RunSpec | Skip, ...]:
    """Return one launch for each scenario that `words` select, or the launch of `script`.

    `words` are those of `nsa-harness run`: scenario names, globs, paths of YAML files, and overrides such as
    "train.steps=2". `script` is a Python file, launched under torchrun with `ranks` processes and `args`. A scenario
    that this machine cannot run is a `Skip`, which says what is missing. Nothing is launched.

    Raises UsageError or ScenarioError, with all mistakes at once, if a word or a scenario file is wrong, and
    MissingNeed if a word asks for what this machine lacks.
    """
    chosen = None if script is None else Script(file=os.fspath(script), ranks=ranks, args=tuple(args))
    invocation = Invocation(words=words, script=chosen, working_dir=Path.cwd(), environ=dict(os.environ))
    return planned(invocation, machine_facts()).specs


def run_one(spec: RunSpec | Skip, *, out: str | os.PathLike[str] | None = None, probe: str = PROBE_FULL) -> Outcome:
    """Launch `spec` once, wait until it ends or is proven to hang, and return its outcome.

    The run has a directory of its own below `out` (default: ./reports), with all documents that `nsa-harness run`
    writes. `probe` is "full", "board" or "off". Nothing is printed. No process of the run is left when this returns.

    A run that fails or hangs is an outcome, and no exception. Raises UsageError if `out` cannot be written, and
    KeyboardInterrupt after Ctrl-C, once the processes are gone and the documents are written.
    """
    options = RunOptions(command="nsa_harness.run_one", out=None if out is None else Path(out), probe=probe)
    sweep_dead_runs()
    with run_directory(options) as run, session(run, options, [spec], screen=Listener()) as opened:
        if isinstance(spec, Skip):
            from nsa_harness.commands.judge import keep_skip

            outcome = keep_skip(run.attempt(spec.scenario), spec)
        else:
            outcome = opened.launch(spec)
        opened.tell_outcome(outcome)
        (final,) = opened.write_documents([outcome]).outcomes
        if opened.interrupted:
            raise KeyboardInterrupt
    return final
