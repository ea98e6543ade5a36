"""`ready`: run the phases of a checklist one after another, skip phases that cannot pass, and give the verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from nsa_harness import __version__
from nsa_harness.commands.run import judged
from nsa_harness.commands.scheduler import Execution, RunRequest
from nsa_harness.commands.session import INTERRUPTED, session
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.experiment.readiness import (
    FROM_EVIDENCE,
    Checklist,
    Decision,
    Numbers,
    PhaseRuns,
    Readiness,
    Result,
    Together,
    blocked,
    expected_s,
    numbers_of,
    readiness,
)
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.core.schedule import interrupted
from nsa_harness.errors import UsageError, did_you_mean
from nsa_harness.render.experiments.readiness import (
    ReadinessRecord,
    ReadyScreen,
    Takes,
    decided_lines,
    header_lines,
    phase_lines,
    plan_lines,
    readiness_json,
    readiness_md,
    unreached_line,
)
from nsa_harness.subject.options import SHAPES
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.experiments.cache_key import CacheKey, Program, interpreter, sealed_digest
from nsa_harness.supervisor.experiments.journal import SearchFolder, search_folder, search_state
from nsa_harness.supervisor.launch.checklists import PhasePlan, load_checklist, planned_phases
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.storage.adapters import adapter
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions

EXIT = MappingProxyType({Decision.GO: 0, Decision.NO_GO: 1, Decision.UNDECIDED: 125})
_MAX_EVIDENCE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ReadyRequest:
    shape: str
    words: tuple[str, ...]  # KEY=VALUE overrides for every scenario; those of its phase take precedence
    checklist: Path | None  # None: the shipped checklist
    jobs: int | None  # parallel runs in phases that allow them
    options: RunOptions


@dataclass(frozen=True, kw_only=True)
class Plans:
    checklist: Checklist
    phases: tuple[PhasePlan, ...]


def run_readiness(request: ReadyRequest) -> int:
    """Run the rest of the checklist and write the documents. Return the exit code."""
    facts = machine_facts()
    plans = _planned(request, facts)
    specs = [spec for plan in plans.phases for spec in plan.specs if isinstance(spec, RunSpec)]
    program = Program(specs=specs, interpreter=interpreter(None, os.environ), working_dir=Path.cwd())
    state = search_state(f"ready {request.shape}", request.options.command, _cache_key(request, plans, program))
    sweep_dead_runs()
    with search_folder(
        request.options, state, program.files, state_file=lambda run: run.readiness_state, noun="check"
    ) as folder:
        return _check_in(folder, request, plans, facts)


def show_plan(request: ReadyRequest) -> int:
    """Print what --dry-run shows; launch nothing."""
    facts = machine_facts()
    plans = _planned(request, facts)
    phases = [(plan.phase, plan.specs) for plan in plans.phases]
    for line in plan_lines(request.shape, phases):
        print(line)
    return 0


def _planned(request: ReadyRequest, facts: MachineFacts) -> Plans:
    if request.shape not in SHAPES:
        known = ", ".join(SHAPES)
        raise UsageError(f"no shape {request.shape!r}{did_you_mean(request.shape, SHAPES)}; known: {known}")
    read = load_checklist(request.checklist, Path.cwd())
    words = (f"model.shape={request.shape}", *request.words)
    question = Invocation(words=words, working_dir=Path.cwd(), environ=os.environ)
    return Plans(checklist=read.checklist, phases=planned_phases(read, question, facts))


def _cache_key(request: ReadyRequest, plans: Plans, program: Program) -> CacheKey:
    """Return everything that must be unchanged for a finished run to count.

    Criteria are not part of it, because they only read runs. The hash of a launch covers the program's content.
    """
    phases = {f"phase {plan.phase.name}": plan.specs for plan in plans.phases}
    return {
        **program.files(),
        **program.environment(),
        "nsa-harness": __version__,
        **{name: sealed_digest(*map(_decisive, specs)) for name, specs in phases.items()},
        "what is asked": sealed_digest(request.shape, request.options.probe),
    }


def _decisive(spec: RunSpec | Skip) -> object:
    return spec.reason if isinstance(spec, Skip) else (spec.spec_hash, spec.expect, spec.limits)


def _check_in(folder: SearchFolder, request: ReadyRequest, plans: Plans, facts: MachineFacts) -> int:
    run, options = folder.run, request.options
    before = judged(run) if folder.goes_on else []
    first_attempts = {name: str(run.path / name) for plan in plans.phases for name in plan.names}
    launches = tuple(spec for plan in plans.phases for spec in plan.launches(facts, first_attempts))
    screen = ReadyScreen(sys.stderr if options.json else sys.stdout, version=__version__, playbook=PLAYBOOK)
    # Some phases always run in parallel, so the attempts check for an interruption themselves. The readiness record
    # replaces the event stream.
    with session(
        run, replace(options, json=False), launches, screen=screen, side_by_side=True, facts=facts, jobs=request.jobs
    ) as running:
        execution = Execution(session=running, request=RunRequest(specs=launches, options=options, jobs=request.jobs))
        check = Check(request=request, plans=plans, execution=execution, screen=screen)
        running.broadcast(lambda listener: listener.on_plan(facts, [run.redaction.spec(spec) for spec in launches]))
        check.begin(before, folder)
        result = check.carry_out()
        report = running.write_documents([outcome for attempts in execution.attempts.values() for outcome in attempts])
        cut_short = running.record.interrupted
        running.broadcast(lambda listener: listener.on_done(report, run.path))
        check.end(result, ended=not cut_short)
        folder.write(ended=not cut_short)
    if options.json:
        sys.stdout.write(run.door.whole(run.readiness_record, _MAX_EVIDENCE_BYTES).decode())
    return INTERRUPTED if cut_short else EXIT[result.decision]


@dataclass(kw_only=True)
class Check:
    """A checklist while it is carried out."""

    request: ReadyRequest
    plans: Plans
    execution: Execution
    screen: ReadyScreen
    done: list[PhaseRuns] = field(default_factory=list)

    @property
    def run(self) -> RunDir:
        return self.execution.session.run

    @property
    def facts(self) -> MachineFacts:
        return self.execution.session.facts

    def begin(self, before: Sequence[Outcome], folder: SearchFolder) -> None:
        """Start with the attempts of an earlier session, and print the header."""
        self.execution.remember(before)
        self.done = [PhaseRuns(names=plan.names) for plan in self.plans.phases]
        kept = sum(not interrupted(outcome) for outcome in before)
        note = f"goes on with {self.run.path}: {kept} runs already made" if folder.goes_on else folder.note
        takes = Takes(about_s=None, at_most_s=self._at_most_s(0))
        self._say(header_lines(self.request.shape, self.plans.checklist, takes, note, self.screen.width))

    def carry_out(self) -> Readiness:
        """Run every phase that is not blocked, and return the result so far or at the end."""
        result = readiness(self.plans.checklist, self.done, self.facts)
        for number, plan in enumerate(self.plans.phases):
            if self.execution.session.interrupted:
                break
            results: Mapping[str, Result] = {row.name: row.result for row in result.phases}
            if why := blocked(results, plan.phase):
                self._say([unreached_line(plan.phase, why, self.screen.width)])
                continue
            self._run_phase(number, plan)
            result = readiness(self.plans.checklist, self.done, self.facts)
            self._write(result, ended=False)
        return result

    def end(self, result: Readiness, *, ended: bool) -> None:
        record = self._write(result, ended=ended)
        self._say(decided_lines(record, self.run.path, self.screen.width))

    def _run_phase(self, number: int, plan: PhasePlan) -> None:
        """Launch the runs of a phase that have no final attempt yet, and store their outcomes and numbers."""
        made = [outcome for phase in self.done for outcome in phase.outcomes if outcome.dir]
        specs = plan.launches(self.facts, {outcome.spec.scenario: str(self.run.path / outcome.dir) for outcome in made})
        if all(self._final(name) is not None for name in plan.names):
            self._store(number, plan)
            return
        following = [later.phase for later in self.plans.phases[number + 1 :]]
        left = [spec for phase_plan in self.plans.phases[number:] for spec in phase_plan.specs]
        shown = phase_lines(
            number + 1, len(self.plans.phases), plan.phase, following,
            Takes(about_s=self._about_s(specs), at_most_s=self._at_most_s(number, number + 1)),
            Takes(about_s=self._about_s(left), at_most_s=self._at_most_s(number)),
            self.screen.width,
        )  # fmt: skip
        self._say(shown)
        together = plan.phase.together
        jobs = {Together.NEVER: 1, Together.MAY: self.request.jobs, Together.MUST: len(specs)}[together]
        self.execution.carry_out(specs, jobs, crowded=together is Together.MUST)
        self._store(number, plan)

    def _store(self, number: int, plan: PhasePlan) -> None:
        outcomes = tuple(outcome for name in plan.names if (outcome := self._final(name)) is not None)
        numbers = {outcome.spec.scenario: self._numbers(outcome) for outcome in outcomes}
        self.done[number] = PhaseRuns(names=plan.names, outcomes=outcomes, numbers=numbers)

    def _final(self, name: str) -> Outcome | None:
        """Return the final attempt of a run, or None if no attempt has ended."""
        attempts = [attempt for attempt in self.execution.attempts[name] if not interrupted(attempt)]
        return next((attempt for attempt in with_flakiness(attempts) if attempt.final), None)

    def _numbers(self, outcome: Outcome) -> Numbers:
        criteria = self.plans.checklist.criteria.values()
        needs_evidence = any(
            criterion.metric in FROM_EVIDENCE and criterion.reads(outcome.spec.scenario) for criterion in criteria
        )
        return numbers_of(outcome, self._evidence(outcome) if needs_evidence and outcome.dir else None)

    def _evidence(self, outcome: Outcome) -> Evidence | None:
        """Return the stored evidence; None: it cannot be read, and its numbers are not reported."""
        attempt = self.run.attempt(outcome.spec.scenario, outcome.attempt)
        for file in attempt.door.files(attempt.evidence, "*.json"):
            try:
                return adapter(Evidence).validate_json(attempt.door.whole(file, _MAX_EVIDENCE_BYTES))
            except (OSError, ValueError):
                continue
        return None

    def _about_s(self, specs: Sequence[RunSpec | Skip]) -> float | None:
        left = [
            dict(spec.settings) for spec in specs if isinstance(spec, RunSpec) and self._final(spec.scenario) is None
        ]
        # A run that only loads data takes almost no time.
        steps = [0 if run.get("train.phase") == "data" else int(run.get("train.steps", "1")) for run in left]
        return expected_s(steps, [outcome for phase in self.done for outcome in phase.outcomes])

    def _at_most_s(self, begin: int, end: int | None = None) -> float | None:
        """Return the most time of these phases, from the deadlines of their runs; None: a run has no deadline."""
        total_s = 0.0
        for plan in self.plans.phases[begin:end]:
            limits = [spec.limits.deadline_s for spec in plan.specs if isinstance(spec, RunSpec)]
            known = [limit for limit in limits if limit is not None]
            if len(known) < len(limits):
                return None
            total_s += max(known, default=0.0) if plan.phase.together is Together.MUST else sum(known)
        return total_s

    def _write(self, result: Readiness, *, ended: bool) -> ReadinessRecord:
        record = self.run.redaction.value(
            ReadinessRecord(
                verdict=result.decision,
                ended=ended,
                shape=self.request.shape,
                checklist=str(self.request.checklist or "the shipped one"),
                about=self.plans.checklist.about,
                command=self.run.redaction.typed(self.request.options.command),
                run_id=self.run.run_id,
                harness=__version__,
                machine=self.facts,
                criteria=result.criteria,
                phases=result.phases,
                not_tested=result.not_tested,
            )
        )
        self.run.door.write(self.run.readiness, readiness_md(record))
        self.run.door.write(self.run.readiness_record, readiness_json(record))
        return record

    def _say(self, lines: Iterable[str]) -> None:
        shown = list(lines)
        with self.execution.session.broadcast.lock:
            self.screen.tell(shown)
            self.run.door.append(self.run.log, "".join(f"{line}\n" for line in shown))
