"""A bisection: the search asks, each question is a launch like any other, and the answer is proven and written down."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from nsa_harness import __version__
from nsa_harness.commands.attempt import run_one
from nsa_harness.commands.bisect_report import (
    ANSWERED,
    INTERRUPTED,
    UNDECIDED,
    SearchState,
    report_so_far,
    shown_in_full,
    write_answer,
)
from nsa_harness.commands.run import Interruption, interruptible, listeners
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.evidence.evidence import Sample, Snapshot
from nsa_harness.core.experiment.signature import SLOW, Signature, counts_as, line_word
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.core.schedule import Load, Room, free_devices, side_by_side
from nsa_harness.core.search.effort import Stage, worst_case
from nsa_harness.core.search.plan import find
from nsa_harness.core.search.question import (
    AnswerKind,
    CountsAs,
    OutOfBudget,
    Purpose,
    Round,
    SearchAnswer,
    SearchQuestion,
    Spans,
    Subset,
    spans_of,
)
from nsa_harness.core.search.report import ProbeReport, ended_s
from nsa_harness.core.search.subject import Form, in_its_words
from nsa_harness.core.search.waits import (
    Costs,
    Waiting,
    WaitSignature,
    costs,
    early_after_s,
    seen_before,
    standing,
    time_left_s,
    waiting_for,
)
from nsa_harness.render.documents.documents import log_fault
from nsa_harness.render.events import SCHEMA
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.bisect_json import answer_event, probe_event
from nsa_harness.render.experiments.screen import BisectScreen
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.supervisor.experiments.cache_key import told
from nsa_harness.supervisor.experiments.intermediate_configs import Mixtures, Worktrees
from nsa_harness.supervisor.experiments.journal import Journal, SearchFolder, as_seen, bookmark, search_folder
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    CannotLaunch,
    Launches,
    earlier_of,
    premises_of,
    program_of,
    question_of,
)
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts, memory_bytes
from nsa_harness.supervisor.launch.plan_files import shipped_plan
from nsa_harness.supervisor.storage.collect import seconds_a_step
from nsa_harness.supervisor.storage.record import Record, write_record
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.texts import words

_MOST_CONFIRMED = 3
_PROOFS = (Purpose.PROOF_BAD, Purpose.PROOF_GOOD)


class _LauncherDecides(Exception):
    """What a fork has shown torchrun does not: the search begins anew, and forks no more."""


class _Interrupted(OutOfBudget):
    """Ctrl-C or TERM: no further probe. What is known is told, and the same command goes on."""

    def __str__(self) -> str:
        return "interrupted; the same command goes on where it stopped"


def run_bisection(request: BisectRequest) -> int:
    """Search, prove, write the documents; returns the exit code."""
    facts = machine_facts()
    parent = request.out or Path("reports")
    launches = Launches(request=request, facts=facts)
    program = program_of(request, launches)
    mark = bookmark(request.subject.question, request.command, premises_of(request, launches, program))
    sweep_dead_runs()
    with search_folder(parent, mark, program.files, redact=request.redact, git_diff=request.git_diff) as folder:
        write_record(folder.run, begun_record(request, facts))
        return _search_in(folder, request, launches, facts)


def begun_record(request: BisectRequest, facts: MachineFacts) -> Record:
    """run.json of a search that has launched nothing yet: which launches it takes, nobody knows before its end."""
    return Record(
        command=request.command, harness=__version__, machine=facts, controller=os.getpid(), plan=(),
        probe=request.probe, agreed=shipped_plan(),
    )  # fmt: skip


def _search_in(folder: SearchFolder, request: BisectRequest, launches: Launches, facts: MachineFacts) -> int:
    with _open(request, folder, launches, facts) as bisection:
        if folder.goes_on:
            made = words.plural(len(bisection.journal.kept), "probe")
            bisection.screen.note(f"goes on with {folder.run.path}: {made} already made")
        elif folder.note:
            bisection.note(folder.note)
        code = bisection.carry_out()
        folder.write(ended=code != INTERRUPTED and not bisection.out_of_budget)
    return code


@dataclass(kw_only=True)
class Bisection(SearchState):
    """One search while it is carried out."""

    run: RunDir
    folder: SearchFolder
    journal: Journal
    screen: BisectScreen
    broadcast: Broadcast
    interruption: Interruption
    server: ForkServer | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # of this session, by directory
    specs: list[RunSpec] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)  # devices
    waits: set[WaitSignature] = field(default_factory=set)  # each proven in full to hang, by a probe of this session
    stages: tuple[Stage, ...] = ()  # of this question, at worst
    forks: bool = True  # until one has shown what torchrun does not
    confirmed: set[Spans] = field(default_factory=set)  # torchrun was asked whether a fork was right
    baseline_s: list[float] = field(default_factory=list)  # a step of the good end, each time; where slow is sought
    slow_from_s: float | None = None  # a step that takes so long counts as bad; None until that is known
    out_of_budget: bool = False  # the same command with a larger one goes on
    interrupted: bool = False
    began_s: float = field(init=False)  # where the clock of the search, which stands between sessions, was at zero
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of the probes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.began_s = time.monotonic() - ended_s(self.journal.kept)

    def carry_out(self) -> int:
        self.screen.begun(report_so_far(self))
        answer = in_its_words(self.request.subject, self._found())
        if not self.interrupted:
            self._ask_for_commands(answer)
        self._tell_what_changed()
        if self.interrupted:
            self._finish(answer, cut_short=True)
            return INTERRUPTED
        self._finish(answer, cut_short=False)
        return UNDECIDED if answer.kind is AnswerKind.UNDECIDED else ANSWERED

    def _tell_what_changed(self) -> None:
        """A program that was edited while it was searched is not one program."""
        if other := self.folder.edited():
            self.note(f"{told(other)} changed while the search ran: its probes are not all of the same program")

    def _found(self) -> SearchAnswer:
        question = self._question()
        self.stages = worst_case(question)
        try:
            return find(question, self.probe)
        except _LauncherDecides:
            self.forks = False
            self.journal.begin_anew()
            self.probes = [_discounted(one) for one in self.probes]
            self.signature = None
            self.waits.clear()
            return find(question, self.probe)

    def _question(self) -> SearchQuestion:
        """As many probes side by side as were asked for, and as the machine has cores or devices for."""
        return replace(question_of(self.request, self.earlier), bad_cost=self._bad_cost, at_once=self._at_once())

    def _at_once(self) -> int:
        """Once a sound run was seen, by the memory that it took, too."""
        asked = self.request.jobs
        try:
            spec = self.launches.spec(range(len(self.request.subject.items)))
        except CannotLaunch:
            return asked
        gpus = spec.ranks if spec.device == "cuda" else 0
        seen = [one.usage.peak_rss_bytes for one in self.outcomes.values()]
        rank_bytes = max((size for size in seen if size), default=0)
        room = Room(jobs=asked, cores=self.facts.cpus, gpus=len(self.facts.gpus), memory_bytes=memory_bytes()[1])
        held, what = side_by_side(Load(ranks=spec.ranks, gpus=gpus, memory_bytes=spec.ranks * rank_bytes), room)
        if held < asked:
            self.note(f"--jobs {asked}: {held} at a time, as many as the {what} of this machine hold")
        return held

    def probe(self, round_: Round) -> list[CountsAs]:
        """One launch for each subset, or what was kept of it by a search that was cut short."""
        self.screen.round_begun(round_, report_so_far(self), self._left_s(round_))
        each = [
            replace(round_, subsets=(one,), purpose=why, each=())
            for one, why in zip(round_.subsets, round_.purposes, strict=True)
        ]
        numbers = [next(self._numbers) for _ in each]
        if len(each) == 1:
            made = [self._one(numbers[0], each[0])]
        else:
            with ThreadPoolExecutor(max_workers=min(len(each), self._at_once())) as pool:
                made = list(pool.map(self._one, numbers, each))
        for one in made:
            self._check_launcher(one)
        return [one.counts_as for one in made]

    def _check_launcher(self, new: ProbeReport) -> None:
        """Before the search hears of a contradiction: whether it comes from how the probes were launched.

        Raises _LauncherDecides. Of a program that contradicts itself anyhow a few forks are confirmed, and no more.
        """
        forked = contradicted_fork(new, self.probes)
        if forked is None or forked.subset in self.confirmed or len(self.confirmed) == _MOST_CONFIRMED:
            return
        self.confirmed.add(forked.subset)
        again = self._once_more(forked.places, Purpose.REPEAT)
        if again.counts_as in (forked.counts_as, CountsAs.UNRESOLVED):
            return
        if self._once_more(forked.places, Purpose.REPEAT, in_full=False).counts_as is not forked.counts_as:
            return  # it changes under one launcher, so the other one explains nothing
        with_it = self.request.subject.describe(forked.places)
        self.note(
            f"with {with_it} a forked probe counts as {forked.counts_as.value} and one of torchrun as "
            f"{again.counts_as.value}: torchrun throughout from here, and what forks showed is discounted"
        )
        raise _LauncherDecides

    def _once_more(self, subset: Subset, purpose: Purpose, *, in_full: bool = True) -> ProbeReport:
        """`in_full`: under torchrun, and with the limits that the command for people has."""
        round_ = Round(subsets=(subset,), purpose=purpose, open=(0, len(self.request.subject.items)), left=0)
        self.screen.round_begun(round_, report_so_far(self), self._left_s(round_))
        return self._one(next(self._numbers), round_, in_full=in_full)

    def _ask_for_commands(self, answer: SearchAnswer) -> None:
        """A command is printed only where its last launch did what is said of it."""
        wanted = (
            (answer.failing, CountsAs.BAD, Purpose.PROOF_BAD),
            (answer.passing, CountsAs.GOOD, Purpose.PROOF_GOOD),
        )
        for subset, counts, purpose in wanted:
            if subset is None or shown_in_full(self.probes, subset, counts):
                continue
            try:
                made = self._once_more(subset, purpose)
            except OutOfBudget:
                why = "the budget is spent before it was launched under torchrun"
            else:
                if made.counts_as is counts:
                    continue
                why = f"launched once more under torchrun it counts as {made.counts_as.value}"
            self.note(f"no command for {self.request.subject.describe(subset)}: {why}")

    def _one(self, n: int, round_: Round, *, in_full: bool | None = None) -> ProbeReport:
        (subset,) = round_.subsets
        in_full = self._in_full(subset, round_.purpose) if in_full is None else in_full
        with self._lock:
            kept = self.journal.take(subset, in_full=in_full)
        if kept is None:
            kept = self._made(n, subset, round_, in_full=in_full)
        with self._lock:
            self.journal.answered.append(kept)
            self._learn(kept)
            probed = replace(kept, n=n)
            self.probes = sorted([*self.probes, probed], key=lambda one: one.n)
            self.screen.probed(probed, report_so_far(self))
            self._tell_programs(self.run.redaction.value(probe_event(self.request.subject, probed)))
        return probed

    def _tell_programs(self, event: dict[str, object]) -> None:
        """A line of the `--json` stream beside those of each launch; the event file has all of them."""
        line = json.dumps({"schema": SCHEMA, **event, "t_s": None, "run_id": self.run.run_id})
        self.run.door.append(self.run.events, line + "\n")
        if self.request.json:
            print(line, flush=True)

    def _in_full(self, subset: Subset, purpose: Purpose) -> bool:
        """A proof is launched by torchrun as often as was asked for; what repeats it beyond that need not be."""
        spans = spans_of(subset)
        made = sum(one.in_full and one.subset == spans for one in self.journal.answered)
        return purpose in _PROOFS and made < self.request.repeat

    def _made(self, n: int, subset: Subset, round_: Round, *, in_full: bool) -> ProbeReport:
        self._leave_if_interrupted()
        if self.request.budget_s is not None and sum(one.wall_s for one in self.probes) >= self.request.budget_s:
            self.out_of_budget = True
            raise OutOfBudget
        blank = ProbeReport(
            n=n, subset=spans_of(subset), purpose=round_.purpose, open=round_.open, left=round_.left,
            in_full=in_full, launcher="none", verdict=None, kind=None, cause=None, summary="", place=None, culprits=(),
            phase=None, counts_as=CountsAs.UNRESOLVED, wall_s=0.0, longest_quiet_s=None, dir=None, spec_hash=None,
            started_s=time.monotonic() - self.began_s,
        )  # fmt: skip
        try:
            spec = self.launches.spec(subset)
        except CannotLaunch as why:
            kept = replace(blank, summary=str(why))
        else:
            kept = self._launched(spec, blank)
        with self._lock:
            self.journal.keep(kept)
            if kept.dir is not None and sum(one.dir is not None for one in self.journal.kept) == 1:
                self.folder.leave_out_written()
        return kept

    def _launched(self, spec: RunSpec, blank: ProbeReport) -> ProbeReport:
        name = self._free_name(blank.n)
        about = f"{blank.purpose.value.replace('_', ' ')}: {self.request.subject.describe(blank.places)}"
        spec = self.launches.limited(replace(spec, scenario=name, about=about), in_full=blank.in_full)
        spec = self._settled(spec, in_full=blank.in_full)
        patience = self._patience(spec, blank)
        with self._devices(spec) as devices:
            outcome = run_one(
                spec, self.run.attempt(name), number=1, probe=self.request.probe, facts=self.facts,
                tell=self.broadcast, interruption=self.interruption, log=self.run.log, devices=devices,
                server=self.server, enough=patience,
            )  # fmt: skip
        self._leave_if_interrupted()
        self.broadcast(lambda one: one.outcome(outcome, self.run.path))
        with self._lock:
            self.outcomes[outcome.dir] = outcome
            self.specs.append(spec)
            attempt = self.run.attempt(name)
            step_s = seconds_a_step(attempt, spec.ranks) if self.request.wanted.how == SLOW else None
            counts = counts_as(
                outcome, self.request.wanted, self.signature, self.run.door.tail(attempt.output), step_s=step_s,
                slow_from_s=self.slow_from_s,
            )  # fmt: skip
            launched = replace(blank, launcher=spec.launcher.value, counts_as=counts, step_s=step_s)
            seen = as_seen(launched, outcome)
            if patience.early and outcome.verdict.status is Status.ERROR:
                return replace(seen, early=True, verdict=None, counts_as=CountsAs.BAD)
            if counts is CountsAs.BAD and outcome.verdict.status is Status.HANG and patience.signature:
                self.waits.add(patience.signature)
        return seen

    def _patience(self, spec: RunSpec, blank: ProbeReport) -> EarlyStop:
        """A proof in full is waited for as any run is; so is every probe until the first one was."""
        return EarlyStop(
            n=blank.n, ranks=spec.ranks, known=self.waits, tell=self.screen.waits,
            quiet_s=None if blank.in_full else self.launches.longest_quiet_s,
        )  # fmt: skip

    def _leave_if_interrupted(self) -> None:
        if self.interruption.count:
            self.interrupted = True
            raise _Interrupted

    @contextmanager
    def _devices(self, spec: RunSpec) -> Iterator[tuple[int, ...] | None]:
        """GPUs of its own for a probe that has others beside it."""
        if spec.device != "cuda" or self.request.jobs == 1:
            yield None
            return
        with self._lock:
            devices = free_devices(self.taken, spec.ranks, len(self.facts.gpus))
            self.taken |= set(devices)
        try:
            yield devices
        finally:
            with self._lock:
                self.taken -= set(devices)

    def _settled(self, spec: RunSpec, *, in_full: bool) -> RunSpec:
        """The launch with its launcher chosen: a fork where that is safe, and nothing is proven by it."""
        if self.server is None or in_full or not self.forks:
            return spec
        settled = self.server.settled(replace(spec, launcher=Launcher.FORK))
        if settled.launcher is not Launcher.FORK:
            self.note(settled.notes[-1])
        return settled

    def _learn(self, kept: ProbeReport) -> None:
        """What the controls teach: how quiet a sound run is, and what the failure looks like."""
        if kept.purpose is Purpose.CONTROL_GOOD and kept.counts_as is CountsAs.GOOD and kept.longest_quiet_s:
            self.launches.longest_quiet_s = kept.longest_quiet_s
        if kept.purpose is Purpose.CONTROL_GOOD and kept.counts_as is CountsAs.GOOD:
            self._learn_pace(kept)
        if self.signature is None and kept.counts_as is CountsAs.BAD and kept.verdict is not None:
            slow = self.request.wanted.how == SLOW
            verdict, cause, place = (SLOW, None, None) if slow else (kept.verdict, kept.cause, line_word(kept.place))
            self.signature = Signature(verdict=verdict, cause=cause, place=place)

    def _learn_pace(self, good: ProbeReport) -> None:
        """Only before anything was compared with it: what is slow may not change in the middle. Called in the lock."""
        if good.step_s is None or self.slow_from_s is not None:
            return
        self.baseline_s.append(good.step_s)
        if len(self.baseline_s) == question_of(self.request).baseline:
            self.slow_from_s = self.request.wanted.slow_from_s(self.baseline_s)
            assert self.slow_from_s is not None
            self.notes.append(bisect_words.slow_word(self.slow_from_s, self.baseline_s))
            self.screen.note(self.notes[-1])

    def _finish(self, answer: SearchAnswer, *, cut_short: bool) -> None:
        report = write_answer(self, answer, self.outcomes, self.specs, cut_short=cut_short)
        self.screen.answered(report, self.run.path)
        self._tell_programs(answer_event(report, str(self.run.path)))

    def _free_name(self, n: int) -> str:
        """A probe that was killed in its middle has left a folder; it answers for nothing and keeps its name."""
        names = (f"p{n:02d}", *(f"p{n:02d}_{again}" for again in range(2, 1000)))
        return next(name for name in names if not self.run.attempt(name).path.exists())

    def note(self, text: str) -> None:
        with self._lock:
            new = text not in self.notes
            if new:
                self.notes.append(text)
        if new:
            self.screen.note(text)

    def _bad_cost(self) -> float:
        """How much longer a failing probe takes than a passing one, as the probes so far have shown."""
        each = self._costs()
        return max(0.1, each.bad_s / each.good_s) if each and each.good_s else 1.0

    def _costs(self) -> Costs | None:
        quiet_s = self.launches.longest_quiet_s
        return costs(self.probes, early_after_s(quiet_s) if self.waits and quiet_s is not None else None)

    def _left_s(self, round_: Round) -> float | None:
        """Of the whole search; None until both ends were seen."""
        each, repeat = self._costs(), self.request.repeat
        return time_left_s(self.stages, self.probes, round_, each, repeat) if each else None


def contradicted_fork(new: ProbeReport, before: Sequence[ProbeReport]) -> ProbeReport | None:
    """A forked probe that torchrun should be asked about; None: no launcher explains anything here.

    An end that is not what it should be; or two probes that contradict each other, one forked and the other not. Of a
    configuration that was seen to end both ways under one launcher nothing is asked.
    """
    if any(_alike(one, new) and one.counts_as is not new.counts_as for one in before):
        return None
    forked = new.launcher == Launcher.FORK
    if forked and _END.get(new.purpose, new.counts_as) is not new.counts_as:
        return new
    others = (one for one in before if one.n != new.n and (one.launcher == Launcher.FORK) is not forked)
    other = next((one for one in others if _contradict(one, new) or _contradict(new, one)), None)
    return new if other is not None and forked else other


def _alike(one: ProbeReport, other: ProbeReport) -> bool:
    return one.subset == other.subset and one.launcher == other.launcher


def _contradict(larger: ProbeReport, smaller: ProbeReport) -> bool:
    """The same configuration ended otherwise; or all of one that failed passes with more."""
    if CountsAs.UNRESOLVED in (larger.counts_as, smaller.counts_as) or "none" in (larger.launcher, smaller.launcher):
        return False
    if larger.subset == smaller.subset:
        return larger.counts_as is not smaller.counts_as
    answers = (larger.counts_as, smaller.counts_as)
    return answers == (CountsAs.GOOD, CountsAs.BAD) and smaller.places <= larger.places


def _discounted(one: ProbeReport) -> ProbeReport:
    if one.launcher != Launcher.FORK:
        return one
    return replace(one, counts_as=CountsAs.UNRESOLVED, summary="a fork does not show here what torchrun does")


_END = {Purpose.CONTROL_GOOD: CountsAs.GOOD, Purpose.CONTROL_BAD: CountsAs.BAD}


@dataclass(kw_only=True)
class EarlyStop:
    """How long one probe is waited for."""

    n: int
    ranks: int
    quiet_s: float | None  # the longest of the good control; None: it is waited for until it is judged
    known: Collection[WaitSignature]
    tell: Callable[[int, Waiting | None], None]
    signature: WaitSignature | None = None  # of the last look
    early: bool = False

    def __call__(self, snapshots: Sequence[Snapshot], samples: Sequence[Sample], **facts: Any) -> bool:
        now = standing(snapshots, samples, ranks=self.ranks, **facts)
        self.signature = now.signature if now else None
        self.early = now is not None and seen_before(now, self.known, self.quiet_s)
        self.tell(self.n, waiting_for(now, self.known, self.quiet_s) if now else None)
        return self.early


class _Ctrl(Listener):
    """Of what a launch tells, the screen of a bisection shows Ctrl-C alone."""

    def __init__(self, screen: BisectScreen) -> None:
        self._screen = screen

    def interrupted(self, count: int) -> None:
        self._screen.interrupted(count)


def _close(screen: BisectScreen, run: RunDir) -> None:
    """What could not be shown stands in the log: the screen itself may be what is gone."""
    screen.close()
    for trouble in screen.trouble:
        log_fault(run, f"{trouble.what}: {trouble.why}\n")


@contextmanager
def _open(request: BisectRequest, folder: SearchFolder, launches: Launches, facts: MachineFacts) -> Iterator[Bisection]:
    """Everything that a search holds while it runs; all of it is gone at the end."""
    run = folder.run
    as_run = RunRequest(
        specs=(), out=request.out, json=request.json, strict=False, probe=request.probe, command=request.command,
        jobs=request.jobs,
    )  # fmt: skip
    with ExitStack() as stack:
        if request.subject.form is Form.COMMIT:
            home = run.worktrees.resolve()
            trees = Worktrees(repository=request.question.working_dir, home=home)
            launches.enter_trees(stack.enter_context(closing(trees)))
        launches.enter_mixtures(Mixtures(home=run.mixtures.resolve()))
        screen = BisectScreen(sys.stderr if request.json else sys.stdout, live=not request.json)
        stack.callback(_close, screen, run)
        broadcast = stack.enter_context(listeners(as_run, run, _Ctrl(screen)))
        interruption = stack.enter_context(interruptible(broadcast, as_run))
        screen.lost_terminal = interruption.lost_terminal
        server = stack.enter_context(ForkServer()) if request.fork else None
        earlier = earlier_of(launches, run.path.parent, but=run.run_id)
        yield Bisection(
            request=request, run=run, folder=folder, launches=launches, facts=facts, journal=Journal(run),
            screen=screen, broadcast=broadcast, interruption=interruption, server=server, earlier=earlier,
            notes=[*earlier.notes], slow_from_s=request.wanted.step_s,
        )  # fmt: skip
