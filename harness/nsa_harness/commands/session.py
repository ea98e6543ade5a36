"""A session: one run directory while a command launches into it, from its record to its documents.

Every command that launches something opens one: it writes run.json, tells the listeners, catches Ctrl-C, and writes the
documents of the run at the end.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from nsa_harness import __version__
from nsa_harness.commands.attempt import Enough, run_one
from nsa_harness.core.comparison.decisions import with_decisions
from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, read_stored_plan
from nsa_harness.core.comparison.sweeps import with_growth
from nsa_harness.core.experiment.diagnostic_rerun import with_deeper_runs
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report
from nsa_harness.core.schedule import ONCE, Policy, free_devices
from nsa_harness.render.events import SCHEMA, Events
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.record import Record, write_record
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, create_run, locked
from nsa_harness.texts.sentences import with_words

if TYPE_CHECKING:
    from nsa_harness.core.search.report import BisectReport

INTERRUPTED = 130  # exit code


@dataclass(kw_only=True)
class Session:
    """A run directory while a command launches into it, with everything that a launch needs."""

    run: RunDir
    options: RunOptions
    record: Record
    broadcast: Broadcast
    interruption: Interruption
    _taken: set[int] = field(default_factory=set)  # devices
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
        enough: Enough | None = None,
    ) -> Outcome:
        """Launch attempt `number` of the spec's scenario and return how it ended. See `run_one` for the options."""
        return run_one(
            spec, self.run.attempt(spec.scenario, number), number=number, probe=self.options.probe, facts=self.facts,
            tell=self.broadcast, interruption=self.interruption, log=self.run.log, devices=devices, server=server,
            enough=enough,
        )  # fmt: skip

    def tell_outcome(self, outcome: Outcome) -> None:
        self.broadcast(lambda listener: listener.on_outcome(outcome, self.run.path))

    @contextmanager
    def devices_of(self, spec: RunSpec) -> Iterator[tuple[int, ...] | None]:
        """Reserve GPUs for a launch, if other launches may run in parallel; None: the launch sees all GPUs."""
        if spec.device != "cuda" or not self.interruption.side_by_side:
            yield None
            return
        with self._lock:
            devices = free_devices(self._taken, spec.ranks, len(self.facts.gpus))
            self._taken |= set(devices)
        try:
            yield devices
        finally:
            with self._lock:
                self._taken -= set(devices)

    def stream(self, event: Mapping[str, object]) -> None:
        """Write an event of this command to the event file and, with `--json`, to stdout."""
        line = json.dumps({"schema": SCHEMA, **event, "t_s": None, "run_id": self.run.run_id})
        text = self.run.redaction.json(line)
        self.run.door.append(self.run.events, text + "\n")
        if self.options.json:
            print(text, flush=True)

    def write_documents(
        self,
        outcomes: Sequence[Outcome],
        *,
        plan: Sequence[RunSpec | Skip] | None = None,
        search: BisectReport | None = None,
        interrupted: bool | None = None,
    ) -> Report:
        """Write run.json again and every document of the run.

        `plan`: the launches, if they were not known at the start. `interrupted`: whether to record an interruption;
        None: if there was one.
        """
        self.record = replace(
            self.record,
            plan=self.record.plan if plan is None else tuple(plan),
            interrupted=self.interrupted if interrupted is None else interrupted,
        )
        write_record(self.run, self.record)
        report = report_of(self.run, self.record, outcomes)
        write_report(self.run, report, search)
        return report


@contextmanager
def run_directory(options: RunOptions, resumed: Path | None = None) -> Iterator[RunDir]:
    """Make the directory of a run, or take the one to continue in, and hold its lock."""
    if resumed is None:
        run = create_run(options.parent, redact=options.redact, git_diff=options.git_diff)
    else:
        run = RunDir(resumed, redact=options.redact, git_diff=options.git_diff)
    with locked(run):
        yield run


@contextmanager
def session(
    run: RunDir,
    options: RunOptions,
    plan: Sequence[RunSpec | Skip],
    *,
    screen: Listener | None = None,
    side_by_side: bool = False,
    facts: MachineFacts | None = None,
    policy: Policy = ONCE,
    jobs: int | None = 1,
    deepen: bool = False,
    agreed: PlanText | None = None,
) -> Iterator[Session]:
    """Open a session in a directory that the caller has locked.

    `screen` replaces the terminal. `side_by_side`: attempts may overlap. run.json stores the parameters from `policy`
    on.
    """
    record = Record(
        command=options.command, harness=__version__, machine=facts or machine_facts(), controller=os.getpid(),
        plan=tuple(plan), policy=policy, jobs=jobs, probe=options.probe, deepen=deepen, agreed=agreed,
    )  # fmt: skip
    write_record(run, record)
    with ExitStack() as stack:
        if isinstance(screen, ExperimentScreen):
            stack.callback(_log_trouble, screen, run)
        broadcast = stack.enter_context(listeners(options, run, screen))
        interruption = stack.enter_context(interruptible(broadcast, side_by_side=side_by_side))
        if isinstance(screen, ExperimentScreen):
            screen.lost_terminal = interruption.lost_terminal
        yield Session(run=run, options=options, record=record, broadcast=broadcast, interruption=interruption)


