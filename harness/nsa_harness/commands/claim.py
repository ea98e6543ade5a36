"""A claim put to the test: both sides launched in turn, each launch a run like any other, and the ledger.

What decides is pure (`core/comparison/claim.py`); here it is launched, shown, written down and filed in the ledger.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.attempt import run_one
from nsa_harness.commands.run import Interruption, interruptible, listeners, report_of, write_report
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.experiment.claim import (
    CONTROLS,
    FIRST,
    RAREST,
    SECOND,
    ClaimReport,
    Conclusion,
    Number,
    Result,
    SequentialTest,
    Terms,
    Trial,
    difference_text,
    fixed,
    trial_of,
)
from nsa_harness.core.experiment.signature import signature_of
from nsa_harness.core.experiment.statistics import interval, tries
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.errors import HarnessError
from nsa_harness.render import claim as shown
from nsa_harness.render.claim import TrialScreen
from nsa_harness.render.documents.documents import log_fault
from nsa_harness.render.events import SCHEMA
from nsa_harness.render.listener import Broadcast
from nsa_harness.subject.computed import computed, decides_only_how, tolerance
from nsa_harness.subject.files import is_launched_by
from nsa_harness.supervisor.experiments.cache_key import Program, changed, interpreter, told, without_written
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commit_of
from nsa_harness.supervisor.launch.launcher import command_line, sweep_dead_runs
from nsa_harness.supervisor.launch.machine import describe, machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.launch.sides import COMMIT, Side, Sides, sides_of
from nsa_harness.supervisor.storage.adapters import plain
from nsa_harness.supervisor.storage.collect import seconds_a_step
from nsa_harness.supervisor.storage.ledger import NAME, LedgerLine, LedgerSide, add_line, read_ledger
from nsa_harness.supervisor.storage.metrics import table
from nsa_harness.supervisor.storage.record import Record, write_record
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import RunDir, create_run, ended_before, locked
from nsa_harness.texts import words

INTERRUPTED = 130
EXIT = {Result.SUPPORTED: 0, Result.REFUTED: 1, Result.UNDECIDED: 125, Result.NOT_COMPARABLE: 2}
BAD = (Status.HANG, Status.FAIL)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How launches are made and told, whatever they are made for."""

    out: Path | None
    json: bool
    probe: str
    command: str  # as typed
    redact: bool = True
    git_diff: bool = False

    @property
    def parent(self) -> Path:
        return self.out or Path("reports")


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    question: Invocation
    manner: RunOptions
    commits: tuple[str, str] | None
    arg: tuple[str, str] | None  # words of the program, of each side
    text: str | None  # what is claimed; None: made of the sides
    confidence: float
    insistent: bool  # a confidence was asked for
    most_pairs: int
    budget_s: float | None  # for all launches together


def run_claim(request: ClaimRequest) -> int:
    """Test it, write the documents, file it; returns the exit code. Raises UsageError for sides without a contrast."""
    facts = machine_facts()
    with ExitStack() as stack:
        sides = _sides(request, facts, stack)
        claim = _claim(request, sides)
        sweep_dead_runs()
        with session_of(request.manner, (sides.first.spec, sides.second.spec), facts) as session:
            return _tested(session, request, sides, claim)


def _sides(request: ClaimRequest, facts: MachineFacts, stack: ExitStack | None) -> Sides:
    """`stack`: holds the checkouts of two commits for as long as they are launched; None: nothing is."""
    question, commits = request.question, request.commits
    if commits is None:
        return sides_of(question, facts, arg=request.arg)
    shas = (commit_of(question.working_dir, commits[0])[:12], commit_of(question.working_dir, commits[1])[:12])
    if stack is None:
        return sides_of(question, facts, commits=shas, arg=request.arg)
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsa-harness-claim-")))
    trees = stack.enter_context(closing(Worktrees(repository=question.working_dir, home=home)))
    return sides_of(question, facts, commits=shas, arg=request.arg, tree_of=trees.of)


def _claim(request: ClaimRequest, sides: Sides) -> ClaimReport:
    earlier = ended_before(request.manner.parent, {sides.first.spec.spec_hash})
    insistent = request.insistent or any(one.verdict in BAD for one in earlier)
    specs = (sides.first.spec, sides.second.spec)
    terms = Terms(
        confidence=request.confidence,
        most_pairs=request.most_pairs,
        controls=tries(RAREST, request.confidence) if insistent else CONTROLS,
        computes_the_same=all(map(is_launched_by, specs)) and decides_only_how(sides.key),
        tolerance=max(map(tolerance, specs)),
    )
    return ClaimReport(
        text=request.text or f"{sides.second.label} helps", scenario=sides.scenario, key=sides.key,
        labels=(sides.first.label, sides.second.label), terms=terms, budget_s=request.budget_s,
        notes=(*sides.notes, *dict.fromkeys(note for spec in specs for note in spec.notes)),
    )  # fmt: skip


def planned_claim(request: ClaimRequest) -> Sides:
    """Both sides as --dry-run shows them: nothing is launched, and of two commits nothing is checked out."""
    return _sides(request, machine_facts(), None)


