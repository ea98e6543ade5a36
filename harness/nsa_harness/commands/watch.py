"""Judge jobs of the user like attempts: `watch` observes a command to its end, `attach` inspects a running job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from nsa_harness import __version__
from nsa_harness.commands.attempt import AttemptAudience, prepare
from nsa_harness.commands.judge import judge_attempt
from nsa_harness.commands.session import report_of, run_directory, session, write_report
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.report import Outcome, Status, exit_code
from nsa_harness.core.scenario.observed_job import job_name, observed_spec, with_ranks
from nsa_harness.render.events import Events
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.render.terminal.answer import answer_lines
from nsa_harness.render.text import escape
from nsa_harness.supervisor.capture.procfs import command_words
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.observe.attach import (
    RunningJob,
    find_job,
    jobs_of_this_user,
    observe_until_decided,
    only_job,
    passive_observer,
)
from nsa_harness.supervisor.observe.observed_job import (
    Hook,
    ObservedJob,
    SignalForwarder,
    WatchedCommand,
    check_command,
    shell_status,
    start_watched_command,
)
from nsa_harness.supervisor.storage.record import Record, write_record
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions, append_line, create_run, locked
from nsa_harness.texts import words

_GRACE_S = 1.0
_TIMED_OUT = 124


class OnHang(StrEnum):
    REPORT = "report"
    EXEC = "exec"
    KILL = "kill"


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    command: tuple[str, ...]
    limits: Limits
    out: Path | None
    on_hang: OnHang
    hook: str  # the command of `exec`, else ""
    probe: str
    json: bool  # print events instead of lines, on stderr because stdout belongs to the job
    quiet: bool
    typed: str  # the command line of the user
    redact: bool = True
    git_diff: bool = False


def watch(request: WatchRequest) -> int:
    """Run and observe the command and write the report. Return the command's exit status, or 124 if it was ended."""
    check_command(request.command)
    forwarder = SignalForwarder()
    run = create_run(request.out or Path("reports"), redact=request.redact, git_diff=request.git_diff)
    sweep_dead_runs()
    with locked(run):
        return Watched(request=request, run=run, forwarder=forwarder).run_it()


