"""A run from its resolved scenarios to its documents, and a stored one judged again.

From here on: `scheduler` says what is launched next, `attempt` launches it and follows it to its end, `judge` says what
happened from the files that it left.

- What ends an attempt: the watch decides (`Watch` in `supervisor/watch/watch.py`), and `Guarded.end`, called by
  `attempt`, has the guardian end what is left; if this process dies, the guardian does so by itself. Ctrl-C is
  `Interruption` below; what ends a plan early is `Execution._stopped` in `scheduler`.
- Where a HANG is decided: suspected by the watch, proven by `prove` (`core/verdict/proof.py`) while it runs, and proven
  again from disk by the function `judge` (`core/verdict/verdict.py`). Which waits are closed: `group_waits` and
  `host_waits` beside it. A deadline is FAIL.
- Where a cause is named: `outcome_of` (`core/outcome.py`) asks `diagnose` (`core/diagnosis/engine.py`).
- Where a file is written: `supervisor/store/rundir.py` has the names and both ways to write; `commands/judge.py` writes
  what belongs to an attempt, `render/documents/documents.py` what belongs to the run, the watch its journal and dumps.

In this module and those three an import within a function is of what a launch does not need: the ranks start sooner
without it, and while they do, `attempt` loads what watches, judges and writes.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from nsa_harness import __version__
from nsa_harness.commands.scheduler import Execution, RunRequest
from nsa_harness.core.comparison.decisions import with_decisions
from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, agreed_plan
from nsa_harness.core.comparison.severity import strict_exit_code
from nsa_harness.core.comparison.sweeps import with_growth
from nsa_harness.core.experiment.diagnostic_rerun import with_deeper_runs
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Outcome, Report, exit_code
from nsa_harness.core.schedule import as_expected
from nsa_harness.errors import HarnessError, StoredRunError
from nsa_harness.render.documents.prompt import prompt_text
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.events import Events
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.subject.playbook import PLAYBOOK, WHAT_FOLLOWS
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.plan_files import shipped_plan
from nsa_harness.supervisor.storage.record import (
    Record,
    know_launches,
    load_spec,
    plan_to_resume,
    read_record,
    with_raw_plan,
    write_record,
)
from nsa_harness.supervisor.storage.redacted_files import redact_run
from nsa_harness.supervisor.storage.rundir import RunDir, at_rest, create_run, find_run, locked
from nsa_harness.supervisor.storage.safe_directory import Budget

if TYPE_CHECKING:
    from nsa_harness.core.search.report import BisectReport


@dataclass(kw_only=True)
class Interruption:
    """Ctrl-C, TERM, QUIT, or a terminal that is gone: once means dump, clean up and report; twice means kill at once.

    An attempt that has ended is judged, and the report written, whatever comes meanwhile.
    """

    broadcast: Broadcast
    side_by_side: bool  # the attempts look at `count` themselves
    count: int = 0
    _watching: bool = False  # an attempt, which a second one leaves at once

    def __call__(self, number: int, _: FrameType | None) -> None:
        # A shell passes on the hang-up that the kernel has sent already: that is no second wish.
        if number == signal.SIGHUP and self.count:
            return
        self.count += 1
        self.broadcast(lambda one: one.interrupted(self.count))
        if self.count == 2 and self._watching:
            raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is entered, a second one is a KeyboardInterrupt."""
        self._watching = not self.side_by_side
        try:
            yield
        finally:
            self._watching = False

    def lost_terminal(self) -> None:
        """Nobody sees what is told, and no signal has said so: the terminal belonged to another session."""
        self.count = max(self.count, 1)


def run_all(request: RunRequest, screen: Listener | None = None) -> int:
    """Run every spec, write the documents, return the exit code. `screen` takes the place of the terminal."""
    keeping = {"redact": request.redact, "git_diff": request.git_diff}
    if request.resumed is None:
        run = create_run(request.out or Path("reports"), **keeping)
    else:
        run = RunDir(request.resumed, **keeping)
    sweep_dead_runs()
    with locked(run):
        return _run_in(run, request, screen)


