"""`attach`: one look at a running job, judged and reported like an attempt, and nothing done to it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.attempt import Audience, prepare
from nsa_harness.commands.judge import judge_attempt
from nsa_harness.commands.request import RunRequest
from nsa_harness.commands.run import interruptible, listeners, report_of, write_report
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.report import exit_code
from nsa_harness.core.scenario.observed_job import job_name, observed_spec, with_ranks
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.observe.attach import Look, RunningJob, find_job, onlooker
from nsa_harness.supervisor.observe.ranks import command_words
from nsa_harness.supervisor.store.record import Record, write_record
from nsa_harness.supervisor.store.rundir import create_run, locked


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    pid: int
    for_s: float
    limits: Limits
    out: Path | None
    json: bool
    typed: str


def attach(request: AttachRequest) -> int:
    """Look at a job; returns 124 for a HANG, 0 where it moves, 125 where that cannot be said. Raises NoSuchJob."""
    job = find_job(request.pid)
    spec, facts = _spec_of(request, job), machine_facts()
    run = create_run(request.out or Path("reports"))
    record = Record(
        command=request.typed, harness=__version__, machine=facts, controller=os.getpid(), plan=(spec,), probe="off"
    )
    write_record(run, record)
    asked = _as_run(request, spec)
    with locked(run), listeners(asked, run, None) as told, interruptible(told, asked) as interruption:
        attempt = run.attempt(spec.scenario)
        told(lambda one: one.plan(facts, [spec]))
        prepare(attempt, spec, facts)
        told(lambda one: one.launched(spec))
        with onlooker(job) as guarded:
            Look(
                guarded=guarded,
                spec=spec,
                attempt=attempt,
                audience=Audience(name=spec.scenario, tell=told),
                interrupted=lambda: interruption.count > 0,
                job=job,
                for_s=request.for_s,
            ).run()
        outcome = judge_attempt(attempt, spec, facts.host, 1)
        record = replace(record, interrupted=interruption.count > 0)
        write_record(run, record)
        report = report_of(run, record, [outcome])
        write_report(run, report)
        told(lambda one: one.outcome(outcome, run.path))
        told(lambda one: one.done(report, run.path))
    return exit_code(report)


def _spec_of(request: AttachRequest, job: RunningJob) -> RunSpec:
    command = command_words(request.pid) or [str(request.pid)]
    spec = observed_spec(job_name(command), f"attached to process {request.pid}", command, request.limits, "")
    spec = with_ranks(spec, max(job.ranks) + 1)
    unmarked = ("no marks: the job was started without the probe; steps, modules and collectives are not known",)
    return spec if job.boards else replace(spec, notes=unmarked)


def _as_run(request: AttachRequest, spec: RunSpec) -> RunRequest:
    """What the screens and the event stream want to know of a command."""
    return RunRequest(
        specs=(spec,), out=request.out, json=request.json, strict=False, probe="off", command=request.typed
    )
