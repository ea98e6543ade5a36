"""`nsa-harness watch` and `attach`: observe and judge the user's own jobs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from nsa_harness import __version__
from nsa_harness.commands.attempt import AttemptAudience, Notify, prepare
from nsa_harness.commands.judge import judge_attempt
from nsa_harness.commands.session import notifiers, report_of, run_directory, session, write_report
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.report import Outcome, Status, exit_code
from nsa_harness.core.scenario.observed_job import job_name, observed_spec, with_ranks
from nsa_harness.render.events import Events
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.render.terminal.answer import answer_lines
from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.render.terminal.stream import output_size
from nsa_harness.render.text import escape
from nsa_harness.supervisor.capture.procfs import command_line
from nsa_harness.supervisor.launch.launcher import end_dead_runs
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
from nsa_harness.supervisor.storage.record import RunRecord, write_record
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions, working_directory
from nsa_harness.texts import words

_GRACE_S = 1.0  # time between SIGTERM and SIGKILL
_HANG_CODE = 124  # exit code if nsa-harness ended the job after a HANG or at the deadline


class OnHang(StrEnum):
    REPORT = "report"
    EXEC = "exec"
    KILL = "kill"


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """The command to watch, and the options."""

    command: tuple[str, ...]
    limits: Limits
    on_hang: OnHang
    hook: str  # the user's command for --on-hang=exec, or ""
    quiet: bool
    shared: Path | None = None  # the directory that the agents of all nodes of the job share
    nodes: int = 0  # number of nodes, if it was given
    options: RunOptions  # with `json`, events are printed to stderr, because stdout belongs to the job


def watch(request: WatchRequest) -> int:
    """Run and observe the command. Return its exit status, or 124 if nsa-harness ended it."""
    check_command(request.command)
    forwarder = SignalForwarder()
    end_dead_runs()
    with run_directory(request.options) as run:
        return WatchSession(request=request, run=run, forwarder=forwarder).run_command()


@dataclass(kw_only=True)
class WatchSession:
    """A watched command and its attempts. An attempt begins whenever the job restarts its ranks."""

    request: WatchRequest
    run: RunDir
    forwarder: SignalForwarder
    outcomes: list[Outcome] = field(default_factory=list)
    number: int = 1  # number of the attempt; a restart by torchrun's agent increases it
    starts: int = 1  # how often the job started its ranks, not counting restarts by torchrun's agent
    hooks: list[Hook] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = machine_facts()
        self.output = WatchedCommandOutput(sys.stderr, quiet=self.request.quiet)
        self.spec = self._spec()
        self.record = RunRecord(
            command=self.request.options.command, harness=__version__, machine=self.facts, controller=os.getpid(),
            plan=(self.spec,), probe=self.request.options.probe, plan_text=shipped_plan(),
        )  # fmt: skip
        self._store_record()

    def _store_record(self) -> None:
        write_record(self.run, self.record)

    def run_command(self) -> int:
        """Run the command, and return its exit status, or 124 if nsa-harness ended it."""
        began = time.monotonic()
        clock: Callable[[], float] = lambda: time.monotonic() - began  # noqa: E731
        directory = self.run.directory
        attempt = self._first_attempt()
        with directory.open_for_append(self.run.events) as events, directory.open_for_append(self.run.log) as log:
            screen = Events(sys.stderr, self.run.run_id, clock) if self.request.options.json else self.output
            files = (Events(events, self.run.run_id, clock), WatchedCommandOutput(log, quiet=False))
            notifier = notifiers(self.request.options, self.run, is_observed=True)
            self.broadcast = self._to_listeners(screen, (*files, *notifier))
            try:
                status = self._attempts(attempt)
            finally:
                self.broadcast(lambda listener: listener.close())
        self._redact()
        return status

    def _redact(self) -> None:
        if self.run.path.is_dir():
            redact_run(self.run)

    def _first_attempt(self) -> AttemptDir:
        return self.run.attempt(self.spec.scenario)

    def _to_listeners(self, screen: Listener, others: tuple[Listener, ...]) -> Notify:
        """Return a function that tells the screen and the other listeners of each event."""
        return Broadcast(listeners=(*others, screen))

    def _attempts(self, attempt: AttemptDir) -> int:
        self.broadcast(lambda listener: listener.on_plan(self.facts, [self.run.redaction.spec(self.spec)]))
        prepare(attempt, self.spec, self.facts)
        child_command = start_watched_command(self.request.command, attempt, self.request.options.probe, self.forwarder)
        self.forwarder.follow(child_command.child.pid)
        self._begin(child_command)
        if not self.request.options.json:
            self.output.print_start(self.run.path)
        ended_by_us = self._observe_as_long_as_stored(child_command, attempt)
        status = _HANG_CODE if ended_by_us else shell_status(child_command.child.wait())
        for hook in self.hooks:
            hook.wait()
        return status

    def _begin(self, child_command: WatchedCommand) -> None:
        """Do what an agent does when its command has started."""

    def _observe_as_long_as_stored(self, child_command: WatchedCommand, attempt: AttemptDir) -> bool:
        """Observe the job. If the directory of the report is deleted, say so and leave the job alone."""
        try:
            return self._observe(child_command, attempt)
        except FileNotFoundError:
            if attempt.path.is_dir() and self.run.path.is_dir():
                raise
            self.output.print_line(f"no report: {self.run.path} was deleted while the job ran")
            return False

    def _observe(self, child_command: WatchedCommand, attempt: AttemptDir) -> bool:
        """Observe and judge the job until it ends, and return whether nsa-harness ended it."""
        while True:
            self.broadcast(lambda listener: listener.on_launch(self.run.redaction.spec(self.spec)))
            observation = self._observation(child_command, attempt)
            ending = observation.watch.run()
            if observation.ranks.has_restarted:
                attempt = self._next_attempt(child_command, observation)
                continue
            must_end = ending in (Ending.STALL, Ending.DEADLINE) and not observation.watch.reported_proof
            if must_end:
                child_command.end(_GRACE_S)
            else:
                child_command.release()
            self._conclude(child_command, observation, must_end=must_end)
            return must_end

    def _conclude(self, child_command: WatchedCommand, observation: ObservedJob, *, must_end: bool) -> None:  # noqa: ARG002
        """Judge and report the job, which has ended or was ended by nsa-harness (`must_end`)."""
        outcome = self._judge(observation, self.number)
        self._report(outcome, is_final=True)
        if must_end and not self.request.options.json:
            self.output.print_verdict(outcome, self.run.path, "nsa-harness ended the job")

    def _observation(self, child_command: WatchedCommand, attempt: AttemptDir) -> ObservedJob:
        observation: ObservedJob = self._new_job(
            command=child_command,
            spec=self.spec,
            attempt=attempt,
            listener=AttemptAudience(name=attempt.path.name, notify=self.broadcast),
            forwarder=self.forwarder,
            on_ending=lambda ending: self._report_running(observation, ending),
            ends_job=self.request.on_hang is OnHang.KILL,
        )
        return observation

    def _new_job(self, **parts: Any) -> ObservedJob:
        return ObservedJob(**parts)

    def _next_attempt(self, child_command: WatchedCommand, observation: ObservedJob) -> AttemptDir:
        ended_number = self.number
        if observation.ranks.restarted_by_agent:
            self.number += 1
        else:
            self.number, self.starts = 1, self.starts + 1
        self.spec = self._spec()
        attempt = self.run.attempt(self.spec.scenario, self.number)
        prepare(attempt, self.spec, self.facts)
        child_command.next_attempt(attempt)
        outcome = self._judge(observation, ended_number)
        self._report(outcome)
        self.outcomes.append(outcome)
        return attempt

    def _spec(self) -> RunSpec:
        command = self.request.command
        name = job_name(command) if self.starts == 1 else f"{job_name(command)}-{self.starts}"
        launch = json.dumps([command, str(working_directory() or ""), self.number, self.starts]).encode()
        about = f"observed: {shlex.join(command)}"
        return observed_spec(name, about, command, self.request.limits, hashlib.sha256(launch).hexdigest()[:16])

    def _judge(self, observation: ObservedJob, number: int) -> Outcome:
        return judge_attempt(observation.attempt, observation.store_spec(), self.facts.host, number=number)

    def _report(self, outcome: Outcome, *, is_final: bool = False) -> None:
        report = report_of(self.run, self.record, [*self.outcomes, outcome])
        write_report(self.run, report)
        if is_final:
            self.broadcast(lambda listener: listener.on_outcome(outcome, self.run.path))
            self.broadcast(lambda listener: listener.on_done(report, self.run.path))

    def _report_running(self, observation: ObservedJob, ending: Ending) -> None:
        """Report a hang or a passed deadline while the job is still running."""
        outcome = self._judge(observation, self.number)
        self._report(outcome)
        self.broadcast(lambda listener: listener.on_outcome(outcome, self.run.path))
        if not self.request.options.json:
            self.output.print_verdict(outcome, self.run.path, "the job is still running")
        if self.request.on_hang is OnHang.EXEC and ending in (Ending.STALL, Ending.DEADLINE):
            self._call_hook(observation.attempt)

    def _call_hook(self, attempt: AttemptDir) -> None:
        """Start the user's command from `--on-hang=exec`, with the verdict file as its input."""

        def report_failure(reason: str) -> None:
            option = self.run.redaction.text(f"--on-hang=exec {self.request.hook}")
            attempt.append_record(attempt.watch, {"event": "trouble", "what": option, "why": reason, "rank": None})
            self.output.print_line(f"{option}: {reason}")

        hook = Hook(command=self.request.hook, document=attempt.verdict, on_failure=report_failure)
        self.hooks.append(hook)
        hook.start()


