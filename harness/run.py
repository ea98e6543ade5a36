"""The composition: plan, launch, watch, collect, judge, report. The only module that knows every stage."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter

from harness import __version__
from harness.core.live import Progress
from harness.core.outcome import outcome_of, skipped, unjudged
from harness.core.plan import RunSpec, Skip
from harness.core.report import MachineFacts, Outcome, Report, exit_code
from harness.render.documents import write_documents
from harness.render.events import Events
from harness.render.listener import Listener, notify
from harness.render.report_json import outcome_values, to_json
from harness.render.terminal import Terminal
from harness.request import RunRequest
from harness.supervisor.collect import collect, foreign_metrics
from harness.supervisor.environment import describe
from harness.supervisor.inventory import inventory
from harness.supervisor.launch import command_line, launch
from harness.supervisor.machine import machine_facts
from harness.supervisor.record import Record, read_record, write_record
from harness.supervisor.rundir import AttemptDir, RunDir, append_line, create_run, find_run, write_document
from harness.supervisor.source import quoted
from harness.supervisor.stored_spec import load_spec
from harness.supervisor.watch import Watch

_GRACE_S = 1.0  # between TERM and KILL
_SPEC = TypeAdapter(RunSpec)


@dataclass(kw_only=True)
class Interruption:
    """Ctrl-C, or TERM: once means dump, clean up and report; twice means kill."""

    count: int = 0

    def __call__(self, _: int, __: FrameType | None) -> None:
        self.count += 1
        if self.count == 2:
            raise KeyboardInterrupt

    def asked(self) -> bool:
        return self.count > 0


def run_all(request: RunRequest) -> int:
    """Run every spec, write the documents, return the exit code."""
    facts = machine_facts()
    run = create_run(request.out or Path("reports"))
    skips = tuple(spec for spec in request.specs if isinstance(spec, Skip))
    record = Record(command=request.command, harness=__version__, machine=facts, controller=os.getpid(), skips=skips)
    write_record(run, record)
    with _interruptible() as interruption, _listeners(request, run) as listeners:
        notify(listeners, lambda one: one.plan(facts, request.specs))
        outcomes = [
            _run_or_skip(spec, run, request, facts, listeners, interruption)
            for spec in request.specs
            if not interruption.asked()
        ]
        record = replace(record, interrupted=interruption.asked())
        write_record(run, record)
        report = _report(run, record, outcomes)
        write_documents(run, report)
        notify(listeners, lambda one: one.done(report, run.path))
    return exit_code(report, strict=request.strict)


def rejudge(path: Path | None, *, json: bool = False, strict: bool = False, out: Path | None = None) -> int:
    """Judge a stored run again from its files alone; returns the exit code that `run` would give."""
    run = find_run(path, out or Path("reports"))
    record = read_record(run)
    outcomes = [_judge_stored(attempt) for attempt in run.attempts()]
    outcomes = [*map(skipped, record.skips), *outcomes]
    report = _report(run, record, outcomes)
    if os.access(run.path, os.W_OK):
        write_documents(run, report)
    if json:
        sys.stdout.write(to_json(report))
    else:
        _tell_again(run, report)
    return exit_code(report, strict=strict)


def run_one(
    spec: RunSpec,
    run: RunDir,
    *,
    probe: str,
    facts: MachineFacts,
    listeners: Sequence[Listener],
    interruption: Interruption,
    number: int = 1,
) -> Outcome:
    """One attempt: launch it, watch it, end it, judge it from what is on disk."""
    attempt = run.attempt(spec.scenario, number)
    _prepare(attempt, spec, facts)
    notify(listeners, lambda one: one.launched(spec))
    guarded = launch(spec, attempt, probe)
    try:
        Watch(
            guarded=guarded,
            spec=spec,
            attempt=attempt,
            audience=_Audience(scenario=spec.scenario, listeners=listeners),
            interrupted=interruption.asked,
        ).run()
    except KeyboardInterrupt:
        append_line(attempt.watch, {"event": "ending", "ending": "interrupted"})
    finally:
        guarded.end(_GRACE_S if interruption.count < 2 else 0.0)
    return judge_attempt(attempt, spec, facts.host, number)


def judge_attempt(attempt: AttemptDir, spec: RunSpec, node: str, number: int) -> Outcome:
    """Evidence from the attempt's files, then the verdict; writes verdict.json and result.txt."""
    evidence = collect(attempt, spec, node)
    outcome = quoted(
        outcome_of(
            spec,
            evidence,
            attempt=number,
            directory=attempt.path.name,
            artifacts=inventory(attempt, spec, evidence),
            metrics={**evidence.metrics, **foreign_metrics(attempt, spec.expect)},
            repeat=f"nsa-harness run {shlex.quote(_shown(attempt.spec))}",
        )
    )
    write_document(attempt.verdict, json.dumps(outcome_values(outcome), indent=1) + "\n")
    write_document(attempt.result, f"{outcome.verdict.status}\n")
    return outcome


