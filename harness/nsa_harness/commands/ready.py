"""`ready`: the phases of a checklist one after another, as far as they can still show something, and the verdict."""

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
    words: tuple[str, ...]  # KEY=VALUE, laid upon every scenario before what its phase sets
    checklist: Path | None  # None: the shipped one
    jobs: int | None  # of phases whose runs may go on together
    options: RunOptions


@dataclass(frozen=True, kw_only=True)
class Plans:
    checklist: Checklist
    phases: tuple[PhasePlan, ...]


def run_readiness(request: ReadyRequest) -> int:
    """Run what is left of the checklist and write the documents; returns the exit code."""
    facts = machine_facts()
    plans = _planned(request, facts)
    specs = [spec for plan in plans.phases for spec in plan.specs if isinstance(spec, RunSpec)]
    program = Program(specs=specs, interpreter=interpreter(None, os.environ), working_dir=Path.cwd())
    state = search_state(f"ready {request.shape}", request.options.command, _premises(request, plans, program))
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


def _premises(request: ReadyRequest, plans: Plans, program: Program) -> CacheKey:
    """Return all that must be unchanged for a finished run to count. Criteria are not part of it: they only read runs.

    The hash of a launch covers the program's content.
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
    # Some phases go on side by side, whatever was asked for: the attempts look for an interruption themselves. The
    # readiness record takes the place of the event stream.
    with session(
        run, replace(options, json=False), launches, screen=screen, side_by_side=True, facts=facts, jobs=request.jobs
    ) as running:
        execution = Execution(session=running, request=RunRequest(specs=launches, options=options, jobs=request.jobs))
        check = Check(request=request, plans=plans, execution=execution, screen=screen)
        running.broadcast(lambda listener: listener.plan(facts, [run.redaction.spec(spec) for spec in launches]))
        check.begin(before, folder)
        found = check.carry_out()
        report = running.write_documents([one for attempts in execution.attempts.values() for one in attempts])
        cut_short = running.record.interrupted
        running.broadcast(lambda listener: listener.done(report, run.path))
        check.end(found, ended=not cut_short)
        folder.write(ended=not cut_short)
    if options.json:
        sys.stdout.write(run.door.whole(run.readiness_record, _MAX_EVIDENCE_BYTES).decode())
    return INTERRUPTED if cut_short else EXIT[found.decision]


@dataclass(kw_only=True)
class Check:
    """One checklist while it is carried out."""

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
        kept = sum(not interrupted(one) for one in before)
        note = f"goes on with {self.run.path}: {kept} runs already made" if folder.goes_on else folder.note
        takes = Takes(about_s=None, at_most_s=self._at_most_s(0))
        self._say(header_lines(self.request.shape, self.plans.checklist, takes, note, self.screen.width))

    def carry_out(self) -> Readiness:
        found = readiness(self.plans.checklist, self.done, self.facts)
        for number, plan in enumerate(self.plans.phases):
            if self.execution.session.interrupted:
                break
            results: Mapping[str, Result] = {row.name: row.result for row in found.phases}
            if why := blocked(results, plan.phase):
                self._say([unreached_line(plan.phase, why, self.screen.width)])
                continue
            self._carry_out(number, plan)
            found = readiness(self.plans.checklist, self.done, self.facts)
            self._write(found, ended=False)
        return found

    def end(self, found: Readiness, *, ended: bool) -> None:
        record = self._write(found, ended=ended)
        self._say(decided_lines(record, self.run.path, self.screen.width))

    def _carry_out(self, number: int, plan: PhasePlan) -> None:
        made = [one for phase in self.done for one in phase.outcomes if one.dir]
        specs = plan.launches(self.facts, {one.spec.scenario: str(self.run.path / one.dir) for one in made})
        if all(self._counting(name) is not None for name in plan.names):
            self._finished(number, plan)
            return
        following = [one.phase for one in self.plans.phases[number + 1 :]]
        left = [spec for one in self.plans.phases[number:] for spec in one.specs]
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
        self._finished(number, plan)

    def _finished(self, number: int, plan: PhasePlan) -> None:
        outcomes = tuple(one for name in plan.names if (one := self._counting(name)) is not None)
        numbers = {outcome.spec.scenario: self._numbers(outcome) for outcome in outcomes}
        self.done[number] = PhaseRuns(names=plan.names, outcomes=outcomes, numbers=numbers)

    def _counting(self, name: str) -> Outcome | None:
        """Return the attempt that counts; None: none has ended."""
        attempts = [attempt for attempt in self.execution.attempts[name] if not interrupted(attempt)]
        return next((one for one in with_flakiness(attempts) if one.final), None)

    def _numbers(self, outcome: Outcome) -> Numbers:
        criteria = self.plans.checklist.criteria.values()
        needs_evidence = any(
            criterion.metric in FROM_EVIDENCE and criterion.asks(outcome.spec.scenario) for criterion in criteria
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
            dict(spec.settings) for spec in specs if isinstance(spec, RunSpec) and self._counting(spec.scenario) is None
        ]
        # Fetching alone takes next to no time.
        steps = [0 if one.get("train.phase") == "data" else int(one.get("train.steps", "1")) for one in left]
        return expected_s(steps, [one for phase in self.done for one in phase.outcomes])

    def _at_most_s(self, begin: int, end: int | None = None) -> float | None:
        """Return the time of these phases by the deadlines of their runs; None: a run has none."""
        total_s = 0.0
        for plan in self.plans.phases[begin:end]:
            limits = [spec.limits.deadline_s for spec in plan.specs if isinstance(spec, RunSpec)]
            known = [limit for limit in limits if limit is not None]
            if len(known) < len(limits):
                return None
            total_s += max(known, default=0.0) if plan.phase.together is Together.MUST else sum(known)
        return total_s

    def _write(self, found: Readiness, *, ended: bool) -> ReadinessRecord:
        record = self.run.redaction.value(
            ReadinessRecord(
                verdict=found.decision,
                ended=ended,
                shape=self.request.shape,
                checklist=str(self.request.checklist or "the shipped one"),
                about=self.plans.checklist.about,
                command=self.run.redaction.typed(self.request.options.command),
                run_id=self.run.run_id,
                harness=__version__,
                machine=self.facts,
                criteria=found.criteria,
                phases=found.phases,
                not_tested=found.not_tested,
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
