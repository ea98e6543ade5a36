"""`nsa-harness bisect`: its options, and what they ask for."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli import run as cli_run
from nsa_harness.errors import UsageError

QUESTION = {"rich_help_panel": "What is varied (one of these)"}
SEARCH = {"rich_help_panel": "Search"}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def bisect(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO|KEY=VALUE]",
            help="What fails: a scenario, or your script.",
            autocompletion=cli_run.known_names,
        ),
    ] = None,
    gc_range: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_GC_RANGE", metavar="[=A:B]", help="Layers that have gradient checkpointing.", **QUESTION
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_LAYERS", metavar="[=GOOD:[BAD]]", help="Number of layers.", **QUESTION),
    ] = None,
    seq_len: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_SEQ_LEN", metavar="[=GOOD:[BAD]]", help="Length of a sequence, in tokens.", **QUESTION
        ),
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_WORLD_SIZE", metavar="[=GOOD:BAD]", help="Number of ranks.", **QUESTION),
    ] = None,
    branch: Annotated[
        bool, typer.Option("--branch", envvar="NSA_HARNESS_BRANCH", help="Branches of the attention.", **QUESTION)
    ] = False,
    env: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_ENV",
            metavar="[=NAME,...]",
            help="Environment variables that the scenario declares.",
            **QUESTION,
        ),
    ] = None,
    two: Annotated[
        str | None,
        typer.Option(
            "--set",
            envvar="NSA_HARNESS_SET",
            metavar="GOOD,BAD",
            help="Keys in which two scenarios differ, or two files that your script reads as {file}.",
            **QUESTION,
        ),
    ] = None,
    env_file: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_ENV_FILE",
            metavar="GOOD,BAD",
            help="Variables and packages of two environments: files, pip freeze, or virtual environments.",
            **QUESTION,
        ),
    ] = None,
    commits: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_COMMITS", metavar="GOOD..BAD", help="Commits between a good and a bad one.", **QUESTION
        ),
    ] = None,
    any_key: Annotated[
        str | None,
        typer.Option(
            "--any",
            envvar="NSA_HARNESS_ANY",
            metavar="KEY=[A,...]",
            help="Any key. Numbers: from which one on. Words: which of them, several of them at a time.",
            **QUESTION,
        ),
    ] = None,
    ordered: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_ORDERED",
            metavar="KEY=[A,...]",
            help="Words that have an order, such as versions, the good one first: from which one on.",
            **QUESTION,
        ),
    ] = None,
    choice: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_CHOICE",
            metavar="KEY=[A,...]",
            help="Values of which just one is set at a time: which of them fail.",
            **QUESTION,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_SEEDS",
            metavar="A:B",
            help="Random seeds, each several times: is it the data, or a race?",
            **QUESTION,
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_ITEMS",
            metavar="NAME=A:B",
            help="Numbered things of your script, such as batches or data shards: which of them.",
            **QUESTION,
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
    arg: Annotated[
        list[str] | None,
        typer.Option(
            envvar="NSA_HARNESS_ARG",
            metavar="TEXT",
            help="An argument of your script that has {layers}, {items}, {range}, {value} or {file} in it.",
            **cli_run.PROGRAM,
        ),
    ] = None,
    env_arg: Annotated[
        list[str] | None,
        typer.Option(
            envvar="NSA_HARNESS_ENV_ARG",
            metavar="NAME=TEXT",
            help="An environment variable with such a placeholder.",
            **cli_run.PROGRAM,
        ),
    ] = None,
    outcome: Annotated[
        str,
        typer.Option(
            envvar="NSA_HARNESS_OUTCOME",
            metavar="KIND",
            help="What counts as bad: same, hang, fail, fail:REGEX, any, or slow (slow:1.5, slow:200ms).",
            **SEARCH,
        ),
    ] = "same",
    budget: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_BUDGET", metavar="TIME", help="Start no probe after this: 90s, 20m, 2h.", **SEARCH
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            envvar="NSA_HARNESS_CONFIDENCE",
            metavar="P",
            min=0.5,
            max=0.999,
            help="How sure an answer about a flaky failure must be.",
            **SEARCH,
        ),
    ] = 0.95,
    repeat: Annotated[
        int, typer.Option(envvar="NSA_HARNESS_REPEAT", metavar="N", min=1, help="Runs of each proof.", **SEARCH)
    ] = 1,
    jobs: Annotated[
        int, typer.Option(envvar="NSA_HARNESS_JOBS", metavar="N", min=1, max=64, help="Probes side by side.", **SEARCH)
    ] = 1,
    log: Annotated[
        Path | None,
        typer.Option(envvar="NSA_HARNESS_LOG", metavar="RUN", help="Show a stored bisection.", **cli_run.REPORT),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", envvar="NSA_HARNESS_DRY_RUN", help="Print the plan, launch nothing.", **SEARCH)
    ] = False,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork/--no-fork",
            envvar="NSA_HARNESS_FORK",
            help="Search in processes that have torch loaded already, where safe.",
            **SEARCH,
        ),
    ] = True,
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
    """Find the smallest difference that makes a scenario fail, with the fewest runs, and prove it."""
    from nsa_harness.supervisor.experiments.subjects import SubjectOptions

    options = SubjectOptions(
        gc_range=gc_range, layers=layers, seq_len=seq_len, world_size=world_size, branch=branch, env=env, set=two,
        commits=commits, any=any_key, ordered=ordered, choice=choice, seeds=seeds, items=items,
        env_file=env_file,
    )  # fmt: skip
    if log is not None:
        from nsa_harness.commands.bisect_report import show_stored

        raise typer.Exit(show_stored(log, out))
    from nsa_harness.core.experiment.trial import parse_outcome
    from nsa_harness.supervisor.experiments.launches import BisectRequest, check_outcome, parse_templates
    from nsa_harness.supervisor.experiments.subjects import arguments_of, subject_of
    from nsa_harness.supervisor.launch.machine import machine_facts
    from nsa_harness.supervisor.storage.rundir import RunOptions

    templates = parse_templates(arg or (), env_arg or ())
    question = cli_run.question_of(context, words, script=script, ranks=ranks)
    question, subject = subject_of(options, question, templated=bool(templates), facts=machine_facts())
    try:
        wanted = parse_outcome(outcome)
    except ValueError as error:
        raise UsageError(f"--outcome: {error}") from None
    check_outcome(wanted, subject, jobs)
    templates = templates.checked(subject)
    request = BisectRequest(
        question=question,
        subject=replace(subject, in_a_row=templates.in_a_row),
        templates=templates,
        base_args=arguments_of(question),
        wanted=wanted,
        confidence=confidence,
        insistent=given(context, "confidence"),
        repeat=repeat,
        jobs=jobs,
        budget_s=None if budget is None else budget_seconds(budget),
        fork=fork,
        options=RunOptions(
            out=out,
            json=as_json,
            probe=probe.value,
            command=shlex.join(["nsa-harness", *sys.argv[1:]]),
            redact=not no_redact,
            git_diff=git_diff,
        ),
    )
    if dry_run:
        from nsa_harness.commands.bisect_report import show_plan

        raise typer.Exit(show_plan(request))
    from nsa_harness.commands.bisect import run_bisection

    raise typer.Exit(run_bisection(request))


def given(context: typer.Context, name: str) -> bool:
    """By the command line or the environment, if only with the value that it has anyway."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def budget_seconds(text: str) -> float:
    """Of --budget. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh]?)", text)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget: expected a time such as 90s, 20m or 2h, got {text!r}")
    return float(found[1]) * _UNITS[found[2] or "s"]