_NAME = "nsa-harness"
_COLUMNS = 100  # widest line on a terminal; the lines appear among the job's own output


class WatchedCommandOutput(Listener):
    """A listener that prints lines marked with "nsa-harness:" between the job's own output."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        """Prepare the output. `quiet`: print neither a start line nor a PASS or FAIL, which the job shows itself."""
        self._stream = stream
        self._quiet = quiet
        self._last_answer: tuple[str, Status, str | None] | None = None  # its attempt, status and cause
        columns = output_size(stream, os.environ)[0]
        self._columns = columns if columns >= NO_WIDTH else min(columns - len(f"{_NAME}: "), _COLUMNS)

    def print_start(self, run_dir: Path) -> None:
        if not self._quiet:
            self.print_line(f"observing; page: {run_dir}/report.html")

    def on_stall(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.print_line(f"stall: {text}")

    def on_progress_again(self, attempt: str, text: str) -> None:  # noqa: ARG002
        self.print_line(f"recovered: {text}")

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        """Print the report of an outcome in full, or on one line if the same report was printed before."""
        verdict = outcome.verdict
        if verdict.status is Status.PASS and not self._quiet:
            self.print_line(f"PASS; the job has ended; page: {run_dir}/report.html")
        if verdict.status is not Status.HANG and (verdict.status is not Status.FAIL or self._quiet):
            return
        answer = (outcome.dir, verdict.status, verdict.cause)
        if answer == self._last_answer:
            self.print_verdict(outcome, run_dir, "the job has ended")
            return
        self._last_answer = answer
        for line in answer_lines(outcome, self._columns):
            self._write(line)

    def print_verdict(self, outcome: Outcome, run_dir: Path, job_state: str) -> None:
        """Print the verdict, the state of the job and the path of the report on one line."""
        name = outcome.verdict.status if outcome.verdict.status is Status.HANG else f"{outcome.verdict.cause}"
        self.print_line(f"{name}; {job_state}; page: {run_dir}/report.html")

    def print_line(self, text: str) -> None:
        self._write(escape(text))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{_NAME}: {text}".rstrip() + "\n")
            self._stream.flush()


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    """The job to attach to, and the options."""

    pid: int
    for_s: float
    limits: Limits
    options: RunOptions


@dataclass(frozen=True, kw_only=True)
class ObserverAudience(AttemptAudience):
    """An adapter that passes a job's events to all listeners. Phases are passed only if it has status files."""

    def report_progress(self, progress: Progress) -> None:
        if any(rank.no_progress_s is not None for rank in progress.ranks):
            super().report_progress(progress)


