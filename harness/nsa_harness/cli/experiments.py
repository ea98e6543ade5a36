"""The commands `nsa-harness bisect`, `claim`, `why` and `ready`, each of which answers one question with many runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_harness.cli.options import (
    ATTEMPTS,
    AUTO,
    PROGRAM,
    REPORT,
    SELECTION,
    Account,
    Constraint,
    EngineName,
    GitDiff,
    GpusPerNode,
    JsonLines,
    Nodes,
    NoRedact,
    Notify,
    NoValues,
    Out,
    Partition,
    Probe,
    ProbeMode,
    Ranks,
    Script,
    SiteFile,
    StoredRun,
    argument,
    engine_choice,
    facts_of,
    is_given,
    option,
    parse_budget,
    parse_jobs,
    run_options,
    scenario_names,
    shape_names,
)
from nsa_harness.cli.run import invocation_from_args
from nsa_harness.errors import UsageError

SUBJECT = "What to vary (one of these)"
SEARCH = "Search"
SIDES = "How the two sides differ (one of these, or KEY=A,B)"
TEST = "How to test the claim"
RUNS = "What to launch"

# The options that choose what `bisect` varies, with their help texts. `make_subject` gets their values.
_SUBJECTS = {
    "--gc-range [=A:B]": "Which layers use gradient checkpointing.",
    "--layers [=GOOD:[BAD]]": "Number of layers.",
    "--seq-len [=GOOD:[BAD]]": "Sequence length, in tokens.",
    "--world-size [=GOOD:BAD]": "Number of ranks.",
    "--branch": "The branches of the attention.",
    "--env [=NAME,...]": "The environment variables of the scenario.",
    "--set GOOD,BAD": "The keys in which two scenarios differ, or two config files; your script reads {file}.",
    "--env-file GOOD,BAD": "Variables and packages of two environments: files, pip freeze lists or virtualenvs.",
    "--commits GOOD..BAD": "The commits between a good and a bad one.",
    "--any KEY=[A,...]": "Values of any key. Numbers: the first that fails. Words: those that fail, alone or together.",
    "--ordered KEY=[A,...]": "Values in order, such as versions, a good one first: find the first that fails.",
    "--choice KEY=[A,...]": "Values of which only one can be set: find those that fail.",
    "--seeds A:B": "Random seeds, each run several times: is it the data, or a race?",
    "--items NAME=A:B": "Numbered items of your script, such as batches or data shards: find those that fail.",
}
_ARG = "An argument of your script with a placeholder: {layers}, {items}, {range}, {value} or {file}."
_OUTCOME = (
    "Which results count as bad: same (as the first bad run), hang, fail, fail:REGEX, any, or slow (slow:1.5,"
    " slow:200ms)."
)
_SIDES = "A scenario or script, and one key with two values, of which the second should help; or two scenarios."
_PYTHON = "Python interpreter for the program, 3.11 or newer. Default: the one of the failed run."
_SIDE_ARG = "One argument of your script per side: --arg=--fp16,--bf16. Shared arguments follow `--`."


def _with_subjects(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options in _SUBJECTS to the signature of `command`, in place of its parameter **subject."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    subjects = []
    for form, text in _SUBJECTS.items():
        name, _, metavar = form.lstrip("-").partition(" ")
        kind, default = (str | None, None) if metavar else (bool, False)
        annotation = Annotated[kind, option(form, text, SUBJECT)]  # type: ignore[valid-type]
        subjects.append(inspect.Parameter(name.replace("-", "_"), keyword, default=default, annotation=annotation))
    context, targets, *others, _subject = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [context, targets, *subjects, *(parameter.replace(kind=keyword) for parameter in others)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@_with_subjects
def bisect(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        argument(
            "[SCENARIO|KEY=VALUE]",
            "What fails: a scenario or your script, and settings.",
            autocompletion=scenario_names,
        ),
    ] = None,
    script: Script = None,
    ranks: Ranks = 2,
    arg: Annotated[list[str] | None, option("--arg TEXT", _ARG, PROGRAM)] = None,
    env_arg: Annotated[
        list[str] | None, option("--env-arg NAME=TEXT", "An environment variable with a placeholder.", PROGRAM)
    ] = None,
    outcome: Annotated[str, option("--outcome KIND", _OUTCOME, SEARCH)] = "same",
    budget: Annotated[
        str | None, option("--budget TIME", "Start no new run after this time: 90s, 20m, 2h.", SEARCH)
    ] = None,
    confidence: Annotated[
        float,
        option(
            "--confidence P", "Confidence to reach before an answer about a flaky failure.", SEARCH, min=0.5, max=0.999
        ),
    ] = 0.95,
    repeat: Annotated[int, option("--repeat N", "Runs for each proof of the answer.", SEARCH, min=1)] = 1,
    jobs: Annotated[int, option("--jobs N", "Runs in parallel.", SEARCH, min=1, max=64)] = 1,
    log: Annotated[Path | None, option("--log RUN", "Print a stored bisection.", REPORT)] = None,
    dry_run: Annotated[bool, option("--dry-run", "Print the plan and launch nothing.", SEARCH)] = False,
    fork: Annotated[
        bool,
        option(
            "--fork/--no-fork", "Fork the runs from a process that has already imported torch, if that is safe.", SEARCH
        ),
    ] = True,
    engine: EngineName = None,
    nodes: Nodes = None,
    partition: Partition = None,
    account: Account = None,
    constraint: Constraint = None,
    gpus_per_node: GpusPerNode = None,
    site: SiteFile = None,
    as_json: JsonLines = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    notify: Notify = None,
    **subject: Any,
) -> None:
    """Find the smallest difference that makes a run fail.

    The search needs as few runs as possible. Further runs under torchrun then prove the answer.
    """
    if log is not None:
        from nsa_harness.commands.bisect_report import show_stored

        raise typer.Exit(show_stored(log, out))
    from dataclasses import replace

    from nsa_harness.core.experiment.trial import parse_outcome
    from nsa_harness.supervisor.experiments.launches import BisectRequest, check_outcome, parse_templates
    from nsa_harness.supervisor.experiments.subjects import make_subject, program_arguments

    choice = engine_choice(
        engine, site, nodes=nodes, partition=partition, account=account, constraint=constraint,
        gpus_per_node=gpus_per_node,
    )  # fmt: skip
    templates = parse_templates(arg or (), env_arg or ())
    invocation, bisect_subject = make_subject(
        subject,
        invocation_from_args(context, targets, script=script, ranks=ranks),
        templated=bool(templates),
        facts=facts_of(choice),
    )
    try:
        bad_outcome = parse_outcome(outcome)
    except ValueError as error:
        raise UsageError(f"--outcome: {error}") from None
    check_outcome(bad_outcome, bisect_subject, jobs)
    templates = templates.checked_for(bisect_subject)
    request = BisectRequest(
        question=invocation, subject=replace(bisect_subject, in_a_row=templates.takes_range), templates=templates,
        base_args=program_arguments(invocation), sought=bad_outcome, confidence=confidence,
        confidence_requested=is_given(context, "confidence"), repeat=repeat, jobs=jobs,
        budget_s=parse_budget(budget), fork=fork, engine=choice,
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff, notify=notify),
    )  # fmt: skip
    if dry_run:
        from nsa_harness.commands.bisect_report import show_plan

        raise typer.Exit(show_plan(request))
    from nsa_harness.commands.bisect import run_bisection

    raise typer.Exit(run_bisection(request))


def claim(
    context: typer.Context,
    targets: Annotated[
        list[str] | None, argument("[SCENARIO|FILE.py|KEY=VALUE|KEY=A,B]", _SIDES, autocompletion=scenario_names)
    ] = None,
    commits: Annotated[str | None, option("--commits A..B", "Two commits of the repository.", SIDES)] = None,
    arg: Annotated[str | None, option("--arg =A,B", _SIDE_ARG, SIDES)] = None,
    script: Script = None,
    ranks: Ranks = 2,
    text: Annotated[str | None, option("--text TEXT", "The claim in your own words, for the ledger.", TEST)] = None,
    confidence: Annotated[
        float, option("--confidence P", "Confidence to reach before an answer.", TEST, min=0.5, max=0.999)
    ] = 0.95,
    budget: Annotated[
        str | None, option("--budget TIME", "Start no new run after this time: 90s, 20m, 2h.", TEST)
    ] = None,
    pairs: Annotated[int, option("--pairs N", "At most N runs per side.", TEST, min=1, max=10_000)] = 100,
    dry_run: Annotated[bool, option("--dry-run", "Print both sides and launch nothing.", TEST)] = False,
    show_list: Annotated[bool, option("--list", "Print the ledger of all claims.", REPORT)] = False,
    engine: EngineName = None,
    nodes: Nodes = None,
    partition: Partition = None,
    account: Account = None,
    constraint: Constraint = None,
    gpus_per_node: GpusPerNode = None,
    site: SiteFile = None,
    as_json: JsonLines = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    notify: Notify = None,
) -> None:
    """Test the claim that a change helps.

    Both sides run in turn until their counts of failures decide. The result is added to a ledger.
    """
    if show_list:
        from nsa_harness.commands.claim import show_ledger

        raise typer.Exit(show_ledger(out or Path("reports"), as_json=as_json))
    from nsa_harness.commands.claim import ClaimRequest, planned_claim, run_claim, show_plan

    choice = engine_choice(
        engine, site, nodes=nodes, partition=partition, account=account, constraint=constraint,
        gpus_per_node=gpus_per_node,
    )  # fmt: skip
    request = ClaimRequest(
        question=invocation_from_args(context, targets, script=script, ranks=ranks),
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff, notify=notify),
        commits=None if commits is None else _split_pair("--commits", commits, "..", "main~3..main"),
        arg=None if arg is None else _split_pair("--arg", arg, ",", "--arg=--fp16,--bf16, or --arg=,--safe"),
        text=text, confidence=confidence, confidence_requested=is_given(context, "confidence"), most_pairs=pairs,
        budget_s=parse_budget(budget), facts=facts_of(choice), engine=choice,
    )  # fmt: skip
    if not dry_run:
        raise typer.Exit(run_claim(request))
    sides = planned_claim(request)
    if not as_json:
        show_plan(request, sides)
        return
    from nsa_harness.cli.text import command_events
    from nsa_harness.supervisor.launch.planning import LaunchPlan
    from nsa_harness.supervisor.storage.redaction import Redaction

    plan = LaunchPlan(specs=(sides.first.spec, sides.second.spec), notes=sides.notes)
    for line in command_events(plan, Redaction(is_on=not no_redact)):
        print(line)


def why(
    run: StoredRun = None,
    python: Annotated[str | None, option("--python PATH", _PYTHON, PROGRAM)] = None,
    experiment: Annotated[
        bool | None,
        option(
            "--experiment/--no-experiment",
            "Test the answer by experiments in further runs. By default, unless the program uses a shared service.",
            RUNS,
        ),
    ] = None,
    no_values: NoValues = False,
    repeat: Annotated[
        int, option("--repeat N", "Recorded runs at most, until one fails like the first run.", RUNS, min=1)
    ] = 2,
    budget: Annotated[
        str | None, option("--budget TIME|Nruns", "Start no new run after 90s, 20m or 2h, or after 3runs.", RUNS)
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", "Print what would be launched, and launch nothing.", RUNS)] = False,
    patch: Annotated[
        bool, option("--patch", "Print the change of the experiment as a diff; nothing is applied.", REPORT)
    ] = False,
    as_json: JsonLines = False,
    out: Out = None,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
) -> None:
    """Say why the ranks of a failed run diverged.

    The program runs again. Each rank records its statements and values, and the first difference that explains the
    failure is reported with its line. Experiments in further runs then test the answer.
    """
    from nsa_harness.commands.why import WhyRequest, print_patch, run_why

    max_runs, budget_s = _parse_runs_or_time(budget)
    request = WhyRequest(
        run_path=run, python=python, values=not no_values, experiments=experiment, repeat=repeat, max_runs=max_runs,
        budget_s=budget_s, dry_run=dry_run,
        options=run_options(out, Probe.FULL, as_json=as_json, no_redact=no_redact, git_diff=git_diff),
    )  # fmt: skip
    raise typer.Exit(print_patch(request) if patch else run_why(request))


def _parse_runs_or_time(text: str | None) -> tuple[int | None, float | None]:
    """Return the value of --budget as a number of runs or a time in seconds, of which at least one is None."""
    runs = re.fullmatch(r"([1-9][0-9]{0,2}) ?runs?", text or "")
    return (int(runs[1]), None) if runs else (None, parse_budget(text))


def _split_pair(option: str, value: str, separator: str, example: str) -> tuple[str, str]:
    """Split an option's value into exactly two parts. Raise UsageError, which shows `example`, if it has others."""
    first, has_separator, second = value.partition(separator)
    if not has_separator or separator in second or (separator == ".." and not (first and second)):
        raise UsageError(f"{option}: expected two values, such as {example}; got {value!r}")
    return first, second