@dataclass(kw_only=True)
class Watched:
    """One observed command with its attempts."""

    request: WatchRequest
    run: RunDir
    forwarder: SignalForwarder
    outcomes: list[Outcome] = field(default_factory=list)
    number: int = 1  # number of the attempt
    starts: int = 1  # how often the job itself started its ranks
    hooks: list[Hook] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = machine_facts()
        self.lines = WatchedCommandOutput(sys.stderr, quiet=self.request.quiet)
        self.spec = self._spec()
        self.record = Record(
            command=self.request.typed,
            harness=__version__,
            machine=self.facts,
            controller=os.getpid(),
            plan=(self.spec,),
            probe=self.request.probe,
            agreed=shipped_plan(),
        )
        write_record(self.run, self.record)

    def run_it(self) -> int:
        began = time.monotonic()
        clock: Callable[[], float] = lambda: time.monotonic() - began  # noqa: E731
        door = self.run.door
        with door.appending(self.run.events) as events, door.appending(self.run.log) as log:
            shown = Events(sys.stderr, self.run.run_id, clock) if self.request.json else self.lines
            stored = (Events(events, self.run.run_id, clock), WatchedCommandOutput(log, quiet=False))
            self.broadcast = Broadcast(listeners=(*stored, shown))
            status = self._attempts()
        redact_run(self.run)
        return status

    def _attempts(self) -> int:
        attempt = self.run.attempt(self.spec.scenario)
        self.broadcast(lambda one: one.on_plan(self.facts, [self.run.redaction.spec(self.spec)]))
        prepare(attempt, self.spec, self.facts)
        watched = start_watched_command(self.request.command, attempt, self.request.probe, self.forwarder)
        self.forwarder.follow(watched.child.pid)
        if not self.request.json:
            self.lines.begun(self.run.path)
        ended_by_us = self._observe(watched, attempt)
        status = _TIMED_OUT if ended_by_us else shell_status(watched.child.wait())
        for hook in self.hooks:
            hook.wait()
        return status

    def _observe(self, watched: WatchedCommand, attempt: AttemptDir) -> bool:
        """Observe every attempt to its end. Return whether nsa-harness ended the job."""
        while True:
            self.broadcast(lambda one: one.on_launch(self.run.redaction.spec(self.spec)))
            observation = self._observation(watched, attempt)
            ending = observation.watch.run()
            if observation.ranks.restarted:
                attempt = self._next(watched, observation)
                continue
            ends_it = ending in (Ending.STALL, Ending.DEADLINE) and not observation.watch.reported_proof
            if ends_it:
                watched.end(_GRACE_S)
            else:
                watched.leave()
            outcome = self._judge(observation, self.number)
            self._report(outcome, done=True)
            if ends_it and not self.request.json:
                self.lines.still_there(outcome, self.run.path, "the job was ended")
            return ends_it

    def _observation(self, watched: WatchedCommand, attempt: AttemptDir) -> ObservedJob:
        observation = ObservedJob(
            watched=watched,
            spec=self.spec,
            attempt=attempt,
            audience=AttemptAudience(name=attempt.path.name, tell=self.broadcast),
            forwarder=self.forwarder,
            on_ending=lambda ending: self._report_running(observation, ending),
            ends_it=self.request.on_hang is OnHang.KILL,
        )
        return observation

    def _next(self, watched: WatchedCommand, observation: ObservedJob) -> AttemptDir:
        """Begin the next attempt: the agent or the program has started the ranks again."""
        ended = self.number
        if observation.ranks.set_aside:
            self.number += 1
        else:
            self.number, self.starts = 1, self.starts + 1
        self.spec = self._spec()
        attempt = self.run.attempt(self.spec.scenario, self.number)
        prepare(attempt, self.spec, self.facts)
        watched.next_attempt(attempt)
        outcome = self._judge(observation, ended)
        self._report(outcome)
        self.outcomes.append(outcome)
        return attempt

    def _spec(self) -> RunSpec:
        """Return the spec of this attempt. A restart continues the last attempt and does not repeat it."""
        command = self.request.command
        name = job_name(command) if self.starts == 1 else f"{job_name(command)}-{self.starts}"
        launch = json.dumps([command, os.getcwd(), self.number, self.starts]).encode()
        about = f"observed: {shlex.join(command)}"
        return observed_spec(name, about, command, self.request.limits, hashlib.sha256(launch).hexdigest()[:16])

    def _judge(self, observation: ObservedJob, number: int) -> Outcome:
        return judge_attempt(observation.attempt, observation.resolved_spec(), self.facts.host, number=number)

    def _report(self, outcome: Outcome, *, done: bool = False) -> None:
        report = report_of(self.run, self.record, [*self.outcomes, outcome])
        write_report(self.run, report)
        if done:
            self.broadcast(lambda one: one.on_outcome(outcome, self.run.path))
            self.broadcast(lambda one: one.on_done(report, self.run.path))

    def _report_running(self, observation: ObservedJob, ending: Ending) -> None:
        """Report a proven HANG, or a passed deadline, while the job runs on."""
        outcome = self._judge(observation, self.number)
        self._report(outcome)
        self.broadcast(lambda one: one.on_outcome(outcome, self.run.path))
        if not self.request.json:
            self.lines.still_there(outcome, self.run.path, "the job runs on")
        if self.request.on_hang is OnHang.EXEC and ending in (Ending.STALL, Ending.DEADLINE):
            self._call_hook(observation)

    def _call_hook(self, observation: ObservedJob) -> None:
        """Start the user's command of `--on-hang=exec`, which gets the path of the verdict."""

        def report_failure(why: str) -> None:
            what = self.run.redaction.text(f"--on-hang=exec {self.request.hook}")
            append_line(observation.attempt.watch, {"event": "trouble", "what": what, "why": why, "rank": None})
            self.lines.say(f"{what}: {why}")

        hook = Hook(command=self.request.hook, document=observation.attempt.verdict, failed=report_failure)
        self.hooks.append(hook)
        hook.start()


_NAME = "nsa-harness"
_COLUMNS = 100  # the lines appear among the job's own output


