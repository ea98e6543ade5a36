"""The command `nsa-harness run`: its options, and how they are turned into launches."""

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
    CLUSTER,
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
    Strict,
    Verbose,
    argument,
    engine_choice,
    facts_of,
    option,
    origin_of_option,
    parse_jobs,
    run_options,
    scenario_names,
    scenario_tags,
)
from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.core.plan import RunSpec, Skip
    from nsa_harness.supervisor.launch.planning import Invocation, LaunchPlan

_TARGETS = (
    "Your script; or scenarios, by name, glob, YAML file, plan file or stored spec.json. KEY=VALUE changes a setting,"
    " such as train.steps=3."
)
_PYTHON = (
    "Python interpreter for your script. Default: the active environment's, or the python on PATH, if it has torch;"
    " otherwise the interpreter of nsa-harness."
)
_VERIFY = "After an edit, repeat what failed in a stored run until it fails again or counts as fixed."
_LOCKED = (
    "Fail if a training step does not communicate as recorded by `nsa-harness lock`. Default: NAME.comm.lock beside the"
    " script."
)
_RETRIES_INFRA = "Repeat a job up to N times if a node, a limit of the cluster or another user ended it."
_DISTRIBUTE = "idle: run on each idle node of the engine, then on pairs of them, and name the bad hosts."
_JOBS = "Runs in parallel, if memory allows. auto: as many as cores, GPUs and memory allow."