def _run_in(run: RunDir, request: RunRequest, screen: Listener | None) -> int:
    facts = machine_facts()
    before = [] if request.resumed is None else judged(run)
    record = Record(
        command=request.command,
        harness=__version__,
        machine=facts,
        controller=os.getpid(),
        plan=request.specs,
        policy=request.policy,
        jobs=request.jobs,
        probe=request.probe,
        deepen=request.deepen,
        agreed=request.agreed or (shipped_plan() if request.resumed is None else None),
    )
    write_record(run, record)
    with listeners(request, run, screen) as broadcast, interruptible(broadcast, request) as interruption:
        execution = Execution(run=run, request=request, facts=facts, broadcast=broadcast, interruption=interruption)
        outcomes = execution.outcomes_after(before)
        record = replace(record, interrupted=interruption.count > 0)
        write_record(run, record)
        report = report_of(run, record, outcomes)
        write_report(run, report)
        broadcast(lambda one: one.done(report, run.path))
    return strict_exit_code(report) if request.strict else exit_code(report)


class ReportFormat(Enum):
    """In which form a stored run is told on stdout."""

    LINES = "lines"
    JSON = "json"
    PROMPT = "prompt"


def rejudge(
    path: Path | None,
    *,
    telling: ReportFormat = ReportFormat.LINES,
    strict: bool = False,
    out: Path | None = None,
    redact: bool = True,
    verbose: bool = False,
) -> int:
    """Judge a stored run again from its files alone; returns the exit code that `run` would give.

    Raises StillRunning for a run that has not ended: nothing of it is written.
    """
    run = find_run(path, out or Path("reports"), redact=redact)
    with at_rest(run):
        report = _report_again(run)
    if telling is ReportFormat.JSON:
        sys.stdout.write(to_json(report, PLAYBOOK))
    elif telling is ReportFormat.PROMPT:
        sys.stdout.write(prompt_text(report))
    else:
        _tell_again(run, report, verbose=verbose)
    return strict_exit_code(report) if strict else exit_code(report)


def _report_again(run: RunDir) -> Report:
    from nsa_harness.core.outcome.outcome import skipped

    record = read_record(run)
    with suppress(StoredRunError):
        know_launches(run, with_raw_plan(run, record).plan)
    skips = [skipped(spec) for spec in record.plan if isinstance(spec, Skip)]
    report = report_of(run, record, [*_judged_apart(run, record), *skips])
    if os.access(run.path, os.W_OK):
        write_report(run, report, _search(run))
        redact_run(run)
    return report


def _search(run: RunDir) -> BisectReport | None:
    """Of a bisection's run, as it was told; one that cannot be read leaves the report without its picture."""
    if not run.door.is_file(run.search):
        from nsa_harness.supervisor.experiments.journal import unanswered_question

        if unanswered := unanswered_question(run):
            print(f"note: {unanswered}", file=sys.stderr)
        return None
    from nsa_harness.render.experiments.bisect_json import stored_search

    try:
        return stored_search(run)
    except HarnessError as error:
        print(f"note: {error}", file=sys.stderr)
        return None


def failed_specs(path: Path | None, out: Path | None) -> tuple[RunSpec, ...]:
    """What did not end as expected in a stored run, to be run once more. Empty when all of it did."""
    run = find_run(path, out or Path("reports"))
    with at_rest(run):
        attempts = with_flakiness(judged(run))
    failed = [outcome for outcome in attempts if outcome.final and not as_expected(outcome)]
    return tuple(load_spec(run.path / outcome.dir / "spec.json", run.door) for outcome in failed)


def resumed_request(path: Path | None, request: RunRequest) -> RunRequest:
    """The request of a stored run, to be gone on with in its own directory. Raises StoredRunError."""
    run = find_run(path, request.out or Path("reports"))
    record = plan_to_resume(run)
    return replace(
        request,
        specs=record.plan,
        policy=record.policy,
        jobs=record.jobs,
        probe=record.probe,
        deepen=record.deepen,
        resumed=run.path,
        command=record.command,
        agreed=record.agreed,
    )


def agreed_before(path: Path | None, out: Path | None) -> PlanText | None:
    """What stood when a stored run was started."""
    return read_record(find_run(path, out or Path("reports"))).agreed


def judged(run: RunDir) -> list[Outcome]:
    """Every attempt of a stored run, each by itself. Raises HarnessError where one cannot be judged."""
    from nsa_harness.commands.judge import judge_stored

    budget = Budget()
    return [judge_stored(attempt, budget) for attempt in run.attempts()]