def ready(
    shape: Annotated[
        str, argument("SHAPE", "A model size of nsa.train, such as ci or production.", autocompletion=shape_names)
    ],
    overrides: Annotated[list[str] | None, argument("[KEY=VALUE]", "Settings to change in every scenario.")] = None,
    checklist: Annotated[
        Path | None, option("--checklist FILE", "Your own phases and criteria, instead of the shipped ones.", SELECTION)
    ] = None,
    planned: Annotated[
        list[str] | None,
        option(
            "--planned KEY=N",
            "The planned run: steps, ranks, seq_len or nodes, instead of the checklist's value. Repeatable.",
            SELECTION,
        ),
    ] = None,
    jobs: Annotated[
        str, option("--jobs N|auto", "Runs in parallel, in phases whose measurements allow it.", ATTEMPTS)
    ] = AUTO,
    dry_run: Annotated[bool, option("--dry-run", "Print the phases and launch nothing.", ATTEMPTS)] = False,
    as_json: Annotated[bool, option("--json", "Print readiness.json to stdout, and text to stderr.", REPORT)] = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    notify: Notify = None,
) -> None:
    """Decide GO or NO-GO before a production run.

    The phases of a checklist run in order of cost, and their measurements are compared with its criteria. After an
    interruption, the same command continues.
    """
    from nsa_harness.commands.ready import ReadyRequest, run_readiness, show_plan

    request = ReadyRequest(
        shape=shape, overrides=tuple(overrides or ()), checklist=checklist, jobs=parse_jobs(jobs),
        planned=tuple(planned or ()),
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff, notify=notify),
    )  # fmt: skip
    raise typer.Exit(show_plan(request) if dry_run else run_readiness(request))
