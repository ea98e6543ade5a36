"""Sessions: run directory, run.json, events, Ctrl-C and documents of a command that launches runs."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from nsa_harness import __version__
from nsa_harness.commands.attempt import ShouldStop, run_one
from nsa_harness.core.comparison.decisions import with_decisions
from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, read_stored_plan
from nsa_harness.core.comparison.sweeps import with_growth_findings
from nsa_harness.core.experiment.diagnostic_rerun import with_diagnostic_reruns
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import EngineChoice, RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report
from nsa_harness.core.schedule import ONCE, Policy, free_devices
from nsa_harness.errors import HarnessError, UsageError
from nsa_harness.render.events import SCHEMA, Events
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.ledger import read_ledger
from nsa_harness.supervisor.storage.record import RunRecord, write_record
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, create_run, lock_run
from nsa_harness.texts.sentences import with_words

if TYPE_CHECKING:
    from nsa_harness.core.search.report import BisectReport

_REMOVED = "the directory of this run was removed while the run was in progress, so no report could be written"
INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM


@dataclass(kw_only=True)
class Session:
    """A run directory that a command is using, with the state that its launches share."""

    run: RunDir
    options: RunOptions
    record: RunRecord
    broadcast: Broadcast
    interruption: Interruption
    _reserved_gpus: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def facts(self) -> MachineFacts:
        return self.record.machine

    @property
    def interrupted(self) -> bool:
        return self.interruption.count > 0

    def launch(
        self,
        spec: RunSpec,
        number: int = 1,
        *,
        devices: tuple[int, ...] | None = None,
        server: ForkServer | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Outcome:
        """Launch one attempt and return its outcome. The options are the same as for `run_one`."""
        if self.record.engine is not None:
            from nsa_harness.commands.engine_job import run_on_engine

            return run_on_engine(self, spec, number, self.record.engine)
        return run_one(
            spec, self.run.attempt(spec.scenario, number), number=number, probe=self.options.probe, facts=self.facts,
            notify=self.broadcast, interruption=self.interruption, log=self.run.log, devices=devices, server=server,
            should_stop=should_stop,
        )  # fmt: skip

    def announce(self, outcome: Outcome) -> None:
        """Send an outcome to all listeners."""
        self.broadcast(lambda listener: listener.on_outcome(outcome, self.run.path))

    @contextmanager
    def devices_of(self, spec: RunSpec) -> Iterator[tuple[int, ...] | None]:
        """Reserve GPUs for one launch and yield their indices, or None if the launch can use all GPUs."""
        if spec.device != "cuda" or not self.interruption.in_parallel:
            yield None
            return
        with self._lock:
            devices = free_devices(self._reserved_gpus, spec.ranks, len(self.facts.gpus))
            self._reserved_gpus |= set(devices)
        try:
            yield devices
        finally:
            with self._lock:
                self._reserved_gpus -= set(devices)

    def stream(self, event: Mapping[str, object]) -> None:
        """Write an event to events.jsonl and, with `--json`, to stdout."""
        line = json.dumps({"schema": SCHEMA, **event, "t_s": None, "run_id": self.run.run_id})
        text = self.run.redaction.json(line)
        self.run.directory.append(self.run.events, text + "\n")
        if self.options.json:
            print(text, flush=True)

    def write_documents(
        self,
        outcomes: Sequence[Outcome],
        *,
        plan: Sequence[RunSpec | Skip] | None = None,
        search: BisectReport | None = None,
        was_interrupted: bool | None = None,
    ) -> Report:
        """Write run.json and all other output files of the run, and return the report.

        `plan`: all launches, if they were not known at the start. `search`: the bisection, if this is one.
        `was_interrupted`: whether to record an interruption; by default, whether a signal has arrived.
        """
        self.record = replace(
            self.record,
            plan=self.record.plan if plan is None else tuple(plan),
            was_interrupted=self.interrupted if was_interrupted is None else was_interrupted,
        )
        report = report_of(self.run, self.record, outcomes)
        try:
            write_record(self.run, self.record)
        except OSError as error:
            if not self.run.path.is_dir():
                print(f"{self.run.path}: {_REMOVED}", file=sys.stderr)
                return report
            print(f"{self.run.record.name} could not be written: {error.strerror or error}", file=sys.stderr)
        write_report(self.run, report, search)
        return report


@contextmanager
def run_directory(options: RunOptions, resume_in: Path | None = None) -> Iterator[RunDir]:
    """Create a run directory, or reuse `resume_in`, and hold its lock."""
    if resume_in is None:
        run = create_run(
            options.parent, redact=options.redact, git_diff=options.git_diff, reads_values=options.reads_values
        )
    else:
        run = RunDir(resume_in, redact=options.redact, git_diff=options.git_diff, reads_values=options.reads_values)
    with lock_run(run):
        yield run


@contextmanager
def session(
    run: RunDir,
    options: RunOptions,
    plan: Sequence[RunSpec | Skip],
    *,
    screen: Listener | None = None,
    in_parallel: bool = False,
    facts: MachineFacts | None = None,
    policy: Policy = ONCE,
    jobs: int | None = 1,
    deepen: bool = False,
    engine: EngineChoice | None = None,
    plan_file: PlanText | None = None,
) -> Iterator[Session]:
    """Open a session in the directory `run`, which the caller has locked.

    `screen`: a listener that replaces the terminal output. `in_parallel`: whether attempts may overlap. `facts`: the
    facts about this machine, if they are already known. `engine`: runs each launch as a job. `policy`, `jobs`, `deepen`
    and `plan_file` are only stored in run.json, for --resume.
    """
    record = RunRecord(
        command=options.command, harness=__version__, machine=facts or machine_facts(), controller=os.getpid(),
        plan=tuple(plan), policy=policy, jobs=jobs, probe=options.probe, deepen=deepen, engine=engine,
        plan_text=plan_file,
    )  # fmt: skip
    try:
        write_record(run, record)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"cannot write to {run.path}: {reason}; choose a directory on another disk with --out DIR"
        ) from None
    with ExitStack() as stack:
        if isinstance(screen, ExperimentScreen):
            stack.callback(_log_trouble, screen, run)
        broadcast = stack.enter_context(listeners(options, run, screen))
        interruption = stack.enter_context(interruptible(broadcast, in_parallel=in_parallel))
        if isinstance(screen, ExperimentScreen):
            screen.lost_terminal = interruption.lost_terminal
        yield Session(run=run, options=options, record=record, broadcast=broadcast, interruption=interruption)


def _log_trouble(screen: ExperimentScreen, run: RunDir) -> None:
    from nsa_harness.render.documents.documents import log_fault

    for trouble in screen.trouble:
        log_fault(run, f"{trouble.what}: {trouble.why}\n")


# Ctrl-C.


@dataclass(kw_only=True)
class Interruption:
    """A signal handler for Ctrl-C, SIGTERM, SIGQUIT and a closed terminal.

    After the first signal, the running attempts are ended and judged. After the second, they are killed at once. In
    both cases every attempt that has ended is judged, and the report is written.
    """

    broadcast: Broadcast
    in_parallel: bool  # attempts run in threads, and read `count` themselves
    count: int = 0
    lost_its_terminal: bool = False  # a job of an engine then goes on, and can be followed again later
    _watching: bool = False  # the main thread watches an attempt, and a second signal must interrupt it

    def __call__(self, number: int, _: FrameType | None) -> None:
        # When a terminal closes, the kernel and the shell may both send SIGHUP. It counts only once.
        if number == signal.SIGHUP and self.count:
            return
        self.lost_its_terminal = number == signal.SIGHUP and not self.count
        self.count += 1
        self.broadcast(lambda listener: listener.on_interrupt(self.count))
        if self.count == 2 and self._watching:
            raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context manager within which a second signal raises KeyboardInterrupt."""
        self._watching = not self.in_parallel
        try:
            yield
        finally:
            self._watching = False

    def lost_terminal(self) -> None:
        """Treat a closed terminal as an interruption."""
        self.lost_its_terminal = not self.count
        self.count = max(self.count, 1)