def _judged_apart(run: RunDir, record: Record) -> list[Outcome]:
    """Each attempt by itself: what cannot be judged is ERROR, and the others keep their verdicts."""
    from nsa_harness.commands.judge import judge_stored, not_judged
    from nsa_harness.render.documents.documents import log_fault

    outcomes, budget = [], Budget()
    for attempt in run.attempts():
        try:
            outcomes.append(judge_stored(attempt, budget))
        except Exception as error:
            outcomes.append(not_judged(attempt, record.plan, error))
            if not isinstance(error, HarnessError):
                log_fault(run, f"{attempt.path.name} could not be judged:\n{traceback.format_exc()}")
    return outcomes


def write_report(run: RunDir, report: Report, search: BisectReport | None = None) -> None:
    from nsa_harness.render.documents.documents import write_documents

    for trouble in write_documents(run, report, PLAYBOOK, search):
        print(f"{trouble.what} could not be written: {trouble.why}; see {run.log}", file=sys.stderr)


def report_of(run: RunDir, record: Record, outcomes: Sequence[Outcome]) -> Report:
    places = {spec.scenario: place for place, spec in enumerate(record.plan)}
    in_order = sorted(outcomes, key=lambda one: (places.get(one.spec.scenario, len(places)), one.attempt))
    started = {one.spec.scenario for one in outcomes}
    report = Report(
        run_id=run.run_id,
        harness=record.harness,
        machine=record.machine,
        command=run.redaction.typed(record.command),
        interrupted=record.interrupted,
        outcomes=with_growth(with_deeper_runs(with_flakiness(in_order), WHAT_FOLLOWS)),
        not_run=tuple(spec.scenario for spec in record.plan if spec.scenario not in started),
    )
    return run.redaction.value(with_decisions(report, _agreed(run, record)))


def _agreed(run: RunDir, record: Record) -> PlanFile:
    """By what the runs are judged together: what stood when the run was started, whatever the file says today."""
    read = agreed_plan(record.agreed or shipped_plan())
    for mistake in read.mistakes[:1]:
        print(f"note: {run.request}: {mistake}; nothing that was agreed is asked", file=sys.stderr)
    return read.plan


@contextmanager
def interruptible(broadcast: Broadcast, request: RunRequest) -> Iterator[Interruption]:
    interruption = Interruption(broadcast=broadcast, side_by_side=request.jobs != 1)
    broadcast.lost_terminal = interruption.lost_terminal
    # What nohup has made the program ignore, it ignores.
    asked = [one for one in _HANG_UPS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM, *asked)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _leave_lost_terminals()


_HANG_UPS = (signal.SIGHUP, signal.SIGQUIT)


def _leave_lost_terminals() -> None:
    """What is still to be printed goes nowhere: the interpreter would fail to, and end with a code of its own."""
    for stream in (1, 2):
        try:
            os.tcgetpgrp(stream)
        except OSError as error:
            if error.errno == errno.EIO:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)


@contextmanager
def listeners(request: RunRequest, run: RunDir, screen: Listener | None) -> Iterator[Broadcast]:
    """The screen, the log, the event file, and with --json the event stream; people's text then goes to stderr."""
    began = time.monotonic()
    with (
        _redacted_at_the_end(run),
        run.door.appending(run.log) as log,
        run.door.appending(run.events) as events,
    ):
        clock = lambda: time.monotonic() - began  # noqa: E731
        listeners: list[Listener] = [
            screen or _terminal(request),
            Terminal(log, version=__version__, playbook=PLAYBOOK, environ={"NO_COLOR": "1"}, verbose=True),
            Events(events, run.run_id, clock, strict=request.strict),
        ]
        if request.json:
            listeners.append(Events(sys.stdout, run.run_id, clock, strict=request.strict))
        broadcast = Broadcast(listeners=tuple(listeners))
        try:
            yield broadcast
        finally:
            broadcast(lambda one: one.close())


@contextmanager
def _redacted_at_the_end(run: RunDir) -> Iterator[None]:
    """Once nobody writes them any more: of the first attempt too what only the last one has given away."""
    try:
        yield
    finally:
        redact_run(run)


def _terminal(request: RunRequest) -> Terminal:
    if not request.json:
        return Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, verbose=request.verbose)
    # Events on the same screen would be drawn over by a live view.
    live = not sys.stdout.isatty()
    return Terminal(sys.stderr, version=__version__, playbook=PLAYBOOK, live=live, verbose=request.verbose)


def _tell_again(run: RunDir, report: Report, *, verbose: bool) -> None:
    several = len(report.outcomes) > 1
    screen = Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, several=several, verbose=verbose)
    for outcome in report.outcomes:
        screen.outcome(outcome, run.path)
    screen.done(report, run.path)