def _run_or_skip(
    spec: RunSpec | Skip,
    run: RunDir,
    request: RunRequest,
    facts: MachineFacts,
    listeners: Sequence[Listener],
    interruption: Interruption,
) -> Outcome:
    if isinstance(spec, Skip):
        outcome = skipped(spec)
    else:
        try:
            outcome = run_one(
                spec, run, probe=request.probe, facts=facts, listeners=listeners, interruption=interruption
            )
        except Exception as error:  # a fault of the harness is one run's ERROR, not the loss of all the others
            with run.log.open("a") as log:
                traceback.print_exc(file=log)
            text = f"{type(error).__name__}: {error}; see {run.log.name}"
            outcome = unjudged(spec, attempt=1, directory=spec.scenario, error=text)
    notify(listeners, lambda one: one.outcome(outcome, run.path))
    return outcome


def _prepare(attempt: AttemptDir, spec: RunSpec, facts: MachineFacts) -> None:
    attempt.path.mkdir(parents=True)
    write_document(attempt.spec, _SPEC.dump_json(spec, indent=1).decode() + "\n")
    declared = " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.env)
    command = shlex.join(command_line(spec, sys.executable, None))
    write_document(attempt.command, " ".join(filter(None, [declared, command])) + "\n")
    write_document(attempt.env, json.dumps(describe(spec, facts), indent=1) + "\n")


def _judge_stored(attempt: AttemptDir) -> Outcome:
    _, _, number = attempt.path.name.partition("~")
    spec = load_spec(attempt.spec)
    nodes = sorted(attempt.evidence.glob("*.json"))
    node = nodes[0].stem if nodes else "unknown"
    return judge_attempt(attempt, spec, node, int(number) if number.isdigit() else 1)


def _report(run: RunDir, record: Record, outcomes: Sequence[Outcome]) -> Report:
    return Report(
        run_id=run.run_id,
        harness=record.harness,
        machine=record.machine,
        command=record.command,
        interrupted=record.interrupted,
        outcomes=tuple(outcomes),
    )


@dataclass(frozen=True, kw_only=True)
class _Audience:
    """Passes what the watcher sees to the listeners."""

    scenario: str
    listeners: Sequence[Listener]

    def phase(self, progress: Progress) -> None:
        name = _phase_name(progress)
        notify(self.listeners, lambda one: one.phase(self.scenario, name, progress))

    def suspect(self, text: str) -> None:
        notify(self.listeners, lambda one: one.suspect(self.scenario, text))

    def released(self, text: str) -> None:
        notify(self.listeners, lambda one: one.released(self.scenario, text))


_START_UP = {"none", "start", "imported", "init"}


def _phase_name(progress: Progress) -> str:
    """The screen's phases: launch, step N, finish. The slowest rank decides."""
    if not progress.ranks or any(rank.phase in _START_UP for rank in progress.ranks):
        return "launch"
    if all(rank.phase == "exit" for rank in progress.ranks):
        return "finish"
    return f"step {min(rank.step for rank in progress.ranks)}"


@contextmanager
def _interruptible() -> Iterator[Interruption]:
    interruption = Interruption()
    before = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listeners(request: RunRequest, run: RunDir) -> Iterator[tuple[Listener, ...]]:
    """The screen, the log, the event file, and with --json the event stream; people's text then goes to stderr."""
    began = time.monotonic()
    with run.log.open("a", encoding="utf-8") as log, run.events.open("a", encoding="utf-8") as events:
        clock = lambda: time.monotonic() - began  # noqa: E731
        listeners: list[Listener] = [
            Terminal(sys.stderr if request.json else sys.stdout, version=__version__),
            Terminal(log, version=__version__, environ={"NO_COLOR": "1"}),
            Events(events, run.run_id, clock, strict=request.strict),
        ]
        if request.json:
            listeners.append(Events(sys.stdout, run.run_id, clock, strict=request.strict))
        try:
            yield tuple(listeners)
        finally:
            notify(listeners, lambda one: one.close())


def _tell_again(run: RunDir, report: Report) -> None:
    screen = Terminal(sys.stdout, version=__version__)
    for outcome in report.outcomes:
        screen.outcome(outcome, run.path)
    screen.done(report, run.path)


def _shown(path: Path) -> str:
    """Relative to the working directory when it lies below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
