"""A plan: every scenario as often as its policy says, one after another or side by side; `attempt` makes each run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness.commands.attempt import Interrupts, run_one
from nsa_harness.core.comparison.plan_file import PlanText
from nsa_harness.core.experiment.diagnostic_rerun import Change, deepened, next_change, with_deeper_runs
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import MAX_RANKS, RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.core.schedule import (
    ONCE,
    Load,
    Policy,
    Room,
    another_wanted,
    failed_enough,
    first_that_fits,
    free_devices,
)
from nsa_harness.render.listener import Broadcast
from nsa_harness.subject.playbook import WHAT_FOLLOWS, second_runs
from nsa_harness.supervisor.launch.machine import memory_bytes
from nsa_harness.supervisor.storage.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    specs: tuple[RunSpec | Skip, ...]
    out: Path | None  # the parent of run directories; None = ./reports
    json: bool
    strict: bool
    probe: str  # off | board | full
    command: str  # as typed
    policy: Policy = ONCE
    deepen: bool = False  # look into what a run left open, by launches with one change
    jobs: int | None = 1  # runs at the same time; None = as many as cores, devices and memory allow
    redact: bool = True
    git_diff: bool = False  # env.json keeps what is not committed
    verbose: bool = False  # the terminal shows what an answer rests on
    resumed: Path | None = None  # the run directory to go on in
    agreed: PlanText | None = None  # by what its runs are judged together; None: by what ships


_LOOK_S = 0.2
_NO_BOUND = Room(jobs=None, cores=None, gpus=MAX_RANKS * MAX_RANKS, memory_bytes=None)
_MEMORY_OF_A_RANK = 600 << 20  # of a rank that nobody has measured: torch, gloo and a small model


@dataclass(kw_only=True)
class Execution:
    """The plan of a request while it is carried out."""

    run: RunDir
    request: RunRequest
    facts: MachineFacts
    broadcast: Broadcast
    interruption: Interrupts
    attempts: dict[str, list[Outcome]] = field(default_factory=dict)  # by scenario, of the whole plan from the start
    taken: set[int] = field(default_factory=set)  # devices

    def outcomes_after(self, before: Sequence[Outcome]) -> list[Outcome]:
        """Every attempt of every scenario; those in `before` were made earlier and are not made again."""
        self.remember(before)
        launches = [spec for spec in self.request.specs if isinstance(spec, RunSpec)]
        waiting = [spec for spec in launches if self._wanted(spec) or self._open_question(spec)]
        skips = [spec for spec in self.request.specs if isinstance(spec, Skip)]
        asked: Sequence[RunSpec | Skip] = [*waiting, *skips] if before else self.request.specs
        shown = [self.run.redaction.spec(spec) for spec in asked]
        self.broadcast(lambda one: one.plan(self.facts, shown))
        self.carry_out([*skips, *waiting], self.request.jobs)
        return [outcome for outcomes in self.attempts.values() for outcome in outcomes]

    def remember(self, before: Sequence[Outcome]) -> None:
        """What was made earlier counts, and is not made again."""
        names = [*(spec.scenario for spec in self.request.specs), *(outcome.spec.scenario for outcome in before)]
        self.attempts = {name: [] for name in names}
        for outcome in sorted(before, key=lambda outcome: outcome.attempt):
            self.attempts[outcome.spec.scenario].append(outcome)

    def carry_out(self, specs: Sequence[RunSpec | Skip], jobs: int | None, *, crowded: bool = False) -> None:
        """Each as often as is wanted, so many at a time; None = as many as there is room for.

        `crowded`: at the same time also where they take the machine from each other.
        """
        for skip in specs:
            if isinstance(skip, Skip):
                self._skip(skip)
        launches = [spec for spec in specs if isinstance(spec, RunSpec)]
        if jobs == 1:
            for spec in launches:
                self._scenario(spec, None)
        else:
            self._side_by_side(launches, _NO_BOUND if crowded else self._room(jobs))

    def _side_by_side(self, waiting: list[RunSpec], room: Room) -> None:
        running: dict[Future[None], tuple[Load, tuple[int, ...]]] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(waiting))) as pool:
            while waiting or running:
                loads = [load for load, _ in running.values()]
                while (place := first_that_fits([*map(self._load, waiting)], loads, room)) is not None:
                    spec = waiting.pop(place)
                    devices = self._devices(spec)
                    running[pool.submit(self._scenario, spec, devices)] = (self._load(spec), devices)
                    loads = [load for load, _ in running.values()]
                ended, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    self.taken -= set(running.pop(future)[1])
                    future.result()

    def _scenario(self, spec: RunSpec, devices: tuple[int, ...] | None) -> None:
        """All attempts of one scenario, and the looks into what they left open."""
        while not self._stopped() and self._wanted(spec):
            self._add(self._attempt(spec, self._next_number(spec), devices))
        while self.interruption.count == 0 and (change := self._open_question(spec)) is not None:
            self._add(self._look_deeper(spec, *change, devices))

    def _look_deeper(
        self, spec: RunSpec, open_attempt: Outcome, change: Change, devices: tuple[int, ...] | None
    ) -> Outcome:
        """The same launch with one change: it answers for another attempt, and does not count itself."""
        deeper = self._attempt(deepened(spec, change, open_attempt.attempt), self._next_number(spec), devices)
        return with_deeper_runs([open_attempt, replace(deeper, final=False)], WHAT_FOLLOWS)[1]

    def _open_question(self, spec: RunSpec) -> tuple[Outcome, Change] | None:
        """The attempt that counts, and the change that would tell more about it; None where nothing is open."""
        if not self.request.deepen:
            return None
        attempts = with_flakiness(self.attempts[spec.scenario])
        counting = next((one for one in attempts if one.final and one.spec.deepening is None), None)
        if counting is None:
            return None
        made = [
            one.spec.deepening.change
            for one in attempts
            if one.spec.deepening and one.spec.deepening.of == counting.attempt
        ]
        change = next_change(spec, counting, made, probe=self.request.probe, own=second_runs(spec))
        return None if change is None else (counting, change)

    def _next_number(self, spec: RunSpec) -> int:
        return max((outcome.attempt for outcome in self.attempts[spec.scenario]), default=0) + 1

    def _attempt(self, spec: RunSpec, number: int, devices: tuple[int, ...] | None) -> Outcome:
        return run_one(
            spec,
            self.run.attempt(spec.scenario, number),
            number=number,
            probe=self.request.probe,
            facts=self.facts,
            tell=self.broadcast,
            interruption=self.interruption,
            log=self.run.log,
            devices=devices or None,
        )

    def _skip(self, skip: Skip) -> None:
        from nsa_harness.commands.judge import keep_skip

        self._add(keep_skip(self.run.attempt(skip.scenario), skip))

    def _add(self, outcome: Outcome) -> None:
        self.attempts[outcome.spec.scenario].append(outcome)
        self.broadcast(lambda one: one.outcome(outcome, self.run.path))

    def _wanted(self, spec: RunSpec) -> bool:
        return another_wanted(self.request.policy, self.attempts[spec.scenario])

    def _stopped(self) -> bool:
        return self.interruption.count > 0 or failed_enough(self.request.policy, self.attempts.values())

    def _room(self, jobs: int | None) -> Room:
        return Room(
            jobs=jobs,
            cores=self.facts.cpus if jobs is None else None,  # who names a number has decided
            gpus=len(self.facts.gpus),
            memory_bytes=memory_bytes()[1],
        )

    def _load(self, spec: RunSpec) -> Load:
        gpus = spec.ranks if spec.device == "cuda" else 0
        return Load(ranks=spec.ranks, gpus=gpus, memory_bytes=spec.ranks * self._rank_bytes())

    def _rank_bytes(self) -> int:
        """The largest rank seen so far; a guess before the first has ended."""
        seen = [outcome.usage.peak_rss_bytes for outcomes in self.attempts.values() for outcome in outcomes]
        return max((size for size in seen if size), default=_MEMORY_OF_A_RANK)

    def _devices(self, spec: RunSpec) -> tuple[int, ...]:
        if spec.device != "cuda":
            return ()
        devices = free_devices(self.taken, spec.ranks, len(self.facts.gpus))
        self.taken |= set(devices)
        return devices