def run(
    context: typer.Context,
    targets: Annotated[
        list[str] | None, argument("[FILE.py|PATTERN|KEY=VALUE]", _TARGETS, autocompletion=scenario_names)
    ] = None,
    script: Script = None,
    module: Annotated[str | None, option("-m MODULE", "Run a module, like `python -m MODULE`.", PROGRAM)] = None,
    ranks: Ranks = 2,
    python: Annotated[str | None, option("--python PATH", _PYTHON, PROGRAM)] = None,
    tag: Annotated[
        list[str] | None,
        option("-t --tag TAG", "Select scenarios with this tag.", SELECTION, autocompletion=scenario_tags),
    ] = None,
    expression: Annotated[
        str | None, option("-k EXPR", "Select by name and tag, as in pytest: 'ddp and not nccl'.", SELECTION)
    ] = None,
    matrix: Annotated[
        list[str] | None, option("--matrix KEY=A,B", "Run once for each value of this key.", SELECTION)
    ] = None,
    shard: Annotated[
        str | None,
        option(
            "--shard K/N", "Run every N-th scenario, starting with the K-th, to split a plan over N jobs.", SELECTION
        ),
    ] = None,
    last_failed: Annotated[
        bool, option("--lf", "Repeat what did not end as expected in the latest run.", SELECTION)
    ] = False,
    resume: Annotated[
        str | None, option("--resume [=RUN]", "Continue an interrupted run. Default: the latest run.", SELECTION)
    ] = None,
    verify: Annotated[Path | None, option("--verify RUN", _VERIFY, SELECTION)] = None,
    locked: Annotated[str | None, option("--locked [=FILE]", _LOCKED, ATTEMPTS)] = None,
    repeat: Annotated[int, option("--repeat N", "Attempts per scenario.", ATTEMPTS, min=1)] = 1,
    retries: Annotated[
        int, option("--retries N", "Repeat a scenario up to N more times until it ends as expected.", ATTEMPTS, min=0)
    ] = 0,
    deepen: Annotated[
        bool,
        option(
            "--deepen",
            "If a failure is not fully explained, run it up to 3 more times, with one change each.",
            ATTEMPTS,
        ),
    ] = False,
    maxfail: Annotated[int | None, option("--maxfail N", "Stop after N failures.", ATTEMPTS, min=1)] = None,
    jobs: Annotated[str, option("--jobs N|auto", _JOBS, ATTEMPTS)] = "1",
    dry_run: Annotated[bool, option("--dry-run", "Print the commands and launch nothing.", ATTEMPTS)] = False,
    engine: EngineName = None,
    nodes: Nodes = None,
    partition: Partition = None,
    account: Account = None,
    constraint: Constraint = None,
    gpus_per_node: GpusPerNode = None,
    site: SiteFile = None,
    retries_infra: Annotated[int, option("--retries-infra N", _RETRIES_INFRA, CLUSTER, min=0)] = 0,
    distribute: Annotated[str | None, option("--distribute NODES", _DISTRIBUTE, CLUSTER)] = None,
    as_json: JsonLines = False,
    out: Out = None,
    strict: Strict = False,
    probe: ProbeMode = Probe.FULL,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
    git_diff: GitDiff = False,
    no_values: NoValues = False,
    notify: Notify = None,
    # `main` reads --git-bisect itself, because it must also apply if typer rejects another option.
    git_bisect: Annotated[  # noqa: ARG001
        bool,
        option(
            "--git-bisect",
            "For `git bisect run`: exit with 125 after a usage error, so that git skips the commit.",
            REPORT,
        ),
    ] = False,
) -> None:
    """Run a script or scenarios under torchrun and judge each run.

    Each run gets a verdict: PASS, FAIL or HANG. A FAIL or HANG is reported with its cause, rank and line.
    """
    from dataclasses import replace

    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.core.schedule import Policy
    from nsa_harness.supervisor.launch.planning import plan_launches

    choice = engine_choice(
        engine, site, nodes=nodes, partition=partition, account=account, constraint=constraint,
        gpus_per_node=gpus_per_node,
    )  # fmt: skip
    request = RunRequest(
        specs=(),
        options=run_options(
            out,
            probe,
            as_json=as_json,
            no_redact=no_redact,
            git_diff=git_diff,
            no_values=no_values,
            strict=strict,
            verbose=verbose,
            notify=notify,
        ),
        policy=Policy(repeat=repeat, retries=retries, maxfail=maxfail, retries_infra=retries_infra),
        engine=choice,
        jobs=parse_jobs(jobs),
        deepen=deepen,
    )
    if distribute is not None:
        if distribute != "idle" or choice is None:
            raise UsageError("--distribute=idle is the only form, and it needs --engine slurm or --engine hosts")
        unfit = {
            "--verify": verify is not None,
            "--resume": resume is not None,
            "--lf": last_failed,
            "--dry-run": dry_run,
        }
        unfit |= {"--nodes": nodes is not None, "--deepen": deepen, "--maxfail": maxfail is not None}
        _refuse_others("--distribute chooses the nodes of each job", [name for name, given in unfit.items() if given])
    selection_args = [
        *(targets or ()),
        *(tag or ()),
        *(matrix or ()),
        *filter(None, (expression, script, module, shard)),
    ]
    if verify is not None:
        other_modes = ["--lf"] * last_failed + ["--resume"] * (resume is not None)
        _refuse_others("--verify repeats what failed in a stored run", [*selection_args, *other_modes])
        _verify(request, verify, dry_run=dry_run)
    if resume is not None:
        other_modes = ["--lf"] * last_failed
        _refuse_others("--resume continues a stored run with its own scenarios", [*selection_args, *other_modes])
        _resume(request, resume, dry_run=dry_run)
    if last_failed:
        _refuse_others("--lf repeats what did not end as expected in the latest run", selection_args)
        _repeat_failures(request, dry_run=dry_run)
    invocation = replace(
        invocation_from_args(context, targets, script=script, module=module, ranks=ranks),
        tags=tuple(tag or ()), expression=expression, matrix=tuple(matrix or ()), shard=_parse_shard(shard),
        python=python,
    )  # fmt: skip
    plan = plan_launches(invocation, facts_of(choice))
    if locked is not None:
        plan = replace(plan, specs=tuple(with_lock(spec, invocation, locked) for spec in plan.specs))
    if distribute is not None:
        _distribute(request, plan)
    _launch(request, plan, dry_run=dry_run)


