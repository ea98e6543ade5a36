"""Run a bisection and write its answer. A probe is one test run of one configuration."""

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
from nsa_harness.commands.engine_job import cancel_open_jobs
from nsa_harness.commands.scheduler import load_of, room_of
from nsa_harness.commands.session import INTERRUPTED, Session, session
from nsa_harness.core.experiment.trial import SLOW, Signature, counts_as, file_and_line
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.core.schedule import parallel_runs
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
from nsa_harness.render.experiments.screen import BisectScreen, answer_lines
from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.supervisor.experiments.cache_key import names_with_verb
from nsa_harness.supervisor.experiments.intermediate_configs import Mixtures, Worktrees
from nsa_harness.supervisor.experiments.journal import Journal, SearchDirectory, open_search, search_state
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    Launches,
    find_earlier_runs,
    launched_program,
    make_cache_key,
    search_question,
)
from nsa_harness.supervisor.launch.fork_client import ForkServer
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.collect import step_time_s
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.texts import words

# Pairs of runs, under torchrun and forked, that must all differ before forked results are discarded. A program that
# fails in half of its runs looks like that by chance in 1 of 64 cases.
_LAUNCHER_PAIRS = 3
_MAX_CONFIRMED_FORKS = 3  # forked probes that are repeated under torchrun to check the launcher
_PROOFS = (Purpose.PROOF_BAD, Purpose.PROOF_GOOD)


class _LauncherDecides(Exception):
    """Raised if a configuration gives different results when it is forked and when torchrun launches it."""


class _SearchInterrupted(OutOfBudget):
    """Raised if Ctrl-C or SIGTERM interrupts the search."""

    def __str__(self) -> str:
        return "interrupted; the same command continues the search"


def run_bisection(request: BisectRequest) -> int:
    """Run a bisection, write its output files, and return the exit code."""
    facts = machine_facts()
    launches = Launches(request=request, facts=facts)
    program = launched_program(request, launches)
    state = search_state(request.subject.question, request.options.command, make_cache_key(request, launches, program))
    end_dead_runs()
    with (
        open_search(request.options, state, program.file_entries) as folder,
        _open(request, folder, launches, facts) as bisection,
    ):
        if folder.is_continued:
            finished_probes = words.plural(len(bisection.journal.stored), "probe")
            bisection.screen.note(f"continues {folder.run.path}: {finished_probes} already finished")
        elif folder.note:
            bisection.note(folder.note)
        code = bisection.carry_out()
        folder.write(ended=code != INTERRUPTED and not bisection.out_of_budget)
    return code


@contextmanager
def _open(
    request: BisectRequest, folder: SearchDirectory, launches: Launches, facts: MachineFacts
) -> Iterator[Bisection]:
    """Open everything that a bisection needs, yield the bisection, and close everything at the end."""
    run, options = folder.run, request.options
    with ExitStack() as stack:
        screen = BisectScreen(sys.stderr if options.json else sys.stdout, live=not options.json)
        # The plan in run.json stays empty until the end, because the launches of a search are not known before.
        search_session = session(
            run, options, (), screen=screen, in_parallel=request.jobs != 1, facts=facts, engine=request.engine,
            plan_file=shipped_plan(),
        )  # fmt: skip
        running = stack.enter_context(search_session)
        if request.engine is not None:
            cancel_open_jobs(run, request.engine)  # of a session that was killed; their probes are launched again
        if request.subject.form is SubjectForm.COMMIT:
            trees = Worktrees(repository=request.question.working_dir, home=run.worktrees.resolve())
            launches.use_worktrees(stack.enter_context(closing(trees)))
        launches.use_mixtures(Mixtures(home=run.mixtures.resolve()))
        forks = request.fork and request.engine is None
        server = stack.enter_context(ForkServer()) if forks else None
        earlier = find_earlier_runs(launches, run.path.parent, but=run.run_id)
        yield Bisection(
            request=request, session=running, run=run, folder=folder, launches=launches, facts=facts,
            journal=Journal(run), screen=screen, server=server, earlier=earlier, notes=[*earlier.notes],
            slow_from_s=request.sought.step_s,
        )  # fmt: skip


