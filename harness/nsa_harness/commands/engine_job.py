"""Run one attempt as a job of an engine, such as Slurm: submit it, follow it, and judge what its agents stored."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsa_harness.commands.attempt import prepare
from nsa_harness.commands.stored_job import (
    SHARED,
    StoredJob,
    adopt_evidence,
    read_job,
    refused,
    unjudged,
    with_job_state,
    write_job,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.plan import EngineChoice, Launcher, RunSpec, Skip
from nsa_harness.core.report import Outcome
from nsa_harness.engine import engine_named
from nsa_harness.engine.interface import (
    Capabilities,
    Engine,
    EngineError,
    Job,
    JobHandle,
    JobState,
    JobStatus,
    Unreachable,
)
from nsa_harness.engine.site import Site, place_of_setting
from nsa_harness.errors import StoredRunError, UsageError
from nsa_harness.protocol import ENV_FAULT, ENV_PREFIX
from nsa_harness.supervisor.launch.launcher import torchrun_command
from nsa_harness.supervisor.storage.adapters import json_text
from nsa_harness.supervisor.storage.record import read_record
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions

if TYPE_CHECKING:
    from nsa_harness.commands.session import Session

_POLLS_S = ((30.0, 1.0), (300.0, 2.0), (float("inf"), 5.0))  # up to this age of the job, ask this often
_TICK_S = 0.2
_CANCEL_S = 120.0  # longest wait for the end of a cancelled job
_OVERDUE_S = 600.0  # after its deadline, a job has this long to write its report


def site_of(choice: EngineChoice) -> Site:
    return Site.model_validate_json(choice.site)


def check_engine(choice: EngineChoice, site_file: Path | None = None, given: Collection[str] = ()) -> Engine:
    """Return the chosen engine. Raise UsageError if it cannot be used here, or cannot fulfil a setting.

    The error names the line of `site_file`, unless the command line has an option for the setting. `given`: the keys
    for which it has one.
    """
    engine = engine_named(choice.name, site_of(choice))
    offer = engine.capabilities()
    if offer.missing:
        raise UsageError(f"--engine {choice.name}: {offer.missing}")
    mistakes = [*_too_much(choice, offer), *engine.mistakes(choice.nodes, choice.gpus_per_node)]
    if mistakes:
        raise UsageError("\n".join(_mistake_text(key, text, site_file, given) for key, text in mistakes))
    return engine


def _too_much(choice: EngineChoice, offer: Capabilities) -> Iterator[tuple[str, str]]:
    if offer.nodes is not None and choice.nodes > offer.nodes:
        yield "nodes", f"{choice.nodes} nodes, but --engine {choice.name} has only {offer.nodes}"
    if offer.gpus_per_node and choice.gpus_per_node > offer.gpus_per_node:
        yield "gpus_per_node", f"{choice.gpus_per_node}, but a node has at most {offer.gpus_per_node}"


def _mistake_text(key: str, text: str, site_file: Path | None, given: Collection[str]) -> str:
    place = None if site_file is None or key in given else place_of_setting(site_file, key)
    return f"--{key.replace('_', '-')}: {text}" if place is None else f"{place}: {key}: {text}"


def check_nodes(spec: RunSpec, choice: EngineChoice) -> None:
    """Raise UsageError if the ranks of a launch cannot be divided among the chosen nodes."""
    if spec.ranks % choice.nodes:
        raise UsageError(f"--nodes: {spec.ranks} ranks cannot be divided equally among {choice.nodes} nodes")
    if spec.launcher is Launcher.PLAIN and choice.nodes > 1:
        raise UsageError(f"{spec.scenario}: its own command is started on one node only; leave out --nodes")


def job_of(spec: RunSpec, attempt: AttemptDir, choice: EngineChoice, options: RunOptions) -> Job:
    """Return the job that runs an attempt. Raise UsageError if its ranks cannot be divided among the nodes."""
    check_nodes(spec, choice)
    is_plain = spec.launcher is Launcher.PLAIN
    site, directory = site_of(choice), attempt.path.resolve()
    words = spec.program[1:] if (as_module := spec.program[0] == "-m") else spec.program
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if spec.ranks > 1 else {}
    return Job(
        name=f"nsa-{attempt.path.parent.name}-{attempt.path.name}",
        directory=directory, nodes=choice.nodes, ranks_per_node=spec.ranks // choice.nodes,
        agent=tuple(_agent(spec, directory / SHARED, choice, options, site)),
        torchrun=() if is_plain else (*_probe_settings(spec), *torchrun_command(spec, sys.executable)),
        as_module=as_module, program=(*_probe_settings(spec), *words) if is_plain else words,
        env={"PYTHONUNBUFFERED": "1", **threads, **_own_environment(spec), "NSA_OUT_DIR": str(directory)},
        cwd=Path(spec.cwd or ".").resolve(), limit_s=spec.limits.deadline_s, gpus_per_node=choice.gpus_per_node,
        only=choice.only, site=site,
    )  # fmt: skip


def _agent(spec: RunSpec, shared: Path, choice: EngineChoice, options: RunOptions, site: Site) -> Iterator[str]:
    beside = Path(sys.executable).with_name("nsa-harness")
    yield from (
        [site.agent] if site.agent else [str(beside)] if beside.exists() else [sys.executable, "-m", "nsa_harness"]
    )
    yield from ("watch", "--shared", str(shared), "--nodes", str(choice.nodes), "--on-hang=kill", "--quiet")
    yield f"--probe={options.probe}"
    yield from ["--no-redact"] * (not options.redact) + ["--no-values"] * (not options.reads_values)
    for name in ("stall_s", "busy_s", "open_wait_s", "start_s", "deadline_s"):
        if (value := getattr(spec.limits, name)) is not None:
            yield f"limits.{name}={value:g}"


def _own_environment(spec: RunSpec) -> dict[str, str]:
    return {name: value for name, value in spec.env if not name.startswith(ENV_PREFIX)}


def _probe_settings(spec: RunSpec) -> tuple[str, ...]:
    """Return the words in front of the program that set the variables of the probe. The agent passes none of them on.

    They plant a fault, record statements, or make an experiment.
    """
    settings = [f"{name}={value}" for name, value in spec.env if name.startswith(ENV_PREFIX)]
    settings += [] if spec.fault is None else [f"{ENV_FAULT}={json_text(spec.fault)}"]
    return ("env", *settings) if settings else ()


def run_on_engine(session: Session, spec: RunSpec, number: int, choice: EngineChoice) -> Outcome:
    """Run one attempt as a job, judge it, and return its outcome. If the job is already submitted, follow it."""
    attempt = session.run.attempt(spec.scenario, number)
    try:
        return EngineAttempt(session=session, spec=spec, attempt=attempt, number=number, choice=choice).run()
    except EngineError as error:
        if not isinstance(error, Unreachable):
            _store_refusal(attempt, choice, str(error))
        return refused(spec, attempt, number, str(error), choice)
    except Exception as error:
        with suppress(OSError):
            attempt.directory.append(session.run.log, attempt.redaction.text(traceback.format_exc()))
        reason = f"{type(error).__name__}: {error}; see {session.run.log.name}"
        return attempt.redaction.value(unjudged(spec, attempt, number, reason, Cause.HARNESS_ERROR, choice))


def _store_refusal(attempt: AttemptDir, choice: EngineChoice, reason: str) -> None:
    """Record that the engine refused a job, unless it has accepted the job before."""
    with suppress(OSError, StoredRunError):
        if read_job(attempt) is None:
            handle = JobHandle(engine=choice.name, id="", directory=str(attempt.path))
            status = JobStatus(state=JobState.LOST, reason="it was not submitted")
            write_job(attempt, StoredJob(handle=handle, status=status, choice=choice, refusal=reason))


@dataclass(kw_only=True)
class EngineAttempt:
    """One attempt as a job, from its submission or its rediscovery to its outcome."""

    session: Session
    spec: RunSpec
    attempt: AttemptDir
    number: int
    choice: EngineChoice
    shown: tuple[str, ...] = ()
    _began_s: float = field(default_factory=time.monotonic)
    _events_read: int = 0

    def __post_init__(self) -> None:
        self.engine = engine_named(self.choice.name, site_of(self.choice))

    def run(self) -> Outcome:
        """Submit the job, or find it again, and follow it until it has ended or the user interrupts."""
        job = read_job(self.attempt)
        shown_spec = self.attempt.redaction.spec(replace(self.spec, scenario=self.attempt.path.name))
        if job is None:
            job = self._found_or_submitted()
        elif job.status is None:
            job = replace(job, cancelled=False)  # if an earlier session tried to cancel it, it did not see the end
        self.session.broadcast(lambda listener: listener.on_launch(shown_spec))
        job = self._follow(job) if job.status is None else job
        if job.status is None:
            cancel = self.engine.cancel_command(job.handle)
            what = "does not wait for the end of" if job.cancelled else "no longer follows"
            goes_on = "which may not have been cancelled" if job.cancelled else "which goes on"
            reason = (
                f"nsa-harness {what} job {job.handle.id}, {goes_on}; --resume follows it again, and `{cancel}` cancels"
                " it"
            )
            return unjudged(self.spec, self.attempt, self.number, reason, Cause.INTERRUPTED, self.choice)
        adopt_evidence(self.attempt)
        return with_job_state(self.attempt, self.spec, self.number, job, self._judge)

    def _judge(self) -> Outcome:
        from nsa_harness.commands.judge import judge_attempt

        return judge_attempt(self.attempt, self.spec, self.session.facts.host, self.number)

    def _found_or_submitted(self) -> StoredJob:
        job = job_of(self.spec, self.attempt, self.choice, self.session.options)
        script = self.engine.render(job)
        handle, stored_script = None, self.attempt.path / script.file.name
        if self.attempt.directory.is_file(stored_script):  # a nsa-harness that was killed may have submitted it
            handle = self.engine.find(script)
            if handle is None and (self.attempt.path / SHARED).is_dir():  # it has ended meanwhile
                unknown = JobHandle(engine=self.engine.name, id="with a lost id", directory=str(script.file.parent))
                lost = JobStatus(state=JobState.LOST, reason="its end was not seen")
                return StoredJob(handle=unknown, status=lost, choice=self.choice)
        else:
            prepare(self.attempt, self.spec, self.session.facts)
            self.attempt.directory.write(stored_script, script.text)
        stored = StoredJob(handle=handle or self.engine.submit(script, environment()), choice=self.choice)
        write_job(self.attempt, stored)
        return stored

    def _follow(self, job: StoredJob) -> StoredJob:
        """Follow the job until it has ended. The status stays None if the user closed the terminal or is impatient."""
        running_since_s: float | None = None
        while True:
            status = self._poll(job)
            now_s = time.monotonic() - self._began_s
            if status is not None and status.state.has_ended:
                job = replace(job, status=status)
                write_job(self.attempt, job)
                return job
            if status is not None and status.state is JobState.RUNNING:
                if running_since_s is None:
                    running_since_s = now_s
                    job = replace(job, queue_s=round(now_s, 1), has_started=True)
                    write_job(self.attempt, job)
                self._show_stalls()
                deadline_s = self.spec.limits.deadline_s
                if deadline_s is not None and now_s - running_since_s > deadline_s + _OVERDUE_S:
                    self._cancel(job)
            if self.session.interruption.count and self.session.interruption.lost_its_terminal:
                return job
            if self.session.interruption.count and not job.cancelled:
                job = replace(job, cancelled=True)
                write_job(self.attempt, job)
                self._show("cancelling", "nsa-harness was interrupted", job)
                self._cancel(job)
                self._began_s = time.monotonic()
            is_impatient = self.session.interruption.count > 1
            if job.cancelled and (is_impatient or time.monotonic() - self._began_s > _CANCEL_S):
                return job
            self._wait(now_s, until_interrupted=not job.cancelled)

    def _poll(self, job: StoredJob) -> JobStatus | None:
        try:
            status = self.engine.poll(job.handle)
        except Unreachable as error:
            self._show("unknown", str(error), job)
            return None
        if job.cancelled and not status.state.has_ended:
            return status
        if job.cancelled and status.state is JobState.CANCELLED:
            status = replace(status, reason="nsa-harness cancelled it")
        self._show(status.state, status.reason or status.nodes, job)
        return status

    def _show(self, state: str, text: str, job: StoredJob) -> None:
        if self.shown != (state, text):
            self.shown = (state, text)
            self.session.broadcast(lambda listener: listener.on_job(self.attempt.path.name, job.handle.id, state, text))

    def _show_stalls(self) -> None:
        """Pass on what the agents say about stalls of the whole job."""
        run = RunDir(self.attempt.path / SHARED)
        records = [one for one in self.attempt.directory.read_records(run.events) if one.get("event") in _STALLS]
        for record in records[self._events_read :]:
            text = str(record.get("text", ""))
            tell = self._tell_stall if record["event"] == "suspect" else self._tell_recovery
            tell(text)
        self._events_read = max(self._events_read, len(records))

    def _tell_stall(self, text: str) -> None:
        self.session.broadcast(lambda listener: listener.on_stall(self.attempt.path.name, text))

    def _tell_recovery(self, text: str) -> None:
        self.session.broadcast(lambda listener: listener.on_progress_again(self.attempt.path.name, text))

    def _cancel(self, job: StoredJob) -> None:
        try:
            self.engine.cancel(job.handle)
        except EngineError as error:
            self._show("unknown", str(error), job)

    def _wait(self, age_s: float, *, until_interrupted: bool) -> None:
        interval_s = next(interval_s for until_s, interval_s in _POLLS_S if age_s < until_s)
        deadline = time.monotonic() + (interval_s if until_interrupted else 1.0)
        while time.monotonic() < deadline and not (until_interrupted and self.session.interruption.count):
            time.sleep(_TICK_S)


_STALLS = ("suspect", "released")


def open_job_lines(run: RunDir) -> Iterator[str]:
    """Yield a line about each job of a run that may still be in progress."""
    choice = read_record(run).engine
    for attempt in run.attempts() if choice is not None else ():
        job = read_job(attempt)
        if choice is None or job is None or job.status is not None:
            continue
        try:
            status = engine_named(choice.name, site_of(choice)).poll(job.handle)
            state = f"{status.state}{f': {text}' if (text := status.reason or status.nodes) else ''}"
        except EngineError as error:
            state = str(error)
        yield f"job    {attempt.path.name}   {job.handle.id} {state}"


def cancel_open_jobs(run: RunDir, choice: EngineChoice) -> None:
    """Cancel the jobs that an earlier session has left behind, and record that they have ended."""
    engine = engine_named(choice.name, site_of(choice))
    for attempt in run.attempts():
        job = read_job(attempt)
        if job is not None and job.status is None:
            with suppress(EngineError):
                engine.cancel(job.handle)
                write_job(attempt, replace(job, status=engine.poll(job.handle), cancelled=True))


def scripts(specs: Sequence[RunSpec | Skip], choice: EngineChoice, options: RunOptions) -> Iterator[str]:
    """Yield the script of each launch, as --dry-run prints it. The run directory is only known at the submission."""
    engine = engine_named(choice.name, site_of(choice))
    run = RunDir(options.parent.resolve() / "RUN_ID", redact=options.redact, reads_values=options.reads_values)
    for spec in specs:
        if isinstance(spec, Skip):
            yield f"# {spec.scenario}: SKIP, {spec.reason}\n"
            continue
        run.redaction.learn_launch(spec)
        script = engine.render(job_of(run.redaction.spec(spec), run.attempt(spec.scenario), choice, options))
        yield f"# {spec.scenario}: {' '.join(script.command)}\n{script.text}"


def environment() -> dict[str, str]:
    """Return the environment of this process without what configures nsa-harness itself."""
    prefixes = (ENV_PREFIX, "NSA_HARNESS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