def _log_trouble(screen: ExperimentScreen, run: RunDir) -> None:
    """Write to the log what the screen could not show, since its terminal may be gone."""
    from nsa_harness.render.documents.documents import log_fault

    for trouble in screen.trouble:
        log_fault(run, f"{trouble.what}: {trouble.why}\n")


# Ctrl-C.


@dataclass(kw_only=True)
class Interruption:
    """The handler of Ctrl-C, TERM, QUIT and a lost terminal: once means end and report, twice means kill at once.

    An attempt that has ended is always judged, and the report is always written.
    """

    broadcast: Broadcast
    side_by_side: bool  # the attempts read `count` themselves
    count: int = 0
    _watching: bool = False  # an attempt, which a second signal leaves at once

    def __call__(self, number: int, _: FrameType | None) -> None:
        # A shell passes on the hang-up that the kernel has already sent: it does not count as a second signal.
        if number == signal.SIGHUP and self.count:
            return
        self.count += 1
        self.broadcast(lambda listener: listener.on_interrupt(self.count))
        if self.count == 2 and self._watching:
            raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is entered, a second signal is a KeyboardInterrupt."""
        self._watching = not self.side_by_side
        try:
            yield
        finally:
            self._watching = False

    def lost_terminal(self) -> None:
        """Count as interrupted: the terminal is gone, and no signal came because it belonged to another session."""
        self.count = max(self.count, 1)


@contextmanager
def interruptible(broadcast: Broadcast, *, side_by_side: bool = False) -> Iterator[Interruption]:
    interruption = Interruption(broadcast=broadcast, side_by_side=side_by_side)
    broadcast.lost_terminal = interruption.lost_terminal
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield interruption
        return
    # Signals that nohup ignores stay ignored.
    caught = [number for number in _HANG_UPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM, *caught)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _leave_lost_terminals()


_HANG_UPS = (signal.SIGHUP, signal.SIGQUIT)


def _leave_lost_terminals() -> None:
    """Discard further output if the terminal is gone: otherwise the interpreter would exit with its own code."""
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
    """Open the listeners of a run: screen, log, event file and, with --json, the event stream on stdout.

    With --json, the human-readable lines go to stderr.
    """
    began = time.monotonic()
    with _redacted_at_the_end(run), run.door.appending(run.log) as log, run.door.appending(run.events) as events:
        clock = lambda: time.monotonic() - began  # noqa: E731
        listeners: list[Listener] = [
            screen or _terminal(options),
            Terminal(log, version=__version__, playbook=PLAYBOOK, environ={"NO_COLOR": "1"}, verbose=True),
            Events(events, run.run_id, clock, strict=options.strict),
        ]
        if options.json:
            listeners.append(Events(sys.stdout, run.run_id, clock, strict=options.strict))
        broadcast = Broadcast(listeners=tuple(listeners))
        try:
            yield broadcast
        finally:
            broadcast(lambda listener: listener.close())


@contextmanager
def _redacted_at_the_end(run: RunDir) -> Iterator[None]:
    """Redact the run after the last write: the last attempt may reveal a secret of the first."""
    try:
        yield
    finally:
        redact_run(run)


def _terminal(options: RunOptions) -> Terminal:
    if not options.json:
        return Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, verbose=options.verbose)
    # Events on the same screen would be drawn over by a live view.
    live = not sys.stdout.isatty()
    return Terminal(sys.stderr, version=__version__, playbook=PLAYBOOK, live=live, verbose=options.verbose)


# Documents.


def report_of(run: RunDir, record: Record, outcomes: Sequence[Outcome]) -> Report:
    """Return the redacted report of these attempts, with flakiness, diagnostic reruns and decisions across them."""
    places = {spec.scenario: place for place, spec in enumerate(record.plan)}
    in_order = sorted(outcomes, key=lambda run: (places.get(run.spec.scenario, len(places)), run.attempt))
    started = {outcome.spec.scenario for outcome in outcomes}
    report = Report(
        run_id=run.run_id,
        harness=record.harness,
        machine=record.machine,
        command=run.redaction.typed(record.command),
        interrupted=record.interrupted,
        outcomes=with_words(with_growth(with_deeper_runs(with_flakiness(in_order)))),
        not_run=tuple(spec.scenario for spec in record.plan if spec.scenario not in started),
    )
    return run.redaction.value(with_decisions(report, _plan_file(run, record)))


def _plan_file(run: RunDir, record: Record) -> PlanFile:
    """Return the plan file with its contents at the start of the run."""
    read = read_stored_plan(record.agreed or shipped_plan())
    for mistake in read.mistakes[:1]:
        print(f"note: {run.request}: {mistake}; nothing that was agreed is asked", file=sys.stderr)
    return read.plan


def write_report(run: RunDir, report: Report, search: BisectReport | None = None) -> None:
    from nsa_harness.render.documents.documents import write_documents

    for trouble in write_documents(run, report, PLAYBOOK, search):
        print(f"{trouble.what} could not be written: {trouble.why}; see {run.log}", file=sys.stderr)
