"""Launch the scenarios of a plan, one after another or in parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from nsa_harness.commands.session import Session
from nsa_harness.core.comparison.plan_file import PlanText
from nsa_harness.core.experiment.diagnostic_rerun import Change, next_change, with_change, with_diagnostic_reruns
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import MAX_RANKS, EngineChoice, RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.core.schedule import (
    ONCE,
    Load,
    Policy,
    Room,
    failed_enough,
    first_that_fits,
    is_interrupted,
    needs_another_attempt,
)
from nsa_harness.subject.playbook import second_runs
from nsa_harness.supervisor.launch.machine import memory_bytes
from nsa_harness.supervisor.storage.rundir import RunOptions
from nsa_harness.texts.sentences import with_words


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The launches that a user requested, and their options."""

    specs: tuple[RunSpec | Skip, ...]
    options: RunOptions
    policy: Policy = ONCE
    deepen: bool = False  # launch diagnostic reruns, each with one change, to explain failures
    jobs: int | None = 1  # parallel runs; None: as many as cores, devices and memory allow
    resume_in: Path | None = None  # the run directory to continue in; None: a new one
    engine: EngineChoice | None = None  # runs each launch as a job; None: this machine runs it
    plan_file: PlanText | None = None  # has the decision rules for all runs together; None: the shipped plan file


_POLL_S = 0.2
_NO_BOUND = Room(jobs=None, cores=None, gpus=MAX_RANKS * MAX_RANKS, memory_bytes=None)
_RANK_BYTES = 600 << 20  # assumed until a rank was measured: torch, gloo and a small model


