"""`nsa-harness ready`: run the phases of a checklist, and decide GO or NO-GO."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from nsa_harness import __version__
from nsa_harness.commands.run import judge_attempts
from nsa_harness.commands.scheduler import Execution, RunRequest
from nsa_harness.commands.session import INTERRUPTED, session
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.experiment.checklist import Checklist, Concurrency, PlannedRun
from nsa_harness.core.experiment.readiness import (
    EVIDENCE_METRICS,
    CriterionResult,
    Decision,
    Measurements,
    PhaseRuns,
    Readiness,
    expected_s,
    judge_checklist,
    numbers_of,
    unmet_need,
)
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.core.schedule import is_interrupted
from nsa_harness.errors import UsageError, did_you_mean
from nsa_harness.render.experiments.readiness import (
    ReadinessRecord,
    ReadyScreen,
    TimeEstimate,
    header_lines,
    phase_lines,
    plan_lines,
    readiness_json,
    readiness_md,
    result_lines,
    unreached_line,
)
from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.subject.options import SHAPES
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.experiments.cache_key import CacheKey, LaunchedProgram, query_interpreter, sealed_digest
from nsa_harness.supervisor.experiments.journal import SearchDirectory, open_search, search_state
from nsa_harness.supervisor.launch.checklists import PhasePlan, load_checklist, plan_phases
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions

EXIT = MappingProxyType({Decision.GO: 0, Decision.NO_GO: 1, Decision.UNDECIDED: 125})
_MAX_EVIDENCE_BYTES = 64 << 20
_LEAST_RANKS = 2  # the runs of the shipped checklist compare ranks, so they need two


@dataclass(frozen=True, kw_only=True)
class ReadyRequest:
    """The readiness check to run, and its options."""

    shape: str
    overrides: tuple[str, ...]  # KEY=VALUE, for every scenario; the overrides of a phase take precedence
    checklist: Path | None  # None: the shipped checklist
    jobs: int | None  # parallel runs in phases that allow them
    planned: tuple[str, ...] = ()  # KEY=VALUE of the planned run, in place of the checklist's
    options: RunOptions


@dataclass(frozen=True, kw_only=True)
class ReadyPlan:
    """A checklist, and the launches for each of its phases."""

    checklist: Checklist
    phases: tuple[PhasePlan, ...]


def run_readiness(request: ReadyRequest) -> int:
    """Run a readiness check, write its output files, and return the exit code."""
    facts = machine_facts()
    plan = _plan_phases(request, facts)
    specs = [spec for phase_plan in plan.phases for spec in phase_plan.specs if isinstance(spec, RunSpec)]
    program = LaunchedProgram(specs=specs, interpreter=query_interpreter(None, os.environ), working_dir=Path.cwd())
    state = search_state(f"ready {request.shape}", request.options.command, _cache_key(request, plan, program))
    end_dead_runs()
    with open_search(
        request.options, state, program.file_entries, state_file=lambda run: run.readiness_state, noun="check"
    ) as folder:
        return _check_in(folder, request, plan, facts)


def show_plan(request: ReadyRequest) -> int:
    """Print what a readiness check would launch, for --dry-run, and return the exit code."""
    facts = machine_facts()
    plan = _plan_phases(request, facts)
    phases = [(phase_plan.phase, phase_plan.specs) for phase_plan in plan.phases]
    for line in plan_lines(request.shape, phases):
        print(line)
    return 0


def _plan_phases(request: ReadyRequest, facts: MachineFacts) -> ReadyPlan:
    """Read the checklist and plan its launches. Raise HarnessError if the checklist or the request is invalid."""
    if request.shape not in SHAPES:
        names = ", ".join(SHAPES)
        raise UsageError(f"no shape {request.shape!r}{did_you_mean(request.shape, SHAPES)}; known: {names}")
    checklist = load_checklist(request.checklist, Path.cwd())
    planned = planned_run(checklist.checklist.planned, request.planned)
    checklist = replace(checklist, checklist=checklist.checklist.model_copy(update={"planned": planned}))
    room = len(facts.gpus) or facts.cpus  # ranks that this machine can run
    fits = planned.ranks is not None and planned.nodes == 1 and _LEAST_RANKS <= planned.ranks <= room
    ranks = (f"run.ranks={planned.ranks}",) if fits else ()
    words = (f"model.shape={request.shape}", *ranks, *request.overrides)
    invocation = Invocation(arguments=words, working_dir=Path.cwd(), environ=os.environ)
    return ReadyPlan(checklist=checklist.checklist, phases=plan_phases(checklist, invocation, facts))


def planned_run(planned: PlannedRun, words: Sequence[str]) -> PlannedRun:
    """Return the planned run with the values of KEY=VALUE words. Raise UsageError for an unknown key or value."""
    values: dict[str, object] = planned.model_dump()
    for word in words:
        key, _, value = word.partition("=")
        if key not in PlannedRun.model_fields or not value.isdigit():
            keys = ", ".join(PlannedRun.model_fields)
            raise UsageError(f"--planned: expected KEY=NUMBER with a key of {keys}; got {word!r}")
        values[key] = int(value)
    try:
        return PlannedRun.model_validate(values)
    except ValueError as error:
        raise UsageError(f"--planned: {error}") from None


def _cache_key(request: ReadyRequest, plan: ReadyPlan, program: LaunchedProgram) -> CacheKey:
    """Return everything that must be unchanged for an interrupted check to continue.

    Criteria are not part of the key, because they only read the results. The hash of a launch covers the program's
    content.
    """
    phases = {f"phase {phase_plan.phase.name}": phase_plan.specs for phase_plan in plan.phases}
    return {
        **program.file_entries(),
        **program.environment_entries(),
        "nsa-harness": __version__,
        **{name: sealed_digest(*map(_key_of_launch, specs)) for name, specs in phases.items()},
        "what is asked": sealed_digest(request.shape, request.options.probe),
    }


def _key_of_launch(spec: RunSpec | Skip) -> object:
    """Return the properties of a launch that must be unchanged for its result to be reused."""
    return spec.reason if isinstance(spec, Skip) else (spec.spec_hash, spec.expect, spec.limits)


def _check_in(folder: SearchDirectory, request: ReadyRequest, plan: ReadyPlan, facts: MachineFacts) -> int:
    run, options = folder.run, request.options
    before = judge_attempts(run) if folder.is_continued else []
    first_attempts = {name: str(run.path / name) for phase_plan in plan.phases for name in phase_plan.names}
    launches = tuple(spec for phase_plan in plan.phases for spec in phase_plan.launches(facts, first_attempts))
    screen = ReadyScreen(sys.stderr if options.json else sys.stdout, version=__version__, playbook=PLAYBOOK)
    # Some phases always run in parallel, so the attempts check for an interruption themselves. With --json,
    # readiness.json is printed instead of events.
    with session(
        run, replace(options, json=False), launches, screen=screen, in_parallel=True, facts=facts, jobs=request.jobs
    ) as running:
        execution = Execution(session=running, request=RunRequest(specs=launches, options=options, jobs=request.jobs))
        check = Check(request=request, plan=plan, execution=execution, screen=screen)
        running.broadcast(lambda listener: listener.on_plan(facts, [run.redaction.spec(spec) for spec in launches]))
        check.begin(before, folder)
        result = check.carry_out()
        report = running.write_documents([outcome for attempts in execution.attempts.values() for outcome in attempts])
        cut_short = running.record.was_interrupted
        running.broadcast(lambda listener: listener.on_done(report, run.path))
        check.end(result, ended=not cut_short)
        folder.write(ended=not cut_short)
    if options.json:
        sys.stdout.write(run.directory.read_whole_file(run.readiness_record, _MAX_EVIDENCE_BYTES).decode())
    return INTERRUPTED if cut_short else EXIT[result.decision]


@dataclass(kw_only=True)
class Check:
    """A readiness check in progress."""

    request: ReadyRequest
    plan: ReadyPlan
    execution: Execution
    screen: ReadyScreen
    phase_runs: list[PhaseRuns] = field(default_factory=list)  # one entry per phase; empty for a phase that has not run

    @property
    def run(self) -> RunDir:
        return self.execution.session.run

    @property
    def facts(self) -> MachineFacts:
        return self.execution.session.facts

    def begin(self, before: Sequence[Outcome], folder: SearchDirectory) -> None:
        """Take over the attempts that an interrupted check has made, and print the header."""
        self.execution.remember(before)
        self.phase_runs = [PhaseRuns(names=phase_plan.names) for phase_plan in self.plan.phases]
        reused_runs = sum(not is_interrupted(outcome) for outcome in before)
        note = f"continues {self.run.path}: {reused_runs} runs already finished" if folder.is_continued else folder.note
        takes = TimeEstimate(about_s=None, at_most_s=self._at_most_s(0))
        self._print(header_lines(self.request.shape, self.plan.checklist, takes, note, self.screen.width))

    def carry_out(self) -> Readiness:
        """Run every phase whose required phases have passed, and return the result."""
        result = judge_checklist(self.plan.checklist, self.phase_runs, self.facts)
        for number, phase_plan in enumerate(self.plan.phases):
            if self.execution.session.interrupted:
                break
            results: Mapping[str, CriterionResult] = {row.name: row.result for row in result.phases}
            if reason := unmet_need(results, phase_plan.phase):
                self._print([unreached_line(phase_plan.phase, reason, self.screen.width)])
                continue
            self._run_phase(number, phase_plan)
            result = judge_checklist(self.plan.checklist, self.phase_runs, self.facts)
            self._write(result, ended=False)
        return result

    def end(self, result: Readiness, *, ended: bool) -> None:
        """Write the readiness record and print the decision. `ended` is False after an interruption."""
        record = self._write(result, ended=ended)
        self._print(result_lines(record, self.run.path, self.screen.width))
        if ended:
            lines = list(result_lines(record, self.run.path, NO_WIDTH))
            subject = f"ready {record.shape}"
            self.execution.session.broadcast(lambda listener: listener.on_answer(record.verdict.value, subject, lines))

    def _run_phase(self, number: int, plan: PhasePlan) -> None:
        """Launch the runs of a phase that have no result yet, and store the results."""
        earlier = [outcome for phase in self.phase_runs for outcome in phase.outcomes if outcome.dir]
        specs = plan.launches(
            self.facts, {outcome.spec.scenario: str(self.run.path / outcome.dir) for outcome in earlier}
        )
        if all(self._final(name) is not None for name in plan.names):
            self._store(number, plan)
            return
        following = [later.phase for later in self.plan.phases[number + 1 :]]
        remaining = [spec for later in self.plan.phases[number:] for spec in later.specs]
        lines = phase_lines(
            number + 1, len(self.plan.phases), plan.phase, following,
            TimeEstimate(about_s=self._about_s(specs), at_most_s=self._at_most_s(number, number + 1)),
            TimeEstimate(about_s=self._about_s(remaining), at_most_s=self._at_most_s(number)),
            self.screen.width,
        )  # fmt: skip
        self._print(lines)
        together = plan.phase.together
        jobs = {Concurrency.NEVER: 1, Concurrency.MAY: self.request.jobs, Concurrency.MUST: len(specs)}[together]
        self.execution.carry_out(specs, jobs, crowded=together is Concurrency.MUST)
        self._store(number, plan)

    def _store(self, number: int, plan: PhasePlan) -> None:
        outcomes = tuple(outcome for name in plan.names if (outcome := self._final(name)) is not None)
        numbers = {outcome.spec.scenario: self._numbers(outcome) for outcome in outcomes}
        self.phase_runs[number] = PhaseRuns(names=plan.names, outcomes=outcomes, numbers=numbers)

    def _final(self, name: str) -> Outcome | None:
        attempts = [attempt for attempt in self.execution.attempts[name] if not is_interrupted(attempt)]
        return next((attempt for attempt in with_flakiness(attempts) if attempt.final), None)

    def _numbers(self, outcome: Outcome) -> Measurements:
        """Return the measurements of a run that the checklist's criteria need."""
        criteria = self.plan.checklist.criteria.values()
        needs_evidence = any(
            criterion.metric in EVIDENCE_METRICS and criterion.reads(outcome.spec.scenario) for criterion in criteria
        )
        return numbers_of(outcome, self._evidence(outcome) if needs_evidence and outcome.dir else None)

    def _evidence(self, outcome: Outcome) -> Evidence | None:
        attempt = self.run.attempt(outcome.spec.scenario, outcome.attempt)
        for file in attempt.directory.list_files(attempt.evidence, "*.json"):
            try:
                return type_adapter(Evidence).validate_json(
                    attempt.directory.read_whole_file(file, _MAX_EVIDENCE_BYTES)
                )
            except (OSError, ValueError):
                continue
        return None

    def _about_s(self, specs: Sequence[RunSpec | Skip]) -> float | None:
        """Return the expected seconds of the runs in `specs` that have no result, or None if unknown."""
        remaining = [
            dict(spec.settings) for spec in specs if isinstance(spec, RunSpec) and self._final(spec.scenario) is None
        ]
        # A run that only loads data takes almost no time, so its steps count as 0.
        steps = [0 if run.get("train.phase") == "data" else int(run.get("train.steps", "1")) for run in remaining]
        return expected_s(steps, [outcome for phase in self.phase_runs for outcome in phase.outcomes])

    def _at_most_s(self, begin: int, end: int | None = None) -> float | None:
        """Return the longest possible seconds of the phases [begin:end], or None if a run has no deadline."""
        total_s = 0.0
        for plan in self.plan.phases[begin:end]:
            limits = [spec.limits.deadline_s for spec in plan.specs if isinstance(spec, RunSpec)]
            deadlines_s = [limit for limit in limits if limit is not None]
            if len(deadlines_s) < len(limits):
                return None
            total_s += max(deadlines_s, default=0.0) if plan.phase.together is Concurrency.MUST else sum(deadlines_s)
        return total_s

    def _write(self, result: Readiness, *, ended: bool) -> ReadinessRecord:
        record = self.run.redaction.value(
            ReadinessRecord(
                verdict=result.decision,
                ended=ended,
                shape=self.request.shape,
                checklist=str(self.request.checklist or "the shipped one"),
                about=self.plan.checklist.about,
                command=self.run.redaction.command_text(self.request.options.command),
                run_id=self.run.run_id,
                harness=__version__,
                machine=self.facts,
                criteria=result.criteria,
                phases=result.phases,
                not_tested=result.not_tested,
                planned=self.plan.checklist.planned.model_dump(exclude_none=True),
            )
        )
        self.run.directory.write(self.run.readiness, readiness_md(record))
        self.run.directory.write(self.run.readiness_record, readiness_json(record))
        return record

    def _print(self, lines: Iterable[str]) -> None:
        all_lines = list(lines)
        with self.execution.session.broadcast.lock:
            self.screen.tell(all_lines)
            self.run.directory.append(self.run.log, "".join(f"{line}\n" for line in all_lines))
