"""`nsa-harness claim`: its options, and what they ask for."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli import run as cli_run
from nsa_harness.cli.bisect import budget_seconds, given
from nsa_harness.errors import UsageError

SIDES = {"rich_help_panel": "In what the sides differ (one of these, or KEY=A,B)"}
TEST = {"rich_help_panel": "How it is tested"}


def claim(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO|FILE.py|KEY=VALUE|KEY=A,B]",
            help="What is launched, and one key with two values, the one that helps last; or two scenarios.",
            autocompletion=cli_run.known_names,
        ),
    ] = None,
    commits: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_COMMITS", metavar="A..B", help="Two commits of the repository.", **SIDES),
    ] = None,
    arg: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_ARG",
            metavar="=A,B",
            help="Words of your script, of each side: --arg=--fp16,--bf16; what both take follows `--`.",
            **SIDES,
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_SCRIPT",
            metavar="FILE",
            help="The same as FILE.py; its arguments follow `--`.",
            **cli_run.PROGRAM,
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(envvar="NSA_HARNESS_RANKS", metavar="N", min=1, help="Ranks of your script.", **cli_run.PROGRAM),
    ] = 2,
    text: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_TEXT", metavar="TEXT", help="What is claimed, as the ledger says it.", **TEST),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            envvar="NSA_HARNESS_CONFIDENCE",
            metavar="P",
            min=0.5,
            max=0.999,
            help="How sure the answer must be.",
            **TEST,
        ),
    ] = 0.95,
    budget: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_BUDGET", metavar="TIME", help="Start no run after this: 90s, 20m, 2h.", **TEST
        ),
    ] = None,
    pairs: Annotated[
        int,
        typer.Option(
            envvar="NSA_HARNESS_PAIRS",
            metavar="N",
            min=1,
            max=10_000,
            help="At most so many runs of each side.",
            **TEST,
        ),
    ] = 100,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", envvar="NSA_HARNESS_DRY_RUN", help="Print both sides, launch nothing.", **TEST),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", envvar="NSA_HARNESS_LIST", help="Show the ledger of all claims.", **cli_run.REPORT),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", envvar="NSA_HARNESS_JSON", help="JSON lines on stdout, text on stderr.", **cli_run.REPORT
        ),
    ] = False,
    out: cli_run.Out = None,
    probe: cli_run.ProbeOption = cli_run.Probe.FULL,
    no_redact: cli_run.NoRedact = False,
    git_diff: cli_run.GitDiff = False,
) -> None:
    """Put "it helps" to the test: both sides in turn, until their counts decide it; and keep it in a ledger."""
    if listed:
        from nsa_harness.commands.claim import show_ledger

        raise typer.Exit(show_ledger(out or Path("reports"), as_json=as_json))
    from nsa_harness.commands.claim import ClaimRequest, planned_claim, run_claim, show_plan
    from nsa_harness.supervisor.storage.rundir import RunOptions

    request = ClaimRequest(
        question=cli_run.question_of(context, words, script=script, ranks=ranks),
        options=RunOptions(
            out=out,
            json=as_json,
            probe=probe.value,
            command=shlex.join(["nsa-harness", *sys.argv[1:]]),
            redact=not no_redact,
            git_diff=git_diff,
        ),
        commits=None if commits is None else _two("--commits", commits, "..", "main~3..main"),
        arg=None if arg is None else _two("--arg", arg, ",", "--arg=--fp16,--bf16, or --arg=,--safe"),
        text=text,
        confidence=confidence,
        insistent=given(context, "confidence"),
        most_pairs=pairs,
        budget_s=None if budget is None else budget_seconds(budget),
    )
    if not dry_run:
        raise typer.Exit(run_claim(request))
    sides = planned_claim(request)
    if as_json:
        from nsa_harness.cli.text import command_events
        from nsa_harness.supervisor.launch.planning import Plan
        from nsa_harness.supervisor.storage.redaction import Redaction

        plan = Plan(specs=(sides.first.spec, sides.second.spec), notes=sides.notes)
        for line in command_events(plan, Redaction(on=not no_redact)):
            print(line)
    else:
        show_plan(request, sides)


def _two(option: str, value: str, between: str, example: str) -> tuple[str, str]:
    first, found, second = value.partition(between)
    if not found or between in second or (between == ".." and not (first and second)):
        raise UsageError(f"{option}: expected two of them, as in {example}; got {value!r}")
    return first, second