@dataclass(kw_only=True)
class Execution:
    """The launches for one request, and the attempts made so far."""

    session: Session
    request: RunRequest
    attempts: dict[str, list[Outcome]] = field(default_factory=dict)  # by scenario name
    # Attempts of an earlier session that were interrupted. They are made again, so the policy does not count them.
    cut_short: tuple[Outcome, ...] = ()

    def outcomes_after(self, before: Sequence[Outcome]) -> list[Outcome]:
        """Launch the missing attempts, and return all outcomes, including those of an earlier session."""
        self.remember(before)
        launches = [spec for spec in self.request.specs if isinstance(spec, RunSpec)]
        waiting = [spec for spec in launches if self._wanted(spec) or self._open_question(spec)]
        skips = [spec for spec in self.request.specs if isinstance(spec, Skip)]
        plan: Sequence[RunSpec | Skip] = [*waiting, *skips] if before else self.request.specs
        redacted_plan = [self.session.run.redaction.spec(spec) for spec in plan]
        self.session.broadcast(lambda listener: listener.on_plan(self.session.facts, redacted_plan))
        self.carry_out([*skips, *waiting], self.request.jobs)
        return [outcome for outcomes in self.attempts.values() for outcome in outcomes]

    def remember(self, before: Sequence[Outcome]) -> None:
        """Store the attempts made by an earlier session, so that they are not launched again."""
        names = [*(spec.scenario for spec in self.request.specs), *(outcome.spec.scenario for outcome in before)]
        self.attempts = {name: [] for name in names}
        self.cut_short = tuple(filter(is_interrupted, before))
        for outcome in sorted(before, key=lambda outcome: outcome.attempt):
            self.attempts[outcome.spec.scenario].append(outcome)

    def carry_out(self, specs: Sequence[RunSpec | Skip], jobs: int | None, *, crowded: bool = False) -> None:
        """Launch each scenario as the policy requires, `jobs` in parallel, or all at once if it is `crowded`."""
        for skip in specs:
            if isinstance(skip, Skip):
                self._skip(skip)
        launches = [spec for spec in specs if isinstance(spec, RunSpec)]
        if jobs == 1:
            for spec in launches:
                self._scenario(spec, None)
        else:
            self._carry_out_in_parallel(launches, _NO_BOUND if crowded else self._room(jobs))

    def _carry_out_in_parallel(self, waiting: list[RunSpec], room: Room) -> None:
        running: dict[Future[None], Load] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(waiting))) as pool:
            while waiting or running:
                while (index := first_that_fits([*map(self._load, waiting)], [*running.values()], room)) is not None:
                    spec = waiting.pop(index)
                    running[pool.submit(self._scenario_on_own_devices, spec)] = self._load(spec)
                done_futures, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done_futures:
                    del running[future]
                    future.result()

    def _scenario_on_own_devices(self, spec: RunSpec) -> None:
        with self.session.devices_of(spec) as devices:
            self._scenario(spec, devices or None)

    def _scenario(self, spec: RunSpec, devices: tuple[int, ...] | None) -> None:
        while not self._must_stop() and self._wanted(spec):
            self._add(self.session.launch(spec, self._next_number(spec), devices=devices))
        while not self.session.interrupted and (change := self._open_question(spec)) is not None:
            self._add(self._rerun(spec, *change, devices))

    def _rerun(self, spec: RunSpec, open_attempt: Outcome, change: Change, devices: tuple[int, ...] | None) -> Outcome:
        """Launch a scenario again with one change, in order to explain its failure."""
        changed_spec = with_change(spec, change, open_attempt.attempt)
        deeper = self.session.launch(changed_spec, self._next_number(spec), devices=devices)
        return with_words(with_diagnostic_reruns([open_attempt, replace(deeper, final=False)]))[1]

    def _open_question(self, spec: RunSpec) -> tuple[Outcome, Change] | None:
        """Return the failed attempt to explain and the change to try, or None if nothing is left to try."""
        if not self.request.deepen:
            return None
        attempts = with_flakiness(self.attempts[spec.scenario])
        final = next((attempt for attempt in attempts if attempt.final and attempt.spec.deepening is None), None)
        if final is None:
            return None
        tried_changes = [
            attempt.spec.deepening.change
            for attempt in attempts
            if attempt.spec.deepening and attempt.spec.deepening.of == final.attempt
        ]
        change = next_change(
            spec, final, tried_changes, probe=self.request.options.probe, program_changes=second_runs(spec)
        )
        return None if change is None else (final, change)

    def _next_number(self, spec: RunSpec) -> int:
        return max((outcome.attempt for outcome in self.attempts[spec.scenario]), default=0) + 1

    def _skip(self, skip: Skip) -> None:
        from nsa_harness.commands.judge import record_skip

        self._add(record_skip(self.session.run.attempt(skip.scenario), skip))

    def _add(self, outcome: Outcome) -> None:
        self.attempts[outcome.spec.scenario].append(outcome)
        self.session.announce(outcome)

    def _wanted(self, spec: RunSpec) -> bool:
        return needs_another_attempt(self.request.policy, self._counted(self.attempts[spec.scenario]))

    def _counted(self, attempts: Sequence[Outcome]) -> list[Outcome]:
        return [attempt for attempt in attempts if attempt not in self.cut_short]

    def _must_stop(self) -> bool:
        return self.session.interrupted or failed_enough(
            self.request.policy, map(self._counted, self.attempts.values())
        )

    def _room(self, jobs: int | None) -> Room:
        if self.request.engine is not None:  # the queue of the cluster decides what runs
            return replace(_NO_BOUND, jobs=jobs)
        # If the user chose the number of jobs, the cores do not limit it.
        return room_of(self.session.facts, jobs, cores=self.session.facts.cpus if jobs is None else None)

    def _load(self, spec: RunSpec) -> Load:
        return load_of(spec, chain.from_iterable(self.attempts.values()), unknown_bytes=_RANK_BYTES)


def room_of(facts: MachineFacts, jobs: int | None, *, cores: int | None) -> Room:
    """Return the resources for parallel launches. There is no limit where `jobs` or `cores` is None."""
    return Room(jobs=jobs, cores=cores, gpus=len(facts.gpus), memory_bytes=memory_bytes()[1])


def load_of(spec: RunSpec, outcomes: Iterable[Outcome], *, unknown_bytes: int) -> Load:
    """Return a launch's resources. A rank needs as much memory as the largest so far, or `unknown_bytes`."""
    sizes = (outcome.usage.peak_rss_bytes for outcome in outcomes)
    rank_bytes = max((size for size in sizes if size), default=unknown_bytes)
    gpus = spec.ranks if spec.device == "cuda" else 0
    return Load(ranks=spec.ranks, gpus=gpus, memory_bytes=spec.ranks * rank_bytes)
