"""`nsa-harness bisect`, `claim` and `ready`: commands that decide a question by many launches."""

from __future__ import annotations

import inspect
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
    GitDiff,
    JsonLines,
    NoRedact,
    Out,
    Probe,
    ProbeMode,
    Ranks,
    Script,
    argument,
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
TEST = "How to test it"

# What bisect varies: each option, and its help text. Its name is that of a field of SubjectOptions.
_SUBJECTS = {
    "--gc-range [=A:B]": "Layers with gradient checkpointing.",
    "--layers [=GOOD:[BAD]]": "Number of layers.",
    "--seq-len [=GOOD:[BAD]]": "Sequence length, in tokens.",
    "--world-size [=GOOD:BAD]": "Number of ranks.",
    "--branch": "Branches of the attention.",
    "--env [=NAME,...]": "Environment variables that the scenario declares.",
    "--set GOOD,BAD": "Keys in which two scenarios differ, or two config files that your script reads as {file}.",
    "--env-file GOOD,BAD": "Variables and packages of two environments: files, pip freeze, or virtual environments.",
    "--commits GOOD..BAD": "Commits between a good and a bad one.",
    "--any KEY=[A,...]": "Any key. Numbers: from which number it fails. Words: which of them fail, alone or together.",
    "--ordered KEY=[A,...]": "Words in order, such as versions, the good one first: from which word it fails.",
    "--choice KEY=[A,...]": "Values of which only one is set at a time: which of them fail.",
    "--seeds A:B": "Random seeds, each several times: is it the data, or a race?",
    "--items NAME=A:B": "Numbered items of your script, such as batches or data shards: which of them fail.",
}
_ARG = "An argument of your script that contains {layers}, {items}, {range}, {value} or {file}."
_OUTCOME = "What counts as bad: same, hang, fail, fail:REGEX, any, or slow (slow:1.5, slow:200ms)."
_SIDES = "What to launch, and one key with two values, the one that should help last; or two scenarios."
_SIDE_ARG = "An argument of your script for each side: --arg=--fp16,--bf16; shared arguments follow `--`."