def show_plan(request: ClaimRequest, sides: Sides) -> None:
    """What is compared, by which commands, and what that takes at least and at most."""
    claim, specs = _claim(request, sides), (sides.first.spec, sides.second.spec)
    took = [[one.wall_s for one in ended_before(request.manner.parent, {spec.spec_hash})] for spec in specs]
    known = [sum(each) / len(each) for each in took if each]
    pair_s = 2 * sum(known) / len(known) if known else None
    redaction = Redaction(on=request.manner.redact)
    commands = [redaction.command(command_line(spec, sys.executable, None), spec.env) for spec in specs]
    with closing(TrialScreen(sys.stdout, live=False)) as screen:
        screen.show(lambda width: shown.header_lines(claim, width))
        screen.show(lambda width: shown.plan_lines(claim, commands, pair_s, width))


def show_ledger(parent: Path, *, as_json: bool) -> int:
    """`claim --list`: a table to paste, or a JSON line a claim."""
    ledger = read_ledger(parent)
    for line in map(json.dumps, map(plain, ledger.lines)) if as_json else shown.ledger_lines(ledger.lines):
        print(line)
    if ledger.unread:
        print(f"note: {words.plural(ledger.unread, 'line')} of {parent / NAME} could not be read", file=sys.stderr)
    return 0


# Launches in turn.


@dataclass(kw_only=True)
class Session:
    """A run while its launches are made, whatever for."""

    run: RunDir
    manner: RunOptions
    facts: MachineFacts
    screen: TrialScreen
    broadcast: Broadcast
    interruption: Interruption
    record: Record
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return self.interruption.count > 0

    def launch(self, spec: RunSpec) -> Outcome | None:
        """Once more; None: it was interrupted, and says nothing."""
        number = 1 + sum(one.spec.scenario == spec.scenario for one in self.outcomes)
        outcome = run_one(
            spec, self.run.attempt(spec.scenario, number), number=number, probe=self.manner.probe, facts=self.facts,
            tell=self.broadcast, interruption=self.interruption, log=self.run.log,
        )  # fmt: skip
        self.outcomes.append(outcome)
        self.broadcast(lambda one: one.outcome(outcome, self.run.path))
        return None if self.interrupted else outcome

    def say(self, line: Callable[[int], str]) -> None:
        """A line of a given width."""
        self.screen.show(lambda width: [line(width)])

    def write(self, line: LedgerLine, code: int, *, filed: bool) -> Path | None:
        """The documents of the run, as of any, and the line in the ledger where it is to be filed.

        Returns where that is; None where it was not filed, or could not be, which is said.
        """
        ledger = self._file(line) if filed else None
        self.record = replace(self.record, interrupted=self.interrupted)
        write_record(self.run, self.record)
        write_report(self.run, report_of(self.run, self.record, self.outcomes))
        head = {"schema": SCHEMA, "event": "done", "t_s": None, "run_id": self.run.run_id, "scenario": line.scenario}
        event = {**head, "claim": plain(line), "exit_code": code, "run_dir": str(self.run.path)}
        text = self.run.redaction.json(json.dumps(event))
        self.run.door.append(self.run.events, text + "\n")
        if self.manner.json:
            print(text, flush=True)
        return ledger

    def _file(self, line: LedgerLine) -> Path | None:
        try:
            return add_line(self.manner.parent, line, self.run.redaction)
        except (OSError, HarnessError) as error:
            print(f"the ledger could not be written: {error}", file=sys.stderr)
            return None

    def git(self, spec: RunSpec) -> tuple[str | None, bool | None]:
        """Commit of the checkout that it is launched in, and whether anything in it is not committed."""
        git = describe(spec, self.facts, git_diff=False)["git"] or {}
        return git.get("commit"), git.get("dirty")


@contextmanager
def session_of(manner: RunOptions, specs: tuple[RunSpec, ...], facts: MachineFacts) -> Iterator[Session]:
    run = create_run(manner.parent, redact=manner.redact, git_diff=manner.git_diff)
    record = Record(
        command=manner.command,
        harness=__version__,
        machine=facts,
        controller=os.getpid(),
        plan=specs,
        probe=manner.probe,
    )
    as_run = RunRequest(
        specs=specs, out=manner.out, json=manner.json, strict=False, probe=manner.probe, command=manner.command
    )
    screen = TrialScreen(sys.stderr if manner.json else sys.stdout, live=not manner.json)
    with ExitStack() as stack:
        stack.enter_context(locked(run))
        write_record(run, record)
        stack.callback(_close, screen, run)
        broadcast = stack.enter_context(listeners(as_run, run, screen))
        interruption = stack.enter_context(interruptible(broadcast, as_run))
        screen.lost_terminal = interruption.lost_terminal
        yield Session(
            run=run, manner=manner, facts=facts, screen=screen, broadcast=broadcast, interruption=interruption,
            record=record,
        )  # fmt: skip


def _close(screen: TrialScreen, run: RunDir) -> None:
    """What could not be shown stands in the log: the screen itself may be what is gone."""
    screen.close()
    for trouble in screen.trouble:
        log_fault(run, f"{trouble.what}: {trouble.why}\n")