def with_lock(spec: RunSpec | Skip, invocation: Invocation, file: str) -> RunSpec | Skip:
    """Return a launch that is compared with a comm.lock file; AUTO: with the one of this scenario or script."""
    from nsa_harness.commands.run import locked
    from nsa_harness.core.plan import RunSpec

    if not isinstance(spec, RunSpec):
        return spec
    return locked(spec, lock_file(spec, invocation) if file == AUTO else Path(file))


def lock_file(spec: RunSpec, invocation: Invocation) -> Path:
    """Return the comm.lock file of a launch: beside its script, or in the working directory if it has none."""
    from nsa_harness.supervisor.storage.comm_lock import SUFFIX

    program = invocation.script
    return Path(spec.scenario + SUFFIX) if program is None or program.module else Path(program.file).with_suffix(SUFFIX)


def lock(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        argument("[FILE.py|SCENARIO|KEY=VALUE]", "Your script, or a scenario.", autocompletion=scenario_names),
    ] = None,
    module: Annotated[str | None, option("-m MODULE", "Run a module, like `python -m MODULE`.", PROGRAM)] = None,
    ranks: Ranks = 2,
    python: Annotated[str | None, option("--python PATH", _PYTHON, PROGRAM)] = None,
    to: Annotated[Path | None, option("--to FILE", "File to write. Default: NAME.comm.lock beside the script.")] = None,
    out: Out = None,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Record what a healthy training step communicates.

    Runs a script or scenario once and writes a file for review. The file lists each collective with its group,
    operation, dtype, size and call site. `nsa-harness run --locked` fails if a later run communicates differently.
    """
    from dataclasses import replace

    from nsa_harness.commands.run import lock as record
    from nsa_harness.core.plan import RunSpec
    from nsa_harness.supervisor.launch.machine import machine_facts
    from nsa_harness.supervisor.launch.planning import plan_launches

    invocation = replace(invocation_from_args(context, targets, module=module, ranks=ranks), python=python)
    plan = plan_launches(invocation, machine_facts())
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    specs = [spec for spec in plan.specs if isinstance(spec, RunSpec)]
    if len(plan.specs) != 1 or not specs:
        raise UsageError(f"lock records one launch, and {len(specs)} can run; name one script or scenario")
    options = run_options(out, Probe.FULL, as_json=False, no_redact=no_redact, git_diff=False)
    raise typer.Exit(record(specs[0], to or lock_file(specs[0], invocation), replace(options, verbose=verbose)))


def invocation_from_args(
    context: typer.Context,
    targets: Sequence[str] | None,
    *,
    script: str | None = None,
    module: str | None = None,
    ranks: int = 2,
) -> Invocation:
    """Return the program or scenarios that the command line asks to launch.

    It launches the one program that `targets`, `script` or `module` names, or else the scenarios that `targets` select.
    Arguments after `--` are in `context.obj`. Raises UsageError if several programs are named, or if arguments follow
    `--` but no program is named.
    """
    from nsa_harness.supervisor.launch.planning import Invocation, Script

    program_args: tuple[str, ...] = context.obj or ()
    files = [word for word in targets or () if word.endswith(".py") and "=" not in word]
    programs = [*files, *filter(None, (script, module))]
    if len(programs) > 1:
        raise UsageError(f"{programs[0]} and {programs[1]}: only one program can run at a time; name one of them")
    if program_args and not programs:
        raise UsageError("`--` passes arguments to your program, but none is named: nsa-harness run FILE.py -- ARGS")
    program = (
        Script(
            file=programs[0], ranks=ranks, args=program_args, module=module is not None,
            ranks_origin=origin_of_option(context, "ranks"),
        )
        if programs
        else None
    )  # fmt: skip
    scenarios = tuple(word for word in targets or () if word not in files)
    return Invocation(arguments=scenarios, script=program, working_dir=Path.cwd(), environ=os.environ)


def _repeat_failures(request: RunRequest, *, dry_run: bool) -> NoReturn:
    """Launch the failed scenarios of the latest run again, or only print their commands, and exit."""
    from nsa_harness.commands.run import failed_specs, stored_plan_file
    from nsa_harness.supervisor.launch.planning import LaunchPlan

    specs = failed_specs(None, request.options.out)
    if not specs:
        print("nothing to repeat: every scenario of the latest run ended as expected", file=sys.stderr)
        raise typer.Exit
    _launch(
        request,
        LaunchPlan(specs=specs, notes=(), plan_text=stored_plan_file(None, request.options.out)),
        dry_run=dry_run,
    )


def _verify(request: RunRequest, run_path: Path, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.verify import VerifyRequest, run_verify

    verification = VerifyRequest(
        run_path=run_path, min_passes=request.policy.repeat, dry_run=dry_run, engine=request.engine,
        options=request.options,
    )  # fmt: skip
    raise typer.Exit(run_verify(verification))


def _resume(request: RunRequest, run_name: str, *, dry_run: bool) -> NoReturn:
    from nsa_harness.commands.run import request_to_resume, run_all
    from nsa_harness.supervisor.launch.planning import LaunchPlan

    resume_request = request_to_resume(None if run_name == AUTO else Path(run_name), request)
    if dry_run:
        _launch(resume_request, LaunchPlan(specs=resume_request.specs, notes=()), dry_run=True)
    if resume_request.resume_in is not None and resume_request.engine is not None:
        from nsa_harness.commands.distribute import run_distributed
        from nsa_harness.commands.engine_job import check_engine
        from nsa_harness.supervisor.storage.rundir import RunDir

        run = RunDir(resume_request.resume_in)
        if run.directory.is_file(run.hosts):
            choice = resume_request.engine
            raise typer.Exit(run_distributed(resume_request, choice, check_engine(choice)))
    raise typer.Exit(run_all(resume_request))


def _launch(request: RunRequest, plan: LaunchPlan, *, dry_run: bool) -> NoReturn:
    """Launch the runs of a plan, or only print their commands, and exit with the resulting exit code."""
    if dry_run and request.engine is not None:
        from nsa_harness.commands.engine_job import scripts

        print("\n".join(scripts(plan.specs, request.engine, request.options)), end="")
        raise typer.Exit
    if dry_run:
        from nsa_harness.cli.text import command_events, command_lines
        from nsa_harness.supervisor.storage.redaction import Redaction

        redaction = Redaction(is_on=request.options.redact)
        for line in command_events(plan, redaction) if request.options.json else command_lines(plan, redaction):
            print(line)
        raise typer.Exit
    from dataclasses import replace

    from nsa_harness.commands.run import run_all

    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    raise typer.Exit(run_all(replace(request, specs=plan.specs, plan_file=plan.plan_text)))


def _distribute(request: RunRequest, plan: LaunchPlan) -> NoReturn:
    """Search for bad hosts with the launch of a plan, and exit with the resulting exit code."""
    from dataclasses import replace

    from nsa_harness.commands.distribute import run_distributed
    from nsa_harness.commands.engine_job import check_engine

    assert request.engine is not None
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    choice = replace(request.engine, nodes=1)
    raise typer.Exit(run_distributed(replace(request, specs=plan.specs), choice, check_engine(choice)))


def _refuse_others(reason: str, conflicting: Sequence[str]) -> None:
    """Raise UsageError if there are any conflicting arguments. `reason` starts the error message."""
    if conflicting:
        raise UsageError(f"{reason}; remove {conflicting[0]}")


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    """Parse --shard=K/N into K and N, or None if it is not set. Raise UsageError if it is invalid."""
    if text is None:
        return None
    parts = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if parts is None or not 1 <= int(parts[1]) <= int(parts[2]):
        raise UsageError(f"--shard: expected K/N with K from 1 to N, such as 2/4, got {text!r}")
    return int(parts[1]), int(parts[2])