def chosen_job(ask: Callable[[Sequence[str]], int | None]) -> int:
    """Return the pid of this user's only job, or the one that `ask` chooses. Raise NoSuchJob if there is none."""
    jobs = jobs_of_this_user()
    answer = ask([escape(job.text) for job in jobs]) if len(jobs) > 1 else None
    return only_job(jobs) if answer is None else answer


def attach(request: AttachRequest) -> int:
    """Observe a running job and report on it. Return 124 for a HANG, 0 for progress, and 125 if neither is shown."""
    job = find_job(request.pid)
    spec, facts = _spec_of_job(request, job), machine_facts()
    with (
        run_directory(request.options) as run,
        session(run, request.options, (spec,), facts=facts, plan_file=shipped_plan()) as running,
    ):
        attempt, notify = run.attempt(spec.scenario), running.broadcast
        notify(lambda listener: listener.on_plan(facts, [run.redaction.spec(spec)]))
        prepare(attempt, spec, facts)
        notify(lambda listener: listener.on_launch(run.redaction.spec(spec)))
        with passive_observer(job) as guarded_job:
            observe_until_decided(
                guarded_job,
                spec,
                attempt,
                ObserverAudience(name=spec.scenario, notify=notify),
                is_interrupted=lambda: running.interrupted,
                for_s=request.for_s,
            )
        outcome = judge_attempt(attempt, spec, facts.host, 1)
        report = running.write_documents([outcome])
        running.announce(outcome)
        notify(lambda listener: listener.on_done(report, run.path))
    redact_run(run)
    return exit_code(report)


def _spec_of_job(request: AttachRequest, job: RunningJob) -> RunSpec:
    """Return a spec for a running job that was not started by nsa-harness."""
    command = command_line(request.pid) or [str(request.pid)]
    spec = observed_spec(job_name(command), f"attached to process {request.pid}", command, request.limits, "")
    spec = with_ranks(spec, max(job.ranks) + 1)
    unknown = ("steps, modules and collectives are unknown, because nsa-harness did not start this job",)
    has_ended = [f"{words.ranks(job.missing_ranks)} of this job: the process has ended"] if job.missing_ranks else []
    return replace(spec, notes=(*has_ended, *(() if job.probe_dir else unknown)))
