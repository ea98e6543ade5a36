"""Run the resolved scenarios and write their output files, judge a stored run again, or record a comm.lock file.

Five modules share the work: `session` has the state of a run in progress, `scheduler` chooses the next launch,
`attempt` launches it and watches it until it ends, `judge` judges the attempt from its files, and this module connects
them.

- Ending an attempt: `Watch` (`supervisor/watch/watch.py`) decides when an attempt is over. `attempt` then calls
  `Guarded.end`, which makes the reaper end the remaining processes. If this process dies, the reaper ends them on its
  own. `Interruption` in `session` handles Ctrl-C, and `Execution._must_stop` in `scheduler` ends a plan early.
- Deciding on a HANG: the watch suspects a hang, `prove` (`core/verdict/proof.py`) proves it during the run, and `judge`
  (`core/verdict/verdict.py`) proves it again from the files. `group_waits` and `host_waits` in the same package decide
  which waits can never end. A run that passes its deadline is a FAIL.
- Naming the cause: `diagnose` (`core/diagnosis/engine.py`) finds it, and `outcome_of` (`core/outcome/outcome.py`) puts
  it into the outcome.
- Writing files: `supervisor/storage/rundir.py` has the file names and the functions that write. `commands/judge.py`
  writes the files of an attempt, `render/documents/documents.py` the files of the run, and the watch its journal and
  dumps.

Modules that a launch does not need are imported inside functions, so that the ranks start sooner. `attempt` imports the
modules that watch, judge and write while the ranks start.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from nsa_harness import __version__
from nsa_harness.commands.engine_job import check_nodes
from nsa_harness.commands.scheduler import Execution, RunRequest
from nsa_harness.commands.session import report_of, run_directory, session, write_report
from nsa_harness.commands.stored_job import is_open
from nsa_harness.core.comparison.communication import Lock, bytes_of
from nsa_harness.core.comparison.plan_file import PlanText
from nsa_harness.core.comparison.severity import strict_exit_code
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import LockedSchedule, RunSpec, Skip
from nsa_harness.core.report import Outcome, Report, Status, exit_code
from nsa_harness.core.schedule import is_as_expected
from nsa_harness.errors import HarnessError, StoredRunError, UsageError
from nsa_harness.render.documents.plain_text import prompt_text
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.listener import Listener
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.comm_lock import lock_text, parse_lock, recorded, varying_calls, with_large_recorder
from nsa_harness.supervisor.storage.record import (
    RunRecord,
    learn_launch_secrets,
    load_spec,
    plan_to_resume,
    read_record,
    with_unredacted_plan,
)
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions, find_run, refuse_if_running
from nsa_harness.supervisor.storage.safe_directory import Budget
from nsa_harness.texts.words import plural

if TYPE_CHECKING:
    from nsa_harness.core.search.report import BisectReport


def run_all(request: RunRequest, screen: Listener | None = None) -> int:
    """Run everything that was requested, write the output files, and return the exit code."""
    if request.engine is not None:
        for spec in request.specs:
            if isinstance(spec, RunSpec):
                check_nodes(spec, request.engine)
    end_dead_runs()
    with run_directory(request.options, request.resume_in) as run:
        report = _run_in(run, request, screen)
    return strict_exit_code(report) if request.options.strict else exit_code(report)


def _run_in(run: RunDir, request: RunRequest, screen: Listener | None) -> Report:
    before = [] if request.resume_in is None else judge_attempts(run)
    plan_file = request.plan_file or (shipped_plan() if request.resume_in is None else None)
    with session(
        run, request.options, request.specs, screen=screen, in_parallel=request.jobs != 1, policy=request.policy,
        jobs=request.jobs, deepen=request.deepen, engine=request.engine, plan_file=plan_file,
    ) as running:  # fmt: skip
        outcomes = Execution(session=running, request=request).outcomes_after(before)
        report = running.write_documents(outcomes)
        running.broadcast(lambda listener: listener.on_done(report, run.path))
    return report


_NOT_RECORDED = 125  # exit code of `lock` if a healthy run has no step that can be recorded


def locked(spec: RunSpec, file: Path, recorder: str = "nsa-harness lock") -> RunSpec:
    """Return the launch, to be compared with a comm.lock file.

    `recorder`: the command that writes the file. Raises UsageError if the file cannot be read, and ScenarioError if it
    is damaged.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"{file}: {reason}; `{recorder}` records a healthy run in it") from None
    parse_lock(text, str(file))
    expect = replace(spec.expect, communication=LockedSchedule(file=file.name, text=text))
    return with_large_recorder(replace(spec, expect=expect))