class WatchedCommandOutput(Listener):
    """Prints whole lines with nsa-harness's name. If stderr is closed, the lines are lost and nothing else happens."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        """With `quiet`, print nothing at the start and nothing about a failure, which the job reports itself."""
        self._stream = stream
        self._quiet = quiet
        self._printed: tuple[str, Status, str | None] | None = None  # attempt, status and cause of the last answer
        self._columns = min(shutil.get_terminal_size((_COLUMNS, 24)).columns - len(f"{_NAME}: "), _COLUMNS)

    def begun(self, run_dir: Path) -> None:
        if not self._quiet:
            self.say(f"observing; report: {run_dir}/SUMMARY.md")

    def on_stall(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.say(f"stall: {text}")

    def on_progress_again(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.say(f"moves: {text}")

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        """Print the answer the first time. A HANG that was printed when it was proven gets one line at the end."""
        verdict = outcome.verdict
        if verdict.status is not Status.HANG and (verdict.status is not Status.FAIL or self._quiet):
            return
        answer = (outcome.dir, verdict.status, verdict.cause)
        if answer == self._printed:
            self.still_there(outcome, run_dir, "the job has ended")
            return
        self._printed = answer
        for line in answer_lines(outcome, self._columns):
            self._line(line)

    def still_there(self, outcome: Outcome, run_dir: Path, then: str) -> None:
        """Print the verdict in one line, with the path of the report."""
        name = outcome.verdict.status if outcome.verdict.status is Status.HANG else f"{outcome.verdict.cause}"
        self.say(f"{name}; {then}; report: {run_dir}/SUMMARY.md")

    def say(self, text: str) -> None:
        self._line(escape(text))

    def _line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{_NAME}: {text}".rstrip() + "\n")
            self._stream.flush()


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    pid: int
    for_s: float
    limits: Limits
    out: Path | None
    json: bool
    typed: str
    redact: bool = True
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class ObserverAudience(AttemptAudience):
    """Passes on phases only if the job has status files, which show them."""

    def phase(self, progress: Progress) -> None:
        if any(rank.no_progress_s is not None for rank in progress.ranks):
            super().phase(progress)


def chosen_job(ask: Callable[[Sequence[str]], int | None]) -> int:
    """Return the only job of this user, or the job that `ask` chooses. Raises NoSuchJob."""
    jobs = jobs_of_this_user()
    named = ask([escape(job.text) for job in jobs]) if len(jobs) > 1 else None
    return only_job(jobs) if named is None else named


def attach(request: AttachRequest) -> int:
    """Inspect a job. Return 124 for a HANG, 0 if it makes progress, 125 if that is unknown. Raises NoSuchJob."""
    job = find_job(request.pid)
    spec, facts = _spec_of_job(request, job), machine_facts()
    options = RunOptions(
        out=request.out, json=request.json, probe="off", command=request.typed, redact=request.redact,
        verbose=request.verbose,
    )  # fmt: skip
    with (
        run_directory(options) as run,
        session(run, options, (spec,), facts=facts, agreed=shipped_plan()) as opened,
    ):
        attempt, tell = run.attempt(spec.scenario), opened.broadcast
        tell(lambda one: one.on_plan(facts, [run.redaction.spec(spec)]))
        prepare(attempt, spec, facts)
        tell(lambda one: one.on_launch(run.redaction.spec(spec)))
        with passive_observer(job) as guarded:
            observe_until_decided(
                guarded,
                spec,
                attempt,
                ObserverAudience(name=spec.scenario, tell=tell),
                interrupted=lambda: opened.interrupted,
                for_s=request.for_s,
            )
        outcome = judge_attempt(attempt, spec, facts.host, 1)
        report = opened.write_documents([outcome])
        opened.tell_outcome(outcome)
        tell(lambda one: one.on_done(report, run.path))
    redact_run(run)
    return exit_code(report)


def _spec_of_job(request: AttachRequest, job: RunningJob) -> RunSpec:
    command = command_words(request.pid) or [str(request.pid)]
    spec = observed_spec(job_name(command), f"attached to process {request.pid}", command, request.limits, "")
    spec = with_ranks(spec, max(job.ranks) + 1)
    unmarked = ("steps, modules and collectives are not known: the job was not started by nsa-harness",)
    gone = [f"{words.ranks(job.missing)} of this job: no process is there, it has ended"] if job.missing else []
    return replace(spec, notes=(*gone, *(() if job.boards else unmarked)))