# A claim.


def _tested(session: Session, request: ClaimRequest, sides: Sides, claim: ClaimReport) -> int:
    session.screen.show(lambda width: shown.header_lines(claim, width))
    files = _Files(sides=sides, working_dir=request.question.working_dir)
    contest = SequentialTest(terms=claim.terms)
    while (conclusion := _ended(session, request, contest)) is None:
        side = contest.next_side
        session.screen.running(shown.progress_text(replace(claim, trials=tuple(contest.trials)), side))
        trial = _trial(session, (sides.first, sides.second)[side], side)
        session.screen.running(None)
        if trial is None:
            continue
        contest.learn(trial)
        files.learn_written(contest)
        session.say(partial(shown.trial_line, replace(claim, trials=tuple(contest.trials))))
    if other := files.edited():
        why = f"{told(other)} changed while it was tested: the runs are not all of the same program"
        conclusion = Conclusion(result=Result.NOT_COMPARABLE, why=why)
    report = replace(claim, trials=tuple(contest.trials), conclusion=conclusion)
    code = INTERRUPTED if session.interrupted else EXIT[conclusion.result]
    ledger = session.write(_line(session, request, sides, report), code, filed=bool(report.trials))
    session.screen.show(lambda width: ["", *shown.answer_lines(report, session.run.path, ledger, width)])
    return code


def _ended(session: Session, request: ClaimRequest, contest: SequentialTest) -> Conclusion | None:
    """Why nothing more is launched."""
    if found := contest.conclusion():
        return found
    counted = f"{contest.count(FIRST)} without it and {contest.count(SECOND)} with it"
    if session.interrupted:
        why = f"interrupted at {counted}; the same command starts anew"
    elif request.budget_s is not None and sum(one.wall_s for one in contest.trials) >= request.budget_s:
        why = f"the budget of {words.seconds(request.budget_s)} is spent: {counted}"
    else:
        return None
    return Conclusion(result=Result.UNDECIDED, why=why)


def _trial(session: Session, side: Side, number: int) -> Trial | None:
    outcome = session.launch(side.spec)
    if outcome is None:
        return None
    attempt = session.run.attempt(outcome.spec.scenario, outcome.attempt)
    numbers: tuple[Number, ...] = ()
    if is_launched_by(side.spec):
        numbers = computed(lambda name: table(attempt.door, attempt.path / name, lambda *_: None))
    step_s = seconds_a_step(attempt, side.spec.ranks)
    return trial_of(outcome, number, str(signature_of(outcome)), step_s=step_s, computed=numbers)


@dataclass(kw_only=True)
class _Files:
    """The program's own files: whoever edits one while it is tested has two programs. Of commits each has its own."""

    sides: Sides
    working_dir: Path
    _program: Program | None = field(init=False, default=None)
    _before: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        if self.sides.key != COMMIT:
            specs = [self.sides.first.spec, self.sides.second.spec]
            asked = interpreter(specs[0].python, {**os.environ, **dict(specs[0].env)})
            self._program = Program(specs=specs, words=(), interpreter=asked, working_dir=self.working_dir)
        self._before = self._files()

    def learn_written(self, contest: SequentialTest) -> None:
        """What the first trial of a side has changed or made, the program writes itself."""
        if len(contest.trials) <= 2:
            self._before = without_written(self._before, self._files())

    def edited(self) -> tuple[str, ...]:
        return changed(self._before, self._files())

    def _files(self) -> dict[str, str]:
        return {} if self._program is None else self._program.files()


def _line(session: Session, request: ClaimRequest, sides: Sides, report: ClaimReport) -> LedgerLine:
    assert report.conclusion is not None
    confidence = report.terms.confidence
    both = zip((sides.first, sides.second), report.counts, strict=True)
    kept = fixed(*report.counts, confidence)
    commit, dirty = session.git(replace(sides.first.spec, cwd=None))
    seen = report.agreement
    computes = "not known" if seen.alike is None else "the same" if seen.alike else difference_text(seen)
    return LedgerLine(
        kind="claim", at=now(), text=report.text, result=report.conclusion.result.value, why=report.conclusion.why,
        fixed=kept and kept.value, computes=computes, scenario=report.scenario, key=report.key,
        sides=tuple(
            ledger_side(side.label, side.spec.spec_hash, counted.bad, counted.of, confidence, dict(counted.ends))
            for side, counted in both
        ),
        confidence=confidence, attempts=len(report.trials), seconds=round(report.took_s, 1),
        runs=(session.run.run_id,), commit=commit, dirty=dirty, machine=session.facts.host,
        command=session.run.redaction.typed(request.manner.command),
    )  # fmt: skip


def ledger_side(what: str, spec_hash: str, bad: int, of: int, confidence: float, ends: dict[str, int]) -> LedgerSide:
    low, high = interval(bad, of, confidence)
    return LedgerSide(
        what=what, spec_hash=spec_hash, failed=bad, of=of, rate=round(bad / of, 4) if of else None,
        low=round(low, 4), high=round(high, 4), ends=ends,
    )  # fmt: skip


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