def lock(spec: RunSpec, file: Path, options: RunOptions) -> int:
    """Run a launch once, write what a step of it communicates to `file`, and return the exit code.

    Nothing is written if the run does not pass, or if no two steps in a row communicated alike.
    """
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no directory {file.parent}")
    end_dead_runs()
    with run_directory(options) as run:
        report = _run_in(run, RunRequest(specs=(with_large_recorder(spec),), options=options), None)
        if any(outcome.verdict.status is not Status.PASS or not outcome.expected for outcome in report.outcomes):
            print(f"{file} was not written, because the run is not healthy", file=sys.stderr)
            return exit_code(report) or _NOT_RECORDED
        was_written, lines = write_lock(run.attempt(spec.scenario), spec.ranks, file)
    print(*lines, sep="\n", file=sys.stdout if was_written else sys.stderr)
    return 0 if was_written else _NOT_RECORDED


def write_lock(attempt: AttemptDir, ranks: int, file: Path) -> tuple[bool, list[str]]:
    """Write what a step of a stored run communicates to `file`.

    Returns whether it was written, and lines about it. Nothing is written if no two steps in a row communicated alike.
    """
    found = recorded(attempt, ranks)
    if found.step is None or not found.is_steady:
        reason = found.reason or "no two steps in a row communicated alike"
        return False, [f"{file} was not written: {reason}", *varying_calls(found)]
    text = lock_text(Lock(ranks=ranks, roles=found.roles))
    is_same = file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text
    file.write_text(text, encoding="utf-8")
    names = ["each rank" if role.who == "all" else f"role {role.who}" for role in found.roles]
    return True, [
        *(
            f"{name} makes {plural(len(role.operations), 'call')} with {bytes_of(role.operations):,} bytes in a step"
            for name, role in zip(names, found.roles, strict=True)
        ),
        f"{file} is unchanged" if is_same else f"wrote {file}",
    ]


class ReportFormat(Enum):
    """The format in which `nsa-harness report` prints a stored run."""

    LINES = "lines"
    JSON = "json"
    PROMPT = "prompt"


def rejudge(
    path: Path | None,
    *,
    report_format: ReportFormat = ReportFormat.LINES,
    strict: bool = False,
    out: Path | None = None,
    redact: bool = True,
    verbose: bool = False,
) -> int:
    """Judge a stored run again, print the report, and return the exit code that `run` would return.

    `path`: the run directory, or None for the latest run below `out`. `redact`: whether to remove secrets. Raises
    StillRunning, and writes nothing, if the run has not ended.
    """
    run = find_run(path, out or Path("reports"), redact=redact)
    with refuse_if_running(run):
        report = _report_again(run)
    if report_format is ReportFormat.JSON:
        sys.stdout.write(to_json(report, PLAYBOOK))
    elif report_format is ReportFormat.PROMPT:
        sys.stdout.write(prompt_text(report))
    else:
        _print_report(run, report, verbose=verbose)
    return strict_exit_code(report) if strict else exit_code(report)