@dataclass(kw_only=True)
class Bisection(SearchProgress):
    """A bisection in progress."""

    session: Session
    run: RunDir
    folder: SearchDirectory
    journal: Journal
    screen: BisectScreen
    server: ForkServer | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # outcomes of this session, by directory name
    specs: list[RunSpec] = field(default_factory=list)
    waits: set[WaitSignature] = field(default_factory=set)  # waits of probes of this session with a proven HANG
    stages: tuple[Stage, ...] = ()  # stages of the search, with the number of probes in the worst case
    forks: bool = True  # False once a fork and torchrun gave different results
    confirmed_configs: set[Spans] = field(default_factory=set)  # configurations whose fork was repeated under torchrun
    baseline_s: list[float] = field(default_factory=list)  # with --outcome slow: step times of runs of the good end
    slow_from_s: float | None = None  # with --outcome slow: shortest step time that counts as bad; None: not known yet
    out_of_budget: bool = False  # the same command with a larger budget continues the search
    was_interrupted: bool = False
    began_s: float = field(init=False)  # zero of the search's clock, which does not run between sessions
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))  # numbers for new probes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.began_s = time.monotonic() - ended_s(self.journal.stored)

    def carry_out(self) -> int:
        """Run the whole bisection: search for its answer, confirm and write it, and return the exit code."""
        self.screen.show_header(report_so_far(self))
        answer = answer_for_subject(self.request.subject, self._search())
        if not self.was_interrupted:
            self._confirm_commands(answer)
        if edited_files := self.folder.changed_files():
            self.note(
                f"{names_with_verb(edited_files)} changed during the search: the probes did not all run one program"
            )
        report = write_answer(self, self.session, answer, self.outcomes, self.specs, cut_short=self.was_interrupted)
        self.screen.show_answer(report, self.run.path)
        self.session.stream(answer_event(report, str(self.run.path)))
        if self.was_interrupted:
            return INTERRUPTED
        is_open = answer.kind is AnswerKind.UNDECIDED
        lines = list(answer_lines(report, self.run.path, NO_WIDTH))
        self.session.broadcast(
            lambda listener: listener.on_answer("UNDECIDED" if is_open else "ANSWER", "bisect", lines)
        )
        return UNDECIDED if is_open else ANSWERED

    def _search(self) -> SearchAnswer:
        """Search for the answer of the bisection, and search again without forks if forking changes the results."""
        question = self._question()
        self.stages = worst_case_stages(question)
        try:
            return find_smallest_difference(question, self.probe)
        except _LauncherDecides:
            self.forks = False
            self.journal.restart_without_forks()
            self.probes = without_forks(self.probes)
            self.signature = None
            self.waits.clear()
            return find_smallest_difference(question, self.probe)

    def _question(self) -> SearchQuestion:
        return replace(
            search_question(self.request, self.earlier),
            bad_cost=self._bad_cost,
            at_once=self._at_once(),
            order_seed=self.run.run_id,
        )

    def _at_once(self) -> int:
        """Return the number of test runs that can run in parallel on this machine, at most `--jobs`."""
        requested_jobs = self.request.jobs
        if self.request.engine is not None:
            return requested_jobs
        spec = self.launches.spec_or_reason(range(len(self.request.subject.items)))
        if isinstance(spec, str):
            return requested_jobs
        load = load_of(spec, self.outcomes.values(), unknown_bytes=0)
        possible_jobs, resource = parallel_runs(load, room_of(self.facts, requested_jobs, cores=self.facts.cpus))
        if possible_jobs < requested_jobs:
            self.note(
                f"--jobs {requested_jobs}: only {possible_jobs} at a time, limited by the {resource} of this machine"
            )
        return possible_jobs

    # Probes.

    def probe(self, round_: Round) -> list[ProbeResult]:
        """Return the results of the round's configurations, stored by an earlier session or of new launches."""
        self._show_round(round_)
        single_rounds = [
            replace(round_, subsets=(subset,), purpose=purpose, purpose_of_each=())
            for subset, purpose in zip(round_.subsets, round_.purposes, strict=True)
        ]
        numbers = [next(self._numbers) for _ in single_rounds]
        if len(single_rounds) == 1:
            probes = [self._probe(numbers[0], single_rounds[0])]
        else:
            with ThreadPoolExecutor(max_workers=min(len(single_rounds), self._at_once())) as pool:
                probes = list(pool.map(self._probe, numbers, single_rounds))
        for probe in probes:
            self._check_launcher(probe)
        return [probe.counts_as for probe in probes]

    def _probe_again(self, subset: Subset, purpose: Purpose, *, in_full: bool = True) -> ProbeReport:
        """Run the configuration `subset` again, and return its report. `in_full`: like the printed command."""
        round_ = Round(subsets=(subset,), purpose=purpose, open=(0, len(self.request.subject.items)), probes_left=0)
        self._show_round(round_)
        return self._probe(next(self._numbers), round_, in_full=in_full)

    def _probe(self, n: int, round_: Round, *, in_full: bool | None = None) -> ProbeReport:
        """Return the report for the single configuration of `round_`, a stored one or that of a new test run."""
        (subset,) = round_.subsets
        in_full = self._in_full(subset, round_.purpose) if in_full is None else in_full
        with self._lock:
            stored_probe = self.journal.take(subset, in_full=in_full)
        new_or_stored = stored_probe or self._new_probe(n, subset, round_, in_full=in_full)
        with self._lock:
            self.journal.session_probes.append(new_or_stored)
            self._learn(new_or_stored)
            probe = replace(new_or_stored, n=n)
            self.probes = sorted([*self.probes, probe], key=lambda probe: probe.n)
            self.screen.add_probe(probe, report_so_far(self))
            self.session.stream(self.run.redaction.value(probe_event(self.request.subject, probe)))
        return probe

    def _in_full(self, subset: Subset, purpose: Purpose) -> bool:
        """Return whether a test run of `subset` must use torchrun, because the final answer rests on its result."""
        spans = spans_of(subset)
        proof_count = sum(probe.in_full and probe.subset == spans for probe in self.journal.session_probes)
        return purpose in _PROOFS and proof_count < self.request.repeat

    def _new_probe(self, n: int, subset: Subset, round_: Round, *, in_full: bool) -> ProbeReport:
        """Run the program with `subset`, then store and return the report. Raise OutOfBudget if no time is left."""
        self._raise_if_interrupted()
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
        probe = replace(blank, summary=spec) if isinstance(spec, str) else self._launch(spec, blank)
        with self._lock:
            self.journal.append(probe)
            if probe.dir is not None and sum(probe.dir is not None for probe in self.journal.stored) == 1:
                self.folder.ignore_program_outputs()
        return probe

    def _launch(self, spec: RunSpec, blank: ProbeReport) -> ProbeReport:
        """Launch `spec`, and return a copy of the report `blank` with the result of the launch filled in."""
        name = self._free_name(blank.n)
        about = f"{blank.purpose.value.replace('_', ' ')}: {self.request.subject.describe(blank.indices)}"
        spec = self.launches.with_learned_limits(replace(spec, scenario=name, about=about), in_full=blank.in_full)
        spec = self._with_launcher(spec, in_full=blank.in_full)
        # A proof under torchrun never ends early. No probe does before the good end has shown its longest pause.
        quiet_s = None if blank.in_full else self.launches.longest_quiet_s
        early_stop = EarlyStop(
            probe_number=blank.n,
            ranks=spec.ranks,
            proven_hangs=self.waits,
            report_wait=self.screen.show_wait,
            longest_gap_s=quiet_s,
        )
        with self.session.devices_of(spec) as devices:
            outcome = self.session.launch(spec, devices=devices, server=self.server, should_stop=early_stop)
        self._raise_if_interrupted()
        self.session.announce(outcome)
        with self._lock:
            self.outcomes[outcome.dir] = outcome
            self.specs.append(spec)
            attempt, bad_outcome = self.run.attempt(name), self.request.sought
            step_s = step_time_s(attempt, spec.ranks) if bad_outcome.kind == SLOW else None
            counts = counts_as(
                outcome, bad_outcome, self.signature, self.run.directory.read_tail(attempt.output), step_s=step_s,
                slow_from_s=self.slow_from_s,
            )  # fmt: skip
            blank = replace(blank, launcher=spec.launcher.value, counts_as=counts, step_s=step_s)
            probe = with_outcome(blank, outcome)
            if early_stop.stopped_early and outcome.verdict.status is Status.ERROR:
                return replace(probe, early=True, verdict=None, counts_as=ProbeResult.BAD)
            if counts is ProbeResult.BAD and outcome.verdict.status is Status.HANG and early_stop.signature:
                self.waits.add(early_stop.signature)
        return probe

    def _raise_if_interrupted(self) -> None:
        if self.session.interrupted:
            self.was_interrupted = True
            raise _SearchInterrupted

    def _with_launcher(self, spec: RunSpec, *, in_full: bool) -> RunSpec:
        """Return the spec, changed to fork its ranks if this is allowed and safe."""
        if self.server is None or in_full or not self.forks:
            return spec
        forkable = self.server.with_launcher(replace(spec, launcher=Launcher.FORK))
        if forkable.launcher is not Launcher.FORK:
            self.note(forkable.notes[-1])
            return replace(forkable, launcher=spec.launcher)  # a user's own command stays without torchrun
        return forkable

    def _free_name(self, n: int) -> str:
        # A killed session may have left a directory behind.
        names = (f"p{n:02d}", *(f"p{n:02d}_{again}" for again in range(2, 1000)))
        return next(name for name in names if not self.run.attempt(name).path.exists())

    # Conclusions from several probes.

    def _check_launcher(self, new: ProbeReport) -> None:
        """Raise _LauncherDecides if the result of a forked test run depends on the launcher.

        A flaky program contradicts itself under any launcher, so at most _MAX_CONFIRMED_FORKS forks are repeated under
        torchrun.
        """
        fork = contradicted_fork(new, self.probes)
        if fork is None or fork.subset in self.confirmed_configs or len(self.confirmed_configs) == _MAX_CONFIRMED_FORKS:
            return
        self.confirmed_configs.add(fork.subset)
        for _ in range(_LAUNCHER_PAIRS):
            under_torchrun = self._probe_again(fork.indices, Purpose.REPEAT)
            if under_torchrun.counts_as in (fork.counts_as, ProbeResult.UNRESOLVED):
                return
            if self._probe_again(fork.indices, Purpose.REPEAT, in_full=False).counts_as is not fork.counts_as:
                return  # the result also changes without a change of launcher: the program is flaky
        self.note(
            f"with {self.request.subject.describe(fork.indices)}, a forked probe counts as {fork.counts_as.value}, but"
            f" a probe under torchrun counts as {under_torchrun.counts_as.value}: from now on all probes run under"
            " torchrun, and the results of forked probes are discarded"
        )
        raise _LauncherDecides

    def _confirm_commands(self, answer: SearchAnswer) -> None:
        """Run the failing and the passing configuration under torchrun, unless done, to confirm the commands."""
        configurations = (
            (answer.failing, ProbeResult.BAD, Purpose.PROOF_BAD),
            (answer.passing, ProbeResult.GOOD, Purpose.PROOF_GOOD),
        )
        for subset, counts, purpose in configurations:
            if subset is None or shown_in_full(self.probes, subset, counts):
                continue
            try:
                probe = self._probe_again(subset, purpose)
            except OutOfBudget:
                reason = "the budget was used up before it could be launched under torchrun"
            else:
                if probe.counts_as is counts:
                    continue
                reason = f"when launched again under torchrun, it counted as {probe.counts_as.value}"
            self.note(f"no command for {self.request.subject.describe(subset)}: {reason}")

    def _learn(self, probe: ProbeReport) -> None:
        """Learn from a test run what a healthy run and the failure look like."""
        if probe.purpose is Purpose.CONTROL_GOOD and probe.counts_as is ProbeResult.GOOD:
            self.launches.longest_quiet_s = probe.longest_quiet_s or self.launches.longest_quiet_s
            self._learn_step_time(probe)
        if self.signature is None and probe.counts_as is ProbeResult.BAD and probe.verdict is not None:
            slow = self.request.sought.kind == SLOW
            verdict, cause, place = (
                (SLOW, None, None) if slow else (probe.verdict, probe.cause, file_and_line(probe.place))
            )
            self.signature = Signature(verdict=verdict, cause=cause, place=place)

    def _learn_step_time(self, good: ProbeReport) -> None:
        """Record a passing run's step time until there is a limit for slow steps. The caller must hold the lock."""
        if good.step_s is None or self.slow_from_s is not None:
            return
        self.baseline_s.append(good.step_s)
        if len(self.baseline_s) == search_question(self.request).baseline:
            self.slow_from_s = self.request.sought.slow_from_s(self.baseline_s)
            assert self.slow_from_s is not None
            self.notes.append(bisect_words.slow_limit_text(self.slow_from_s, self.baseline_s))
            self.screen.note(self.notes[-1])

    # The screen.

    def _show_round(self, round_: Round) -> None:
        each = self._costs()
        left_s = time_left_s(self.stages, self.probes, round_, each, self.request.repeat) if each else None
        self.screen.show_round(round_, report_so_far(self), left_s)

    def note(self, text: str) -> None:
        """Print a note and store it for the output files. A repeated note is ignored."""
        with self._lock:
            is_new = text not in self.notes
            if is_new:
                self.notes.append(text)
        if is_new:
            self.screen.note(text)

    def _bad_cost(self) -> float:
        """Return the ratio of the run time of a failing test run to that of a passing one."""
        each = self._costs()
        return max(0.1, each.bad_s / each.good_s) if each and each.good_s else 1.0

    def _costs(self) -> ProbeCosts | None:
        quiet_s = self.launches.longest_quiet_s
        return costs(self.probes, early_after_s(quiet_s) if self.waits and quiet_s is not None else None)