def _with_subjects(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` an option for each entry of _SUBJECTS, in place of its parameter **subject."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    subjects = []
    for form, text in _SUBJECTS.items():
        name, _, metavar = form.lstrip("-").partition(" ")
        kind, default = (str | None, None) if metavar else (bool, False)
        annotation = Annotated[kind, option(form, text, SUBJECT)]  # type: ignore[valid-type]
        subjects.append(inspect.Parameter(name.replace("-", "_"), keyword, default=default, annotation=annotation))
    context, words, *others, _subject = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [context, words, *subjects, *(parameter.replace(kind=keyword) for parameter in others)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@_with_subjects
def bisect(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        argument("[SCENARIO|KEY=VALUE]", "What fails: a scenario, or your script.", autocompletion=scenario_names),
    ] = None,
    script: Script = None,
    ranks: Ranks = 2,
    arg: Annotated[list[str] | None, option("--arg TEXT", _ARG, PROGRAM)] = None,
    env_arg: Annotated[
        list[str] | None,
        option("--env-arg NAME=TEXT", "An environment variable that contains such a placeholder.", PROGRAM),
    ] = None,
    outcome: Annotated[str, option("--outcome KIND", _OUTCOME, SEARCH)] = "same",
    budget: Annotated[str | None, option("--budget TIME", "Start no probe after this: 90s, 20m, 2h.", SEARCH)] = None,
    confidence: Annotated[
        float,
        option(
            "--confidence P", "Confidence that an answer about a flaky failure must reach.", SEARCH, min=0.5, max=0.999
        ),
    ] = 0.95,
    repeat: Annotated[int, option("--repeat N", "Runs per proof.", SEARCH, min=1)] = 1,
    jobs: Annotated[int, option("--jobs N", "Probes in parallel.", SEARCH, min=1, max=64)] = 1,
    log: Annotated[Path | None, option("--log RUN", "Show a stored bisection.", REPORT)] = None,
    dry_run: Annotated[bool, option("--dry-run", "Print the plan; launch nothing.", SEARCH)] = False,
    fork: Annotated[
        bool, option("--fork/--no-fork", "Search in processes that have torch loaded already, if that is safe.", SEARCH)
    ] = True,
    as_json: JsonLines = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    **subject: Any,
) -> None:
    """Find the smallest difference that makes a run fail.

    The search takes the fewest runs, and the answer is proven.
    """
    if log is not None:
        from nsa_harness.commands.bisect_report import show_stored

        raise typer.Exit(show_stored(log, out))
    from dataclasses import replace

    from nsa_harness.core.experiment.trial import parse_outcome
    from nsa_harness.supervisor.experiments.launches import BisectRequest, check_outcome, parse_templates
    from nsa_harness.supervisor.experiments.subjects import SubjectOptions, arguments_of, subject_of
    from nsa_harness.supervisor.launch.machine import machine_facts

    templates = parse_templates(arg or (), env_arg or ())
    invocation, chosen = subject_of(
        SubjectOptions(**subject),
        invocation_from_args(context, words, script=script, ranks=ranks),
        templated=bool(templates),
        facts=machine_facts(),
    )
    try:
        wanted = parse_outcome(outcome)
    except ValueError as error:
        raise UsageError(f"--outcome: {error}") from None
    check_outcome(wanted, chosen, jobs)
    templates = templates.checked(chosen)
    request = BisectRequest(
        question=invocation, subject=replace(chosen, in_a_row=templates.in_a_row), templates=templates,
        base_args=arguments_of(invocation), wanted=wanted, confidence=confidence,
        insistent=is_given(context, "confidence"), repeat=repeat, jobs=jobs, budget_s=parse_budget(budget), fork=fork,
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff),
    )  # fmt: skip
    if dry_run:
        from nsa_harness.commands.bisect_report import show_plan

        raise typer.Exit(show_plan(request))
    from nsa_harness.commands.bisect import run_bisection

    raise typer.Exit(run_bisection(request))


def claim(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        argument("[SCENARIO|FILE.py|KEY=VALUE|KEY=A,B]", _SIDES, autocompletion=scenario_names),
    ] = None,
    commits: Annotated[str | None, option("--commits A..B", "Two commits of the repository.", SIDES)] = None,
    arg: Annotated[str | None, option("--arg =A,B", _SIDE_ARG, SIDES)] = None,
    script: Script = None,
    ranks: Ranks = 2,
    text: Annotated[str | None, option("--text TEXT", "The claim, as the ledger shows it.", TEST)] = None,
    confidence: Annotated[
        float, option("--confidence P", "Confidence that the answer must reach.", TEST, min=0.5, max=0.999)
    ] = 0.95,
    budget: Annotated[str | None, option("--budget TIME", "Start no run after this: 90s, 20m, 2h.", TEST)] = None,
    pairs: Annotated[int, option("--pairs N", "At most N runs per side.", TEST, min=1, max=10_000)] = 100,
    dry_run: Annotated[bool, option("--dry-run", "Print both sides; launch nothing.", TEST)] = False,
    listed: Annotated[bool, option("--list", "Show the ledger of all claims.", REPORT)] = False,
    as_json: JsonLines = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
) -> None:
    """Test the claim that a change helps.

    Both sides run alternately until their counts decide, and a ledger keeps the result.
    """
    if listed:
        from nsa_harness.commands.claim import show_ledger

        raise typer.Exit(show_ledger(out or Path("reports"), as_json=as_json))
    from nsa_harness.commands.claim import ClaimRequest, planned_claim, run_claim, show_plan

    request = ClaimRequest(
        question=invocation_from_args(context, words, script=script, ranks=ranks),
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff),
        commits=None if commits is None else _split_pair("--commits", commits, "..", "main~3..main"),
        arg=None if arg is None else _split_pair("--arg", arg, ",", "--arg=--fp16,--bf16, or --arg=,--safe"),
        text=text, confidence=confidence, insistent=is_given(context, "confidence"), most_pairs=pairs,
        budget_s=parse_budget(budget),
    )  # fmt: skip
    if not dry_run:
        raise typer.Exit(run_claim(request))
    sides = planned_claim(request)
    if not as_json:
        show_plan(request, sides)
        return
    from nsa_harness.cli.text import command_events
    from nsa_harness.supervisor.launch.planning import Plan
    from nsa_harness.supervisor.storage.redaction import Redaction

    plan = Plan(specs=(sides.first.spec, sides.second.spec), notes=sides.notes)
    for line in command_events(plan, Redaction(on=not no_redact)):
        print(line)


def _split_pair(option: str, value: str, separator: str, example: str) -> tuple[str, str]:
    first, found, second = value.partition(separator)
    if not found or separator in second or (separator == ".." and not (first and second)):
        raise UsageError(f"{option}: expected two of them, as in {example}; got {value!r}")
    return first, second


def ready(
    shape: Annotated[str, argument("SHAPE", "A shape of nsa.train, such as ci.", autocompletion=shape_names)],
    words: Annotated[list[str] | None, argument("[KEY=VALUE]", "Keys to change in every scenario.")] = None,
    checklist: Annotated[
        Path | None,
        option("--checklist FILE", "Your own phases and criteria, instead of the shipped ones.", SELECTION),
    ] = None,
    jobs: Annotated[
        str, option("--jobs N|auto", "Runs in parallel, in phases whose numbers do not suffer from it.", ATTEMPTS)
    ] = AUTO,
    dry_run: Annotated[bool, option("--dry-run", "Print the phases; launch nothing.", ATTEMPTS)] = False,
    as_json: Annotated[bool, option("--json", "Print readiness.json on stdout, text on stderr.", REPORT)] = False,
    out: Out = None,
    probe: ProbeMode = Probe.FULL,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
) -> None:
    """Decide GO or NO-GO before a production run.

    Phases run in order of cost and are compared with numbers. The same command continues an interrupted check.
    """
    from nsa_harness.commands.ready import ReadyRequest, run_readiness, show_plan

    request = ReadyRequest(
        shape=shape, words=tuple(words or ()), checklist=checklist, jobs=parse_jobs(jobs),
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff),
    )  # fmt: skip
    raise typer.Exit(show_plan(request) if dry_run else run_readiness(request))