def _report_again(run: RunDir) -> Report:
    """Judge a stored run again, and update its output files unless they are read-only."""
    from nsa_harness.commands.distribute import append_stored_hosts
    from nsa_harness.core.outcome.outcome import skipped_outcome

    attempts = list(run.attempts())
    if attempts and run.directory.is_file(run.report) and not any(run.directory.is_file(one.spec) for one in attempts):
        raise StoredRunError(
            f"{run.path}: an export has no launch settings, so it cannot be judged again; its answer is in"
            f" {run.html.name}"
        )
    record = read_record(run)
    with suppress(StoredRunError):
        learn_launch_secrets(run, with_unredacted_plan(run, record).plan)
    skips = [skipped_outcome(spec) for spec in record.plan if isinstance(spec, Skip)]
    report = report_of(run, record, [*_judge_or_error(run, record), *skips])
    if os.access(run.path, os.W_OK):
        write_report(run, report, _search(run))
        append_stored_hosts(run, record, report.outcomes)
        redact_run(run)
    return report


def _search(run: RunDir) -> BisectReport | None:
    if not run.directory.is_file(run.search):
        from nsa_harness.supervisor.experiments.journal import unfinished_search_text

        if note := unfinished_search_text(run):
            print(f"note: {note}", file=sys.stderr)
        return None
    from nsa_harness.render.experiments.bisect_json import stored_search

    try:
        return stored_search(run)
    except HarnessError as error:
        print(f"note: {error}", file=sys.stderr)
        return None


def failed_specs(path: Path | None, out: Path | None) -> tuple[RunSpec, ...]:
    """Return the launches of a stored run, by default the latest, that did not end as expected, for --lf."""
    run = find_run(path, out or Path("reports"))
    with refuse_if_running(run):
        attempts = with_flakiness(judge_attempts(run))
    failures = [outcome for outcome in attempts if outcome.final and not is_as_expected(outcome)]
    return tuple(load_spec(run.path / outcome.dir / "spec.json", run.directory) for outcome in failures)


def request_to_resume(path: Path | None, request: RunRequest) -> RunRequest:
    """Return a request that continues a stored run. Raise StoredRunError if the run cannot be continued."""
    run = find_run(path, request.options.parent)
    record = plan_to_resume(run)
    return replace(
        request,
        specs=record.plan,
        options=replace(request.options, probe=record.probe, command=record.command),
        policy=record.policy,
        jobs=record.jobs,
        deepen=record.deepen,
        engine=record.engine,
        resume_in=run.path,
        plan_file=record.plan_text,
    )


def stored_plan_file(path: Path | None, out: Path | None) -> PlanText | None:
    """Return the plan file that a stored run used, or None if the run used the default plan."""
    return read_record(find_run(path, out or Path("reports"))).plan_text


def judge_attempts(run: RunDir) -> list[Outcome]:
    """Judge every attempt of a stored run whose job has ended. Raise HarnessError if one cannot be judged."""
    from nsa_harness.commands.judge import judge_stored

    budget = Budget()
    return [judge_stored(attempt, budget) for attempt in run.attempts() if not is_open(attempt)]


def _judge_or_error(run: RunDir, record: RunRecord) -> list[Outcome]:
    """Judge every attempt of a stored run. An attempt that cannot be judged gets the verdict ERROR."""
    from nsa_harness.commands.judge import error_outcome, judge_stored
    from nsa_harness.render.documents.documents import log_fault

    outcomes, budget = [], Budget()
    for attempt in run.attempts():
        try:
            outcomes.append(judge_stored(attempt, budget))
        except Exception as error:
            outcomes.append(error_outcome(attempt, record.plan, error))
            if not isinstance(error, HarnessError):
                log_fault(run, f"{attempt.path.name} could not be judged:\n{traceback.format_exc()}")
    return outcomes


def _print_report(run: RunDir, report: Report, *, verbose: bool) -> None:
    several = len(report.outcomes) > 1
    screen = Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, several=several, verbose=verbose)
    for outcome in report.outcomes:
        screen.on_outcome(outcome, run.path)
    screen.on_done(report, run.path)
