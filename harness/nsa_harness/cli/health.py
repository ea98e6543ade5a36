"""`nsa-harness doctor` and `nsa-harness selftest`: whether this machine, and the harness on it, can be trusted."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.run import Out
from nsa_harness.errors import UsageError


def doctor(
    context: typer.Context,
    overhead: Annotated[
        bool,
        typer.Option("--overhead", envvar="NSA_HARNESS_OVERHEAD", help="Also measure the command behind `--`."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="JSON on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Look at this machine: what works, what is missing, what to do. With --overhead -- COMMAND: what we cost it."""
    command: tuple[str, ...] = context.obj or ()
    if overhead and not command:
        raise UsageError("--overhead measures a command: nsa-harness doctor --overhead -- COMMAND")
    if command and not overhead:
        raise UsageError("doctor starts no program; to measure one: nsa-harness doctor --overhead -- COMMAND")
    from nsa_harness.core.doctor.checkup import healthy, judged, lines_text, values
    from nsa_harness.core.doctor.overhead import overhead_lines, overhead_values
    from nsa_harness.supervisor.doctor.doctor import measure

    lines = judged(measure(Path.cwd(), os.environ))
    if not as_json:
        print("\n".join(lines_text(lines)), flush=True)
    if overhead and not healthy(lines):
        print("overhead: not measured, because runs do not work here", file=sys.stderr)
    cost = None
    if overhead and healthy(lines):
        from nsa_harness.commands.overhead import measured

        cost = measured(command, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({**values(lines), "overhead": None if cost is None else overhead_values(cost)}, indent=1))
    elif cost is not None:
        print("\n".join(["", *overhead_lines(cost)]))
    raise typer.Exit(0 if healthy(lines) else 1)


def selftest(
    programs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROGRAM...]", help="Only these programs of the corpus; names or globs."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", envvar="NSA_HARNESS_FULL", help="Every fault, every healthy twin, and the corpus.")
    ] = False,
    score: Annotated[
        bool, typer.Option("--score", envvar="NSA_HARNESS_SCORE", help="Precision and recall, as JSON on stdout too.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(envvar="NSA_HARNESS_SEED", min=0, help="The places of an earlier selftest.")
    ] = None,
    out: Out = None,
) -> None:
    """Plant faults under torchrun, at places drawn anew, and check that each is named with rank, layer and step.

    With --full every planted fault, and the corpus: small programs with one known fault each, and their healthy twins.
    """
    import secrets

    from nsa_harness.commands.selftest import SelftestRequest
    from nsa_harness.commands.selftest import selftest as run_selftest

    chosen = secrets.randbelow(1_000_000) if seed is None else seed
    typed = shlex.join(["nsa-harness", *sys.argv[1:]])
    request = SelftestRequest(
        full=full, score=score, seed=chosen, programs=tuple(programs or ()), out=out, command=typed
    )
    raise typer.Exit(run_selftest(request))
