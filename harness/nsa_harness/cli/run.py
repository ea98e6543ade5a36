"""`nsa-harness run`: its options, and what they ask for."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.supervisor.launch.planning import Invocation, Plan, SelectedScenario

AUTO = "auto"


class Probe(StrEnum):
    OFF = "off"
    BOARD = "board"
    FULL = "full"


# The groups of options in a command's help.
PROGRAM = {"rich_help_panel": "Your program"}
SELECTION = {"rich_help_panel": "Which scenarios"}
ATTEMPTS = {"rich_help_panel": "How often"}
REPORT = {"rich_help_panel": "Report"}

# Options of several commands.
Out = Annotated[
    Path | None,
    typer.Option(envvar="NSA_HARNESS_OUT", metavar="DIR", help="Where reports go: ./reports unless given.", **REPORT),
]
ProbeOption = Annotated[
    Probe, typer.Option(envvar="NSA_HARNESS_PROBE", help="How much instrumentation the ranks load.", **REPORT)
]

Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        envvar="NSA_HARNESS_STRICT",
        help="Exit with 125 after a SKIP, with 1 after a silent fault.",
        **REPORT,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v", "--verbose", envvar="NSA_HARNESS_VERBOSE", help="Above the answer, the evidence it rests on.", **REPORT
    ),
]
NoRedact = Annotated[
    bool,
    typer.Option("--no-redact", envvar="NSA_HARNESS_NO_REDACT", help="Leave secrets in what is written.", **REPORT),
]
GitDiff = Annotated[
    bool,
    typer.Option("--git-diff", envvar="NSA_HARNESS_GIT_DIFF", help="Store uncommitted changes in env.json.", **REPORT),
]


def known_names(incomplete: str) -> list[str]:
    """Scenarios that a shell may complete a word to."""
    return [item.name for item in _catalog() if item.name.startswith(incomplete)]


def known_tags(incomplete: str) -> list[str]:
    """Tags that a shell may complete a word to."""
    return sorted({tag for item in _catalog() for tag in item.tags if tag.startswith(incomplete)})


def _catalog() -> Sequence[SelectedScenario]:
    """Every scenario; none where a file of the user is broken, as a shell has no place for an error."""
    from nsa_harness.errors import HarnessError
    from nsa_harness.supervisor.launch.planning import every_scenario

    try:
        return every_scenario(Path.cwd())[0]
    except HarnessError:
        return ()


def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.py|PATTERN|KEY=VALUE]",
            help="Your script; or scenarios by name, glob, YAML file, plan file or spec.json, with keys to change.",
            autocompletion=known_names,
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_SCRIPT",
            metavar="FILE",
            help="The same as FILE.py; its arguments follow `--`.",
            **PROGRAM,
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "-m", envvar="NSA_HARNESS_M", metavar="MODULE", help="Run a module, as python -m does.", **PROGRAM
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(envvar="NSA_HARNESS_RANKS", metavar="N", min=1, help="Ranks of your script.", **PROGRAM)
    ] = 2,
    python: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_PYTHON",
            metavar="PATH",
            help="Interpreter of your script. Unless given: the active environment's or the python on PATH, if it has"
            " torch, else our own.",
            **PROGRAM,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "-t",
            "--tag",
            envvar="NSA_HARNESS_TAG",
            help="Scenarios with this tag.",
            metavar="TAG",
            autocompletion=known_tags,
            **SELECTION,
        ),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option(
            "-k",
            envvar="NSA_HARNESS_K",
            metavar="EXPR",
            help="Names and tags that match, as in pytest: 'ddp and not nccl'.",
            **SELECTION,
        ),
    ] = None,
    matrix: Annotated[
        list[str] | None,
        typer.Option(envvar="NSA_HARNESS_MATRIX", metavar="KEY=A,B", help="One run for each value.", **SELECTION),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_SHARD", metavar="K/N", help="Every N-th scenario, from the K-th.", **SELECTION
        ),
    ] = None,
    last_failed: Annotated[
        bool, typer.Option("--lf", envvar="NSA_HARNESS_LF", help="Only what failed in the newest run.", **SELECTION)
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            envvar="NSA_HARNESS_RESUME", metavar="[=RUN]", help="Go on with a run that was interrupted.", **SELECTION
        ),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            envvar="NSA_HARNESS_VERIFY",
            metavar="RUN",
            help='After an edit: repeat what failed in a stored run, as often as "fixed" takes.',
            **SELECTION,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(envvar="NSA_HARNESS_REPEAT", metavar="N", min=1, help="Attempts of each scenario.", **ATTEMPTS),
    ] = 1,
    retries: Annotated[
        int,
        typer.Option(
            envvar="NSA_HARNESS_RETRIES",
            metavar="N",
            min=0,
            help="More attempts where the result is not the expected one.",
            **ATTEMPTS,
        ),
    ] = 0,
    deepen: Annotated[
        bool,
        typer.Option(
            "--deepen",
            envvar="NSA_HARNESS_DEEPEN",
            help="Where a run leaves a question, up to 3 more, one change each.",
            **ATTEMPTS,
        ),
    ] = False,
    maxfail: Annotated[
        int | None,
        typer.Option(envvar="NSA_HARNESS_MAXFAIL", metavar="N", min=1, help="Stop after so many failures.", **ATTEMPTS),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            envvar="NSA_HARNESS_JOBS", metavar="N|auto", help="Runs side by side, as memory allows.", **ATTEMPTS
        ),
    ] = "1",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", envvar="NSA_HARNESS_DRY_RUN", help="Print the commands, launch nothing.", **ATTEMPTS),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="JSON lines on stdout, text on stderr.", **REPORT)
    ] = False,
    out: Out = None,
    strict: Strict = False,
    probe: ProbeOption = Probe.FULL,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    git_bisect: Annotated[  # noqa: ARG001 - main chooses the exit code by it, also where typer refuses another option
        bool,
        typer.Option(
            "--git-bisect",
            envvar="NSA_HARNESS_GIT_BISECT",
            help="For `git bisect run`: exit with 125 on a mistake.",
            **REPORT,
        ),
    ] = False,
) -> None:
    """Run your script or scenarios under torchrun, and tell PASS, FAIL or HANG with the cause."""
    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.core.schedule import Policy
    from nsa_harness.supervisor.launch.machine import machine_facts
    from nsa_harness.supervisor.launch.planning import planned
    from nsa_harness.supervisor.storage.rundir import RunOptions

    options = RunOptions(
        out=out,
        json=as_json,
        strict=strict,
        probe=probe.value,
        command=shlex.join(["nsa-harness", *sys.argv[1:]]),
        redact=not no_redact,
        git_diff=git_diff,
        verbose=verbose,
    )
    request = RunRequest(
        specs=(),
        options=options,
        policy=Policy(repeat=repeat, retries=retries, maxfail=maxfail),
        jobs=jobs_of(jobs),
        deepen=deepen,
    )
    selects = [*(words or ()), *(tag or ()), *(matrix or ()), *filter(None, (expression, script, module, shard))]
    if verify is not None:
        others = ["--lf"] * last_failed + ["--resume"] * (resume is not None)
        _alone("--verify repeats what failed in a stored run", [*selects, *others])
        _verify(request, verify, dry_run=dry_run)
    if resume is not None:
        _alone("--resume goes on with the plan of a stored run", [*selects, *(["--lf"] if last_failed else [])])
        _go_on(request, resume, dry_run=dry_run)
    if last_failed:
        _alone("--lf repeats what a stored run did not end as expected", selects)
        _again(request, dry_run=dry_run)
    question = question_of(context, words, tag, expression, script, ranks, matrix, shard, module, python)
    _launch(request, planned(question, machine_facts()), dry_run=dry_run)


def question_of(
    context: typer.Context,
    words: Sequence[str] | None,
    tag: Sequence[str] | None = None,
    expression: str | None = None,
    script: str | None = None,
    ranks: int = 2,
    matrix: Sequence[str] | None = None,
    shard: str | None = None,
    module: str | None = None,
    python: str | None = None,
) -> Invocation:
    """`script`, `module`, or a word that names a Python file: the program to run in place of scenarios."""
    from nsa_harness.supervisor.launch.planning import Invocation, Script

    passed_on: tuple[str, ...] = context.obj or ()
    files = [word for word in words or () if word.endswith(".py") and "=" not in word]
    programs = [*files, *filter(None, (script, module))]
    if len(programs) > 1:
        raise UsageError(f"one program a run; {programs[0]} and {programs[1]} were named")
    if passed_on and not programs:
        raise UsageError("`--` passes words on to a program; name it: nsa-harness run FILE.py -- ARGS")
    program = Script(file=programs[0], ranks=ranks, args=passed_on, module=module is not None) if programs else None
    return Invocation(
        words=tuple(word for word in words or () if word not in files),
        tags=tuple(tag or ()),
        expression=expression,
        script=program,
        matrix=tuple(matrix or ()),
        shard=_shard(shard),
        python=python,
        working_dir=Path.cwd(),
        environ=os.environ,
    )


def _again(request: RunRequest, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.run import agreed_before, failed_specs
    from nsa_harness.supervisor.launch.planning import Plan

    specs = failed_specs(None, request.options.out)
    if not specs:
        print("the newest run ended as expected in every scenario: nothing to repeat", file=sys.stderr)
        raise typer.Exit
    _launch(request, Plan(specs=specs, notes=(), agreed=agreed_before(None, request.options.out)), dry_run=dry_run)


def _verify(request: RunRequest, stored: Path, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.verify import VerifyRequest, run_verify

    asked = VerifyRequest(stored=stored, least=request.policy.repeat, dry_run=dry_run, options=request.options)
    raise typer.Exit(run_verify(asked))


def _go_on(request: RunRequest, resume: str, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.run import resumed_request, run_all
    from nsa_harness.supervisor.launch.planning import Plan

    resumed = resumed_request(None if resume == AUTO else Path(resume), request)
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


def _alone(what: str, others: Sequence[str]) -> None:
    if others:
        raise UsageError(f"{what}; {others[0]} cannot go with it")


def jobs_of(text: str) -> int | None:
    """How many runs side by side; None for auto."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise UsageError(f"--jobs: expected a number of runs or auto, got {text!r}")
    return int(text)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]):
        raise UsageError(f"--shard: expected K/N with K from 1 to N, such as 2/4, got {text!r}")
    return int(parts[1]), int(parts[2])