@contextmanager
def interruptible(broadcast: Broadcast, *, in_parallel: bool = False) -> Iterator[Interruption]:
    """Install the signal handlers for a run, and restore the previous ones at the end."""
    interruption = Interruption(broadcast=broadcast, in_parallel=in_parallel)
    broadcast.lost_terminal = interruption.lost_terminal
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield interruption
        return
    # Signals that are ignored, for example because of nohup, stay ignored.
    hang_ups = [number for number in _HANG_UPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM, *hang_ups)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _discard_lost_terminals()


_HANG_UPS = (signal.SIGHUP, signal.SIGQUIT)


def _discard_lost_terminals() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal was closed, so that the final flush works."""
    for stream in (1, 2):
        try:
            os.tcgetpgrp(stream)
        except OSError as error:
            if error.errno == errno.EIO:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)


# Listeners.


@contextmanager
def listeners(options: RunOptions, run: RunDir, screen: Listener | None) -> Iterator[Broadcast]:
    """Open the screen, the log and the event files for a run. With --json, human-readable lines go to stderr."""
    began = time.monotonic()
    with (
        _redacted_at_the_end(run),
        closing_on_full_disk(run.directory.open_for_append(run.log)) as log,
        closing_on_full_disk(run.directory.open_for_append(run.events)) as events,
    ):
        clock = lambda: time.monotonic() - began  # noqa: E731
        listeners: list[Listener] = [
            screen or _terminal(options),
            Terminal(log, version=__version__, playbook=PLAYBOOK, environ={"NO_COLOR": "1"}, verbose=True),
            Events(events, run.run_id, clock, strict=options.strict),
        ]
        if options.json:
            listeners.append(Events(sys.stdout, run.run_id, clock, strict=options.strict))
        listeners += notifiers(options, run, each_run=screen is None)
        broadcast = Broadcast(listeners=tuple(listeners))
        try:
            yield broadcast
        finally:
            broadcast(lambda listener: listener.close())


def notifiers(options: RunOptions, run: RunDir, *, each_run: bool = True, is_observed: bool = False) -> list[Listener]:
    """Return the listener for --notify, or an empty list without this option. It must be closed last."""
    if not options.notify:
        return []
    from nsa_harness.render.documents.documents import log_fault
    from nsa_harness.render.notifier import Notifier

    def report_failure(reason: str) -> None:
        log_fault(run, f"note: {reason}\n")
        print(f"note: {reason}", file=sys.stderr)

    return [
        Notifier(options.notify, run.path, run.redaction, report_failure, each_run=each_run, is_observed=is_observed)
    ]


@contextmanager
def closing_on_full_disk(file: TextIO) -> Iterator[TextIO]:
    """Close a log at the end of the `with` block. Lines for which the disk has no space are lost."""
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


@contextmanager
def _redacted_at_the_end(run: RunDir) -> Iterator[None]:
    """Redact all files of the run after the `with` block, because a later attempt may reveal a secret."""
    try:
        yield
    finally:
        with suppress(OSError):
            redact_run(run)


def _terminal(options: RunOptions) -> Terminal:
    if not options.json:
        return Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, verbose=options.verbose)
    # A live view on the same terminal would overwrite the events.
    live = not sys.stdout.isatty()
    return Terminal(sys.stderr, version=__version__, playbook=PLAYBOOK, live=live, verbose=options.verbose)


# Documents.


def report_of(run: RunDir, record: RunRecord, outcomes: Sequence[Outcome]) -> Report:
    """Return a report without secrets, including the conclusions that need several attempts."""
    positions = {spec.scenario: position for position, spec in enumerate(record.plan)}
    in_order = sorted(outcomes, key=lambda run: (positions.get(run.spec.scenario, len(positions)), run.attempt))
    launched_names = {outcome.spec.scenario for outcome in outcomes}
    report = Report(
        run_id=run.run_id,
        harness=record.harness,
        machine=record.machine,
        command=run.redaction.command_text(record.command),
        interrupted=record.was_interrupted,
        outcomes=with_words(with_growth_findings(with_diagnostic_reruns(with_flakiness(in_order)))),
        not_run=tuple(spec.scenario for spec in record.plan if spec.scenario not in launched_names),
    )
    return run.redaction.value(with_decisions(report, _plan_file(run, record)))


def _plan_file(run: RunDir, record: RunRecord) -> PlanFile:
    parsed_plan = read_stored_plan(record.plan_text or shipped_plan())
    for mistake in parsed_plan.mistakes[:1]:
        print(f"note: {run.record}: {mistake}; the decision rules are not applied", file=sys.stderr)
    return parsed_plan.plan


def write_report(run: RunDir, report: Report, search: BisectReport | None = None) -> None:
    """Write all output files of the run, and print a line for each one that cannot be written."""
    from nsa_harness.render.documents.documents import write_documents
    from nsa_harness.render.experiments.why_json import stored_why

    claim = why = None
    with suppress(OSError, HarnessError):  # a ledger that cannot be read costs the answer on the page, not the page
        lines = read_ledger(run.path.parent).lines
        claim = next((line for line in reversed(lines) if line.runs[-1:] == (run.run_id,)), None)
    try:
        why = stored_why(run)
    except HarnessError as error:
        print(f"note: {error}", file=sys.stderr)
    for trouble in write_documents(run, report, PLAYBOOK, search, claim, why):
        print(f"{trouble.what} could not be written: {trouble.why}; see {run.log}", file=sys.stderr)
