"""`nsa-harness run`: its options, and the launches that they request."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
    Strict,
    Verbose,
    argument,
    option,
    parse_jobs,
    run_options,
    scenario_names,
    scenario_tags,
)
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.supervisor.launch.planning import Invocation, Plan

_WORDS = "Your script; or scenarios by name, glob, YAML file, plan file or spec.json; and keys to change."
_PYTHON = (
    "Interpreter for your script. Default: that of the active environment or the python on PATH, if it has torch; else"
    " that of nsa-harness."
)
_VERIFY = 'After an edit, repeat what failed in a stored run, as often as it takes to say "fixed".'


def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None, argument("[FILE.py|PATTERN|KEY=VALUE]", _WORDS, autocompletion=scenario_names)
    ] = None,
    script: Script = None,
    module: Annotated[str | None, option("-m MODULE", "Run a module, like python -m.", PROGRAM)] = None,
    ranks: Ranks = 2,
    python: Annotated[str | None, option("--python PATH", _PYTHON, PROGRAM)] = None,
    tag: Annotated[
        list[str] | None,
        option("-t --tag TAG", "Select scenarios with this tag.", SELECTION, autocompletion=scenario_tags),
    ] = None,
    expression: Annotated[
        str | None, option("-k EXPR", "Select names and tags that match, as in pytest: 'ddp and not nccl'.", SELECTION)
    ] = None,
    matrix: Annotated[list[str] | None, option("--matrix KEY=A,B", "Run once per value.", SELECTION)] = None,
    shard: Annotated[
        str | None, option("--shard K/N", "Select every N-th scenario, starting with the K-th.", SELECTION)
    ] = None,
    last_failed: Annotated[bool, option("--lf", "Select only what failed in the latest run.", SELECTION)] = False,
    resume: Annotated[str | None, option("--resume [=RUN]", "Continue a run that was interrupted.", SELECTION)] = None,
    verify: Annotated[Path | None, option("--verify RUN", _VERIFY, SELECTION)] = None,
    repeat: Annotated[int, option("--repeat N", "Attempts per scenario.", ATTEMPTS, min=1)] = 1,
    retries: Annotated[
        int, option("--retries N", "Up to N more attempts while the result is not as expected.", ATTEMPTS, min=0)
    ] = 0,
    deepen: Annotated[
        bool,
        option("--deepen", "If a run leaves a question open, launch up to 3 more, with one change each.", ATTEMPTS),
    ] = False,
    maxfail: Annotated[int | None, option("--maxfail N", "Stop after N failures.", ATTEMPTS, min=1)] = None,
    jobs: Annotated[str, option("--jobs N|auto", "Runs in parallel, as memory allows.", ATTEMPTS)] = "1",
    dry_run: Annotated[bool, option("--dry-run", "Print the commands; launch nothing.", ATTEMPTS)] = False,
    as_json: JsonLines = False,
    out: Out = None,
    strict: Strict = False,
    probe: ProbeMode = Probe.FULL,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    # main chooses the exit code by --git-bisect, also if typer refuses another option.
    git_bisect: Annotated[  # noqa: ARG001
        bool, option("--git-bisect", "For `git bisect run`: exit with 125 on a usage error.", REPORT)
    ] = False,
) -> None:
    """Run a script or scenarios under torchrun and judge each run.

    The verdict is PASS, FAIL or HANG, with the cause, the rank and the line.
    """
    from dataclasses import replace

    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.core.schedule import Policy
    from nsa_harness.supervisor.launch.machine import machine_facts
    from nsa_harness.supervisor.launch.planning import planned

    request = RunRequest(
        specs=(),
        options=run_options(out, probe, as_json=as_json, no_redact=no_redact, git_diff=git_diff),
        policy=Policy(repeat=repeat, retries=retries, maxfail=maxfail),
        jobs=parse_jobs(jobs),
        deepen=deepen,
    )
    request = replace(request, options=replace(request.options, strict=strict, verbose=verbose))
    selects = [*(words or ()), *(tag or ()), *(matrix or ()), *filter(None, (expression, script, module, shard))]
    if verify is not None:
        others = ["--lf"] * last_failed + ["--resume"] * (resume is not None)
        _refuse_others("--verify repeats what failed in a stored run", [*selects, *others])
        _verify(request, verify, dry_run=dry_run)
    if resume is not None:
        others = ["--lf"] * last_failed
        _refuse_others("--resume goes on with the plan of a stored run", [*selects, *others])
        _resume(request, resume, dry_run=dry_run)
    if last_failed:
        _refuse_others("--lf repeats what a stored run did not end as expected", selects)
        _repeat_failures(request, dry_run=dry_run)
    invocation = replace(
        invocation_from_args(context, words, script=script, module=module, ranks=ranks),
        tags=tuple(tag or ()), expression=expression, matrix=tuple(matrix or ()), shard=_parse_shard(shard),
        python=python,
    )  # fmt: skip
    _launch(request, planned(invocation, machine_facts()), dry_run=dry_run)


def invocation_from_args(
    context: typer.Context,
    words: Sequence[str] | None,
    *,
    script: str | None = None,
    module: str | None = None,
    ranks: int = 2,
) -> Invocation:
    """Return what to launch: the scenarios among `words`, or the one program that a word, `script` or `module` names.

    Raises UsageError if several programs are named, or if words follow `--` and no program is named.
    """
    from nsa_harness.supervisor.launch.planning import Invocation, Script

    program_args: tuple[str, ...] = context.obj or ()
    files = [word for word in words or () if word.endswith(".py") and "=" not in word]
    programs = [*files, *filter(None, (script, module))]
    if len(programs) > 1:
        raise UsageError(f"one program a run; {programs[0]} and {programs[1]} were named")
    if program_args and not programs:
        raise UsageError("`--` passes words on to a program; name it: nsa-harness run FILE.py -- ARGS")
    program = Script(file=programs[0], ranks=ranks, args=program_args, module=module is not None) if programs else None
    scenarios = tuple(word for word in words or () if word not in files)
    return Invocation(words=scenarios, script=program, working_dir=Path.cwd(), environ=os.environ)


def _repeat_failures(request: RunRequest, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.run import agreed_before, failed_specs
    from nsa_harness.supervisor.launch.planning import Plan

    specs = failed_specs(None, request.options.out)
    if not specs:
        print("the newest run ended as expected in every scenario: nothing to repeat", file=sys.stderr)
        raise typer.Exit
    _launch(request, Plan(specs=specs, notes=(), agreed=agreed_before(None, request.options.out)), dry_run=dry_run)


def _verify(request: RunRequest, stored: Path, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.verify import VerifyRequest, run_verify

    verification = VerifyRequest(stored=stored, least=request.policy.repeat, dry_run=dry_run, options=request.options)
    raise typer.Exit(run_verify(verification))


def _resume(request: RunRequest, stored: str, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.run import resumed_request, run_all
    from nsa_harness.supervisor.launch.planning import Plan

    resumed = resumed_request(None if stored == AUTO else Path(stored), request)
    if dry_run:
        _launch(resumed, Plan(specs=resumed.specs, notes=()), dry_run=True)
    raise typer.Exit(run_all(resumed))


def _launch(request: RunRequest, plan: Plan, *, dry_run: bool) -> NoReturn:
    if dry_run:
        from nsa_harness.cli.text import command_events, command_lines
        from nsa_harness.supervisor.storage.redaction import Redaction

        redaction = Redaction(on=request.options.redact)
        for line in command_events(plan, redaction) if request.options.json else command_lines(plan, redaction):
            print(line)
        raise typer.Exit
    from dataclasses import replace

    from nsa_harness.commands.run import run_all

    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    raise typer.Exit(run_all(replace(request, specs=plan.specs, agreed=plan.agreed)))


def _refuse_others(reason: str, others: Sequence[str]) -> None:
    if others:
        raise UsageError(f"{reason}; {others[0]} cannot go with it")


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]):
        raise UsageError(f"--shard: expected K/N with K from 1 to N, such as 2/4, got {text!r}")
    return int(parts[1]), int(parts[2])
