"""The commands `nsa-harness doctor` and `selftest`, which check this machine and nsa-harness itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.options import Out, argument, option, typed_command
from nsa_harness.errors import UsageError

_OVERHEAD = (
    "doctor runs no program; to measure what nsa-harness costs a command, run `python benchmarks/timing_pairs.py --"
    " COMMAND` in a checkout"
)
_CORPUS = (
    "selftest plants only its own faults; in a checkout, `python -m evaluation run corpus` runs programs with known"
    " faults, and `make evaluate` scores the answers"
)


def doctor(
    context: typer.Context,
    overhead: Annotated[bool, option("--overhead", _OVERHEAD, hidden=True)] = False,
    as_json: Annotated[bool, option("--json", "Print the result as JSON.")] = False,
) -> None:
    """Check this machine: what works, what is missing, what to do.

    The exit code is 1 if runs cannot work here or would lose evidence.
    """
    if overhead or context.obj:
        raise UsageError(_OVERHEAD)
    from nsa_harness.core.doctor import check_lines, is_healthy, lines_for_json, lines_text
    from nsa_harness.supervisor.doctor import measure

    lines = check_lines(measure(Path.cwd(), os.environ))
    print(
        json.dumps({**lines_for_json(lines), "overhead": None}, indent=1) if as_json else "\n".join(lines_text(lines))
    )
    raise typer.Exit(0 if is_healthy(lines) else 1)


def selftest(
    programs: Annotated[list[str] | None, argument("[PROGRAM...]", _CORPUS, hidden=True)] = None,
    full: Annotated[bool, option("--full", _CORPUS, hidden=True)] = False,
    score: Annotated[bool, option("--score", _CORPUS, hidden=True)] = False,
    seed: Annotated[
        int | None, option("--seed N", "Plant the faults at the same places as an earlier selftest.", min=0)
    ] = None,
    out: Out = None,
) -> None:
    """Plant faults under torchrun and check that each is found.

    Each fault is planted at a random rank, layer and step, and the report of its run must name them.
    """
    if programs or full or score:
        raise UsageError(_CORPUS)
    import secrets

    from nsa_harness.commands.selftest import SelftestRequest
    from nsa_harness.commands.selftest import selftest as run_selftest

    used_seed = secrets.randbelow(1_000_000) if seed is None else seed
    raise typer.Exit(run_selftest(SelftestRequest(seed=used_seed, out=out, command=typed_command())))
