"""`nsa-harness ready`: its options, and what they ask for."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli import run as cli_run


def known_shapes(incomplete: str) -> list[str]:
    """Shapes that a shell may complete a word to."""
    from nsa_harness.subject.options import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def ready(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="A shape of nsa.train, such as ci.", autocompletion=known_shapes)
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]", help="Keys to change in every scenario.")
    ] = None,
    checklist: Annotated[
        Path | None,
        typer.Option(
            envvar="NSA_HARNESS_CHECKLIST",
            metavar="FILE",
            help="Phases and criteria of your own, in place of the shipped ones.",
            **cli_run.SELECTION,
        ),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            envvar="NSA_HARNESS_JOBS",
            metavar="N|auto",
            help="Runs side by side, in phases whose numbers that leaves alone.",
            **cli_run.ATTEMPTS,
        ),
    ] = cli_run.AUTO,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", envvar="NSA_HARNESS_DRY_RUN", help="Print the phases, launch nothing.", **cli_run.ATTEMPTS
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", envvar="NSA_HARNESS_JSON", help="readiness.json on stdout, text on stderr.", **cli_run.REPORT
        ),
    ] = False,
    out: cli_run.Out = None,
    probe: cli_run.ProbeOption = cli_run.Probe.FULL,
    no_redact: cli_run.NoRedact = False,
    git_diff: cli_run.GitDiff = False,
) -> None:
    """GO or NO-GO before production: phases in order of cost, against numbers. The same command goes on."""
    from nsa_harness.commands.ready import ReadyRequest, run_readiness, show_plan
    from nsa_harness.supervisor.storage.rundir import RunOptions

    request = ReadyRequest(
        shape=shape,
        words=tuple(words or ()),
        checklist=checklist,
        jobs=cli_run.jobs_of(jobs),
        options=RunOptions(
            out=out,
            json=as_json,
            probe=probe.value,
            command=shlex.join(["nsa-harness", *sys.argv[1:]]),
            redact=not no_redact,
            git_diff=git_diff,
        ),
    )
    raise typer.Exit(show_plan(request) if dry_run else run_readiness(request))
