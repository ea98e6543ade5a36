"""Carry out a bisection: launch the probes of the search, and write its answer and documents."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from nsa_harness.commands.bisect_report import (
    ANSWERED,
    UNDECIDED,
    SearchProgress,
    report_so_far,
    shown_in_full,
    write_answer,
)
from nsa_harness.commands.scheduler import load_of, room_of
from nsa_harness.commands.session import INTERRUPTED, Session, session
from nsa_harness.core.experiment.trial import SLOW, Signature, counts_as, line_word
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.core.schedule import side_by_side
from nsa_harness.core.search.effort import ProbeCosts, Stage, costs, time_left_s, worst_case_stages
from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    AnswerKind,
    OutOfBudget,
    ProbeResult,
    Purpose,
    Round,
    SearchAnswer,
    SearchQuestion,
    Spans,
    Subset,
    spans_of,
)
from nsa_harness.core.search.report import ProbeReport, contradicted_fork, ended_s, with_outcome, without_forks
from nsa_harness.core.search.subject import SubjectForm, answer_for_subject
from nsa_harness.core.search.waits import EarlyStop, WaitSignature, early_after_s
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.bisect_json import answer_event, probe_event
from nsa_harness.render.experiments.screen import BisectScreen
from nsa_harness.supervisor.experiments.cache_key import names_text
from nsa_harness.supervisor.experiments.intermediate_configs import Mixtures, Worktrees
from nsa_harness.supervisor.experiments.journal import Journal, SearchFolder, search_folder, search_state
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    Launches,
    cache_key_of,
    earlier_of,
    program_of,
    question_of,
)
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.collect import seconds_a_step
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.texts import words

_MOST_CONFIRMED = 3
_PROOFS = (Purpose.PROOF_BAD, Purpose.PROOF_GOOD)


class _LauncherDecides(Exception):
    """A fork and torchrun gave different results: the search starts again without forks."""


class _Interrupted(OutOfBudget):
    """Ctrl-C or TERM: there are no more probes. The known results are reported, and the same command continues."""

    def __str__(self) -> str:
        return "interrupted; the same command goes on where it stopped"


def run_bisection(request: BisectRequest) -> int:
    """Search, prove the answer and write the documents. Return the exit code."""
    facts = machine_facts()
    launches = Launches(request=request, facts=facts)
    program = program_of(request, launches)
    state = search_state(request.subject.question, request.options.command, cache_key_of(request, launches, program))
    sweep_dead_runs()
    with (
        search_folder(request.options, state, program.files) as folder,
        _open(request, folder, launches, facts) as bisection,
    ):
        if folder.goes_on:
            made = words.plural(len(bisection.journal.kept), "probe")
            bisection.screen.note(f"goes on with {folder.run.path}: {made} already made")
        elif folder.note:
            bisection.note(folder.note)
        code = bisection.carry_out()
        folder.write(ended=code != INTERRUPTED and not bisection.out_of_budget)
    return code


@contextmanager
def _open(request: BisectRequest, folder: SearchFolder, launches: Launches, facts: MachineFacts) -> Iterator[Bisection]:
    """Open the session, worktrees, fork server and screen of a search, and close them at the end."""
    run, options = folder.run, request.options
    with ExitStack() as stack:
        screen = BisectScreen(sys.stderr if options.json else sys.stdout, live=not options.json)
        # run.json has no plan until the search has ended: its launches are not known before.
        opened = session(
            run, options, (), screen=screen, side_by_side=request.jobs != 1, facts=facts, agreed=shipped_plan()
        )
        running = stack.enter_context(opened)
        if request.subject.form is SubjectForm.COMMIT:
            trees = Worktrees(repository=request.question.working_dir, home=run.worktrees.resolve())
            launches.enter_trees(stack.enter_context(closing(trees)))
        launches.enter_mixtures(Mixtures(home=run.mixtures.resolve()))
        server = stack.enter_context(ForkServer()) if request.fork else None
        earlier = earlier_of(launches, run.path.parent, but=run.run_id)
        yield Bisection(
            request=request, session=running, run=run, folder=folder, launches=launches, facts=facts,
            journal=Journal(run), screen=screen, server=server, earlier=earlier, notes=[*earlier.notes],
            slow_from_s=request.wanted.step_s,
        )  # fmt: skip


@dataclass(kw_only=True)
class Bisection(SearchProgress):
    """A search while it is carried out."""

    session: Session
    run: RunDir
    folder: SearchFolder
    journal: Journal
    screen: BisectScreen
    server: ForkServer | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # of this session, by directory
    specs: list[RunSpec] = field(default_factory=list)
    waits: set[WaitSignature] = field(default_factory=set)  # waits that a probe of this session proved to hang
    stages: tuple[Stage, ...] = ()  # the worst case of this question
    forks: bool = True  # False once a fork and torchrun gave different results
    confirmed: set[Spans] = field(default_factory=set)  # configurations whose fork was repeated under torchrun
    baseline_s: list[float] = field(default_factory=list)  # if slow is sought: step time of each run of the good end
    slow_from_s: float | None = None  # if slow is sought: least step time that counts as bad, once it is known
    out_of_budget: bool = False  # the same command with a larger budget continues
    interrupted: bool = False
    began_s: float = field(init=False)  # zero of the search's clock, which stops between sessions
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))  # numbers for new probes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.began_s = time.monotonic() - ended_s(self.journal.kept)

    def carry_out(self) -> int:
        """Search, prove the answer and write it. Return the exit code."""
        self.screen.begun(report_so_far(self))
        answer = answer_for_subject(self.request.subject, self._search())
        if not self.interrupted:
            self._confirm_commands(answer)
        if changed := self.folder.edited():
            self.note(f"{names_text(changed)} changed while the search ran: its probes are not all of the same program")
        report = write_answer(self, self.session, answer, self.outcomes, self.specs, cut_short=self.interrupted)
        self.screen.answered(report, self.run.path)
        self.session.stream(answer_event(report, str(self.run.path)))
        if self.interrupted:
            return INTERRUPTED
        return UNDECIDED if answer.kind is AnswerKind.UNDECIDED else ANSWERED

    def _search(self) -> SearchAnswer:
        question = self._question()
        self.stages = worst_case_stages(question)
        try:
            return find_smallest_difference(question, self.probe)
        except _LauncherDecides:
            self.forks = False
            self.journal.begin_anew()
            self.probes = without_forks(self.probes)
            self.signature = None
            self.waits.clear()
            return find_smallest_difference(question, self.probe)

    def _question(self) -> SearchQuestion:
        return replace(question_of(self.request, self.earlier), bad_cost=self._bad_cost, at_once=self._at_once())

    def _at_once(self) -> int:
        """Return how many probes run in parallel: as requested, but no more than cores, GPUs and memory allow."""
        wanted = self.request.jobs
        spec = self.launches.spec_or_reason(range(len(self.request.subject.items)))
        if isinstance(spec, str):
            return wanted
        load = load_of(spec, self.outcomes.values(), unknown_bytes=0)
        held, what = side_by_side(load, room_of(self.facts, wanted, cores=self.facts.cpus))
        if held < wanted:
            self.note(f"--jobs {wanted}: {held} at a time, as many as the {what} of this machine hold")
        return held

    # Probes.

    def probe(self, round_: Round) -> list[ProbeResult]:
        """Launch each subset of the round, or take the stored probe of an earlier session."""
        self._show_round(round_)
        single_rounds = [
            replace(round_, subsets=(subset,), purpose=purpose, purpose_of_each=())
            for subset, purpose in zip(round_.subsets, round_.purposes, strict=True)
        ]
        numbers = [next(self._numbers) for _ in single_rounds]
        if len(single_rounds) == 1:
            made = [self._probe(numbers[0], single_rounds[0])]
        else:
            with ThreadPoolExecutor(max_workers=min(len(single_rounds), self._at_once())) as pool:
                made = list(pool.map(self._probe, numbers, single_rounds))
        for probe in made:
            self._check_launcher(probe)
        return [probe.counts_as for probe in made]

    def _probe_again(self, subset: Subset, purpose: Purpose, *, in_full: bool = True) -> ProbeReport:
        """Launch a subset again. `in_full`: under torchrun, and with the limits of the command that is printed."""
        round_ = Round(subsets=(subset,), purpose=purpose, open=(0, len(self.request.subject.items)), probes_left=0)
        self._show_round(round_)
        return self._probe(next(self._numbers), round_, in_full=in_full)

    def _probe(self, n: int, round_: Round, *, in_full: bool | None = None) -> ProbeReport:
        (subset,) = round_.subsets
        in_full = self._in_full(subset, round_.purpose) if in_full is None else in_full
        with self._lock:
            stored = self.journal.take(subset, in_full=in_full)
        made = stored or self._new_probe(n, subset, round_, in_full=in_full)
        with self._lock:
            self.journal.answered.append(made)
            self._learn(made)
            probe = replace(made, n=n)
            self.probes = sorted([*self.probes, probe], key=lambda probe: probe.n)
            self.screen.probed(probe, report_so_far(self))
            self.session.stream(self.run.redaction.value(probe_event(self.request.subject, probe)))
        return probe

    def _in_full(self, subset: Subset, purpose: Purpose) -> bool:
        """Whether the probe must run under torchrun: a proof must, as often as `--repeat` requests."""
        spans = spans_of(subset)
        made = sum(probe.in_full and probe.subset == spans for probe in self.journal.answered)
        return purpose in _PROOFS and made < self.request.repeat

    def _new_probe(self, n: int, subset: Subset, round_: Round, *, in_full: bool) -> ProbeReport:
        self._leave_if_interrupted()
        if self.request.budget_s is not None and sum(probe.wall_s for probe in self.probes) >= self.request.budget_s:
            self.out_of_budget = True
            raise OutOfBudget
        blank = ProbeReport(
            n=n, subset=spans_of(subset), purpose=round_.purpose, open=round_.open, left=round_.probes_left,
            in_full=in_full, launcher="none", verdict=None, kind=None, cause=None, summary="", place=None, culprits=(),
            phase=None, counts_as=ProbeResult.UNRESOLVED, wall_s=0.0, longest_quiet_s=None, dir=None, spec_hash=None,
            started_s=time.monotonic() - self.began_s,
        )  # fmt: skip
        spec = self.launches.spec_or_reason(subset)
        made = replace(blank, summary=spec) if isinstance(spec, str) else self._launch(spec, blank)
        with self._lock:
            self.journal.keep(made)
            if made.dir is not None and sum(probe.dir is not None for probe in self.journal.kept) == 1:
                self.folder.leave_out_written()
        return made

    def _launch(self, spec: RunSpec, blank: ProbeReport) -> ProbeReport:
        """Launch the configuration, and return the `blank` probe with its result.

        A wait that is proven to hang here lets later probes end early.
        """
        name = self._free_name(blank.n)
        about = f"{blank.purpose.value.replace('_', ' ')}: {self.request.subject.describe(blank.indices)}"
        spec = self.launches.limited(replace(spec, scenario=name, about=about), in_full=blank.in_full)
        spec = self._with_launcher(spec, in_full=blank.in_full)
        # A proof under torchrun never ends early, and no probe does before a good control has shown its longest pause.
        quiet_s = None if blank.in_full else self.launches.longest_quiet_s
        early_stop = EarlyStop(
            probe_number=blank.n,
            ranks=spec.ranks,
            proven_hangs=self.waits,
            report_wait=self.screen.waits,
            longest_gap_s=quiet_s,
        )
        with self.session.devices_of(spec) as devices:
            outcome = self.session.launch(spec, devices=devices, server=self.server, enough=early_stop)
        self._leave_if_interrupted()
        self.session.tell_outcome(outcome)
        with self._lock:
            self.outcomes[outcome.dir] = outcome
            self.specs.append(spec)
            attempt, wanted = self.run.attempt(name), self.request.wanted
            step_s = seconds_a_step(attempt, spec.ranks) if wanted.how == SLOW else None
            counts = counts_as(
                outcome, wanted, self.signature, self.run.door.tail(attempt.output), step_s=step_s,
                slow_from_s=self.slow_from_s,
            )  # fmt: skip
            launched = replace(blank, launcher=spec.launcher.value, counts_as=counts, step_s=step_s)
            probe = with_outcome(launched, outcome)
            if early_stop.stopped_early and outcome.verdict.status is Status.ERROR:
                return replace(probe, early=True, verdict=None, counts_as=ProbeResult.BAD)
            if counts is ProbeResult.BAD and outcome.verdict.status is Status.HANG and early_stop.signature:
                self.waits.add(early_stop.signature)
        return probe

    def _leave_if_interrupted(self) -> None:
        if self.session.interrupted:
            self.interrupted = True
            raise _Interrupted

    def _with_launcher(self, spec: RunSpec, *, in_full: bool) -> RunSpec:
        """Return the launch with its launcher: a fork if that is safe and the probe need not run under torchrun."""
        if self.server is None or in_full or not self.forks:
            return spec
        chosen = self.server.with_launcher(replace(spec, launcher=Launcher.FORK))
        if chosen.launcher is not Launcher.FORK:
            self.note(chosen.notes[-1])
        return chosen

    def _free_name(self, n: int) -> str:
        """Return a name for the probe's directory: a probe of an earlier session that was killed left its own."""
        names = (f"p{n:02d}", *(f"p{n:02d}_{again}" for again in range(2, 1000)))
        return next(name for name in names if not self.run.attempt(name).path.exists())

    # What the probes show together.

    def _check_launcher(self, new: ProbeReport) -> None:
        """Check whether a contradiction comes from the launcher, before the search sees it. Raises _LauncherDecides.

        At most _MOST_CONFIRMED forks are repeated under torchrun, because a flaky program contradicts itself anyway.
        """
        forked = contradicted_fork(new, self.probes)
        if forked is None or forked.subset in self.confirmed or len(self.confirmed) == _MOST_CONFIRMED:
            return
        self.confirmed.add(forked.subset)
        again = self._probe_again(forked.indices, Purpose.REPEAT)
        if again.counts_as in (forked.counts_as, ProbeResult.UNRESOLVED):
            return
        if self._probe_again(forked.indices, Purpose.REPEAT, in_full=False).counts_as is not forked.counts_as:
            return  # the result changes under one launcher, so the launcher does not explain it
        self.note(
            f"with {self.request.subject.describe(forked.indices)} a forked probe counts as {forked.counts_as.value} "
            f"and one of torchrun as {again.counts_as.value}: torchrun throughout from here, and what forks showed is "
            "discounted"
        )
        raise _LauncherDecides

    def _confirm_commands(self, answer: SearchAnswer) -> None:
        """Launch the failing and the passing configuration under torchrun, if their last launch was not.

        A command is printed only if its last launch under torchrun had the result that the answer states.
        """
        wanted = (
            (answer.failing, ProbeResult.BAD, Purpose.PROOF_BAD),
            (answer.passing, ProbeResult.GOOD, Purpose.PROOF_GOOD),
        )
        for subset, counts, purpose in wanted:
            if subset is None or shown_in_full(self.probes, subset, counts):
                continue
            try:
                made = self._probe_again(subset, purpose)
            except OutOfBudget:
                reason = "the budget is spent before it was launched under torchrun"
            else:
                if made.counts_as is counts:
                    continue
                reason = f"launched once more under torchrun it counts as {made.counts_as.value}"
            self.note(f"no command for {self.request.subject.describe(subset)}: {reason}")

    def _learn(self, made: ProbeReport) -> None:
        """Learn from a control the longest time without progress in a sound run, and the signature of the failure."""
        if made.purpose is Purpose.CONTROL_GOOD and made.counts_as is ProbeResult.GOOD:
            self.launches.longest_quiet_s = made.longest_quiet_s or self.launches.longest_quiet_s
            self._learn_step_time(made)
        if self.signature is None and made.counts_as is ProbeResult.BAD and made.verdict is not None:
            slow = self.request.wanted.how == SLOW
            verdict, cause, place = (SLOW, None, None) if slow else (made.verdict, made.cause, line_word(made.place))
            self.signature = Signature(verdict=verdict, cause=cause, place=place)

    def _learn_step_time(self, good: ProbeReport) -> None:
        """Collect the step times of the good end and, once there are enough, fix the step time that counts as slow.

        The threshold must not change after a probe was compared with it. The caller holds the lock.
        """
        if good.step_s is None or self.slow_from_s is not None:
            return
        self.baseline_s.append(good.step_s)
        if len(self.baseline_s) == question_of(self.request).baseline:
            self.slow_from_s = self.request.wanted.slow_from_s(self.baseline_s)
            assert self.slow_from_s is not None
            self.notes.append(bisect_words.slow_word(self.slow_from_s, self.baseline_s))
            self.screen.note(self.notes[-1])

    # The screen.

    def _show_round(self, round_: Round) -> None:
        each = self._costs()
        left_s = time_left_s(self.stages, self.probes, round_, each, self.request.repeat) if each else None
        self.screen.round_begun(round_, report_so_far(self), left_s)

    def note(self, text: str) -> None:
        """Print a note once, and store it for the documents."""
        with self._lock:
            new = text not in self.notes
            if new:
                self.notes.append(text)
        if new:
            self.screen.note(text)

    def _bad_cost(self) -> float:
        """Return the mean time of a failing probe as a multiple of a passing probe's, from the probes so far."""
        each = self._costs()
        return max(0.1, each.bad_s / each.good_s) if each and each.good_s else 1.0

    def _costs(self) -> ProbeCosts | None:
        quiet_s = self.launches.longest_quiet_s
        return costs(self.probes, early_after_s(quiet_s) if self.waits and quiet_s is not None else None)
