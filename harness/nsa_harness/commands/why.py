"""`nsa-harness why`: record a failed program in a second run, and say why its ranks took different ways.

Further runs then test the answer: each changes one value, generator state or branch on some ranks, and shows whether
the ranks still diverge. `core/recording` analyses the recordings and plans the experiments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.engine_job import check_engine
from nsa_harness.commands.experiment import Experiment, experiment_in
from nsa_harness.commands.run import judge_attempts
from nsa_harness.commands.session import INTERRUPTED
from nsa_harness.commands.stored_job import engine_of
from nsa_harness.commands.verify import failed_attempts
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.evidence.host import Process
from nsa_harness.core.experiment.diagnostic_rerun import recording_change
from nsa_harness.core.experiment.trial import FAILED_STATUSES, Trial, make_trial
from nsa_harness.core.experiment.why import (
    HAS_ORIGIN,
    MAX_EXPERIMENTS,
    SUCCESSES,
    FirstAnswer,
    Proof,
    RunResult,
    WhyReport,
    WhyResult,
    WhyRun,
    first_answer,
    is_budget_used,
    needs_recorded_run,
    result_of,
    run_result,
    silent_finding,
    with_decision,
)
from nsa_harness.core.plan import EngineChoice, RunSpec
from nsa_harness.core.recording.experiments import control_of, plan_experiments
from nsa_harness.core.recording.explanation import (
    Candidate,
    ExperimentKind,
    ExperimentResult,
    Explanation,
    PlannedExperiment,
)
from nsa_harness.core.recording.judgement import is_same_stop, judge_experiment
from nsa_harness.core.recording.patch import patch, place_to_change
from nsa_harness.core.recording.recording import RankRecording
from nsa_harness.core.recording.side_effects import side_effects
from nsa_harness.core.report import HangKind, Outcome, Status
from nsa_harness.errors import UsageError
from nsa_harness.render import answer
from nsa_harness.render.experiments import why as shown
from nsa_harness.render.experiments.why import WhyScreen
from nsa_harness.render.experiments.why_json import stored_why, why_json, why_values
from nsa_harness.supervisor.experiments.cache_key import (
    LAUNCH_ENTRY,
    Interpreter,
    LaunchedProgram,
    names_with_verb,
    query_interpreter_of,
    sealed_digest,
)
from nsa_harness.supervisor.experiments.journal import SearchDirectory, TrialJournal, open_search, search_state
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.explanations import program_texts, stored_explanation
from nsa_harness.supervisor.storage.record import load_spec, read_record
from nsa_harness.supervisor.storage.recordings import load_experiment_events, load_recordings
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions, find_run, refuse_if_running
from nsa_harness.supervisor.storage.sources import stored_sources, text_as_launched
from nsa_harness.texts import why as texts
from nsa_harness.texts import words

_EXIT = {**dict.fromkeys((*HAS_ORIGIN, WhyResult.FIRST_LINE), 0), WhyResult.NOT_EXPLAINED: 1}  # otherwise 125
_PROOFS = {
    ExperimentResult.FAILED: Proof.DROPPED,
    ExperimentResult.SECOND_CAUSE: Proof.SECOND_CAUSE,
    ExperimentResult.RACE: Proof.RACE,
    ExperimentResult.INCONCLUSIVE: Proof.OTHERWISE,
}
_OBSERVES = ("watch", "attach", "read")  # commands whose runs cannot be launched again
_OLDEST_PYTHON = (3, 11)
_SLOWER = 4  # a recorded run may take this many times as long before a time limit ends it
_MAX_EVIDENCE_BYTES = 256 << 20
_BUSY_S = 60.0  # the shortest default of limits.busy_s


@dataclass(frozen=True, kw_only=True)
class WhyRequest:
    """The failed run to explain, and the options of the command."""

    run_path: Path | None  # a run, or one attempt of it; None: the latest run
    options: RunOptions
    python: str | None = None  # the interpreter for the program; None: the one that the failed run used
    values: bool = True
    experiments: bool | None = None  # None: unless the program may change something outside its run
    repeat: int = 2  # recorded runs at most, until one fails as before
    max_runs: int | None = None  # of all runs, from --budget
    budget_s: float | None = None
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The failure to explain, and the launch that records it."""

    outcome: Outcome
    spec: RunSpec
    program: LaunchedProgram
    report: WhyReport  # without any run
    engine: EngineChoice | None  # ran the failed attempt, and runs all others


def run_why(request: WhyRequest) -> int:
    """Find out why the ranks of a failed run took different ways, and return the exit code.

    Raises UsageError if the run has no failure that its program could show again.
    """
    facts = machine_facts()
    question = _question(request)
    header = partial(shown.header_lines, question.report, python=request.python, usual_s=_usual_s(question))
    if request.dry_run:
        WhyScreen.print_lines(lambda width: [*header(width=width), "  launched nothing"])
        return 0
    if question.engine is not None:
        check_engine(question.engine)
    end_dead_runs()
    first, program = question.report.first, question.program
    state = search_state(
        f"why {question.report.scenario} of {first.run_id} failed", request.options.command,
        {
            **program.file_entries(),
            **program.environment_entries(),
            "nsa-harness": __version__,
            LAUNCH_ENTRY: sealed_digest(question.spec.spec_hash, question.spec.limits),
            "what is asked": sealed_digest(first.run_id, first.attempt, request.values),
        },
    )  # fmt: skip
    with open_search(
        request.options, state, program.file_entries, state_file=lambda run: run.why_state, noun="question"
    ) as folder:
        journal = TrialJournal(folder.run)
        configs = [question.spec]
        with experiment_in(
            folder.run, request.options, configs, facts, journal.stored, screen_type=WhyScreen, engine=question.engine
        ) as experiment:
            note = folder.note
            if folder.is_continued:
                note = f"continues {folder.run.path}: {words.plural(len(journal.stored), 'run')} already finished"
            report = replace(question.report, notes=(*question.report.notes, *([note] if note else [])))
            experiment.show(lambda width: shown.header_lines(report, width, request.python, _usual_s(question)))
            inquiry = _Inquiry(
                request=request, question=question, experiment=experiment, configs=configs, report=report,
                folder=folder, journal=journal,
            )  # fmt: skip
            return inquiry.carry_out()


def print_patch(request: WhyRequest) -> int:
    """Print the change of the experiment that proved an answer as a unified diff, and return the exit code.

    Nothing is applied. Raises UsageError if no experiment proved anything.
    """
    run = find_run(request.run_path, request.options.parent)
    report = stored_why(run)
    if report is None:
        raise UsageError(f"--patch {run.path}: this run has no answer of `why`; first: nsa-harness why {run.path}")
    proved = next((one for one in report.runs if one.proof in SUCCESSES), None)
    if proved is None or proved.place is None or proved.place.file is None:
        raise UsageError(f"--patch {run.path}: no experiment let the run go on, so there is no change to print")
    kind, candidates = ExperimentKind(proved.experiment), report.explanation.candidates if report.explanation else ()
    candidate = candidates[proved.candidate] if proved.candidate is not None and candidates else None
    place = proved.place
    diff = patch(kind, place, proved.name, candidate, text_as_launched(place.file or "", None), str(Path.cwd()))
    if diff is None:
        raise UsageError(
            f"--patch {run.path}: the change cannot be written as a patch of {place.file}, or the file was"
            f" edited; in the experiment, {proved.change}"
        )
    print(diff, end="")
    return 0


def _question(request: WhyRequest) -> _Question:
    """Return the failure to explain. Raise UsageError if it cannot be shown again."""
    run, path = _failed_run(request)
    with refuse_if_running(run):
        _refuse_observed(run)
        attempts = [outcome for outcome in judge_attempts(run) if outcome.spec.deepening is None]
        silent = [outcome for outcome in attempts if silent_finding(outcome) is not None]
        has_failed = any(outcome.verdict.status in FAILED_STATUSES for outcome in attempts)
        outcome = silent[-1] if silent and not has_failed else failed_attempts(run, path, attempts, "why")[-1]
        spec = load_spec(run.path / outcome.dir / "spec.json", run.directory)
        if spec.ranks < 2:
            raise UsageError(f"why {path}: this program has one rank; `why` compares ranks")
        directory = _working_dir(run, outcome, spec)
        engine = engine_of(run.attempt(outcome.spec.scenario, outcome.attempt))
    python = request.python or spec.python
    spec = _recorded_spec(replace(spec, cwd=str(directory), python=python), run.run_id, outcome, values=request.values)
    program = LaunchedProgram(specs=(spec,), interpreter=query_interpreter_of((spec,)), working_dir=directory)
    _refuse_old_python(program.interpreter, python)
    effects = side_effects(_texts(program), _processes(run.attempt(outcome.spec.scenario, outcome.attempt)))
    wanted = not effects if request.experiments is None else request.experiments
    alike = [one for one in attempts if one.spec.spec_hash == outcome.spec.spec_hash]
    passed = sum(one.verdict.status is Status.PASS and silent_finding(one) is None for one in alike)
    first = _first(run, outcome)
    makes_experiments = wanted and not (passed or first.stands or first.verdict is Status.PASS)
    max_runs = request.repeat + (MAX_EXPERIMENTS + 1 if makes_experiments else 0)
    notes = []
    if passed:
        notes.append(f"{passed} of {len(alike)} attempts of that run passed, so an experiment would prove nothing")
    if effects and first.verdict is not Status.PASS:
        notes.append(texts.effects_note(effects, experiments=wanted, is_asked=request.experiments is not None))
    return _Question(
        outcome=outcome, spec=spec, program=program, engine=engine,
        report=WhyReport(
            scenario=spec.scenario, first=first, directory=str(directory),
            max_runs=min(max_runs, request.max_runs or max_runs), budget_s=request.budget_s, values=request.values,
            experiments=makes_experiments, passed_before=passed, notes=tuple(notes),
        ),
    )  # fmt: skip


def _failed_run(request: WhyRequest) -> tuple[RunDir, Path]:
    """Return the run to explain, and the path that names its attempt. For a run of `why`, it is the run it explains."""
    run = find_run(request.run_path, request.options.parent)
    report = stored_why(run)
    if report is None:
        return run, request.run_path or run.path
    first = find_run(Path(report.first.path), run.path.parent)
    return first, first.path / report.first.attempt


def _refuse_observed(run: RunDir) -> None:
    command = read_record(run).command.split()
    observer = next((word for word in command[1:2] if word in _OBSERVES), None)
    if observer is not None:
        raise UsageError(
            f"why {run.path}: `nsa-harness {observer}` only observed this job, so it cannot be launched again; run the"
            " program with `nsa-harness run FILE.py --ranks N`, and ask for that run (a program that starts its ranks"
            " itself, as with mp.spawn, cannot be recorded: let torchrun start them)"
        )


def _working_dir(run: RunDir, outcome: Outcome, spec: RunSpec) -> Path:
    """Return the directory in which the program was launched. Raise UsageError if its file is not there any more."""
    here = Path(spec.cwd or ".").resolve()
    file = next((word for word in spec.program if word.endswith(".py")), None)
    if file is None or (here / file).is_file():
        return here
    for name in _program_files(run, outcome):
        if name.endswith(f"/{file}") and Path(name).is_file():
            return Path(name.removesuffix(f"/{file}"))
    raise UsageError(f"why {run.path}: no file {file} in {here}; give the command where the failed run was started")


def _program_files(run: RunDir, outcome: Outcome) -> list[str]:
    try:
        return [source.file for source in stored_sources(run.attempt(outcome.spec.scenario, outcome.attempt))]
    except (OSError, ValueError):
        return []


def _recorded_spec(spec: RunSpec, run_id: str, outcome: Outcome, *, values: bool) -> RunSpec:
    """Return the launch that records the program. Its time limits are longer, because recording is slow."""
    limits, may_wait = spec.limits, outcome.verdict.kind is not HangKind.LIVELOCK
    slower = replace(
        limits,
        deadline_s=None if limits.deadline_s is None else limits.deadline_s * _SLOWER,
        busy_s=(limits.busy_s or _BUSY_S) * _SLOWER if may_wait else limits.busy_s,
    )
    return _with_recording(replace(spec, limits=slower), f"{run_id} {outcome.dir}", values=values)


def _with_recording(spec: RunSpec, of: str, *, values: bool, experiment: PlannedExperiment | None = None) -> RunSpec:
    change = recording_change(values=values, experiment=dict(experiment.instruction) if experiment else None)
    env = {**dict(spec.env), **dict(change.env)}
    settings = dict(spec.settings) | {f"run.env.{name}": value for name, value in change.env}
    env |= dict(experiment.env) if experiment else {}
    new_hash = hashlib.sha256(f"{spec.spec_hash} why {of} {change.env}".encode()).hexdigest()[:12]
    note = f"experiment of why: {texts.change_text(experiment)}" if experiment else "recorded by why"
    note = f"control of the {note}" if experiment and experiment.instruction.get("control") else note
    return replace(
        spec, notes=(*spec.notes, note), env=tuple(sorted(env.items())), settings=tuple(sorted(settings.items())),
        spec_hash=new_hash,
    )  # fmt: skip


def _refuse_old_python(interpreter: Interpreter, python: str | None) -> None:
    """Raise UsageError if the program's interpreter is too old to record statements."""
    match = re.match(r"(\d+)\.(\d+)", interpreter.version)
    if match and (int(match[1]), int(match[2])) < _OLDEST_PYTHON:
        raise UsageError(
            f"why: {python or 'the interpreter of the program'} is Python {interpreter.version}; recording needs"
            " Python 3.11 or newer; name such an interpreter, with the same packages: --python PATH"
        )


def _texts(program: LaunchedProgram) -> Iterator[str]:
    for file in program.file_entries():
        if file.endswith(".py"):
            yield text_as_launched(str(program.working_dir / file), None)


def _processes(attempt: AttemptDir) -> Iterator[Process]:
    """Yield the processes of the ranks in the stored snapshots of an attempt. Files that cannot be read are skipped."""
    for file in attempt.directory.list_files(attempt.evidence, "*.json"):
        with suppress(OSError, ValueError):
            text = attempt.directory.read_whole_file(file, _MAX_EVIDENCE_BYTES)
            for snapshot in type_adapter(Evidence).validate_json(text).snapshots:
                yield from (one for rank in snapshot.ranks for one in (rank.process, *rank.children) if one)


def _first(run: RunDir, outcome: Outcome) -> FirstAnswer:
    return first_answer(outcome, run.run_id, str(run.path.resolve()), answer.advice(outcome))


def _usual_s(question: _Question) -> float | None:
    return question.outcome.timing.wall_s or None


@dataclass(kw_only=True)
class _Inquiry:
    """The runs that answer one question, and the answer so far."""

    request: WhyRequest
    question: _Question
    experiment: Experiment
    configs: list[RunSpec]  # the recorded launch, one launch per planned experiment, and one per control of these
    report: WhyReport
    folder: SearchDirectory
    journal: TrialJournal
    recordings: Sequence[RankRecording] = ()  # of the recorded run that failed as before
    planned: tuple[PlannedExperiment, ...] = ()

    def carry_out(self) -> int:
        """Launch runs until the question is answered, and return the exit code."""
        experiment = self.experiment
        outcomes = {outcome.dir: outcome for outcome in experiment.outcomes}
        for trial in self.journal.stored:
            self._add(trial, outcomes[trial.dir])
        self._write()
        for trial in experiment.trials_until(
            lambda: self._next() is None,
            next_config=lambda: self._next() or 0,
            judge=self._trial,
            progress=self._progress,
        ):
            self.journal.append(trial)
            self._add(trial, experiment.outcomes[-1])
            if len(self.report.runs) == 1:
                self.folder.ignore_program_outputs()
        return self._finish()

    def _next(self) -> int | None:
        """Return the index of the next launch in `configs`, or None if no further run is needed or allowed."""
        return None if is_budget_used(self.report) else self._wanted()

    def _wanted(self) -> int | None:
        """Return the index of the next launch in `configs`, or None if no further run is needed."""
        report = self.report
        tried = len(report.runs) - len(report.recorded_runs)
        if needs_recorded_run(report, self.request.repeat):
            return len(self.planned) + tried if report.runs and report.runs[-1].proof in SUCCESSES else 0
        if report.is_flaky or {run.proof for run in report.runs} & {*SUCCESSES}:
            return None
        if any(run.proof is Proof.SECOND_CAUSE for run in report.runs) and self._are_decisions(tried):
            return None  # the second cause lies behind the decision, too
        return tried + 1 if tried < len(self.planned) else None

    def _are_decisions(self, tried: int) -> bool:
        """Return whether the experiments from this number on test only the decision of the ranks."""
        return all(planned.is_of_decision for planned in self.planned[tried:])

    def _progress(self, config: int) -> str:
        number = f"run {len(self.report.runs) + 1} of at most {self.report.max_runs}"
        planned = self._experiment(config)
        return f"{number}: {texts.text_of_change(planned) if planned else 'control' if config else 'recorded'}"

    def _experiment(self, config: int) -> PlannedExperiment | None:
        """Return the experiment that a launch makes, or None if it changes nothing."""
        return self.planned[config - 1] if 0 < config <= len(self.planned) else None

    def _trial(self, outcome: Outcome, config: int) -> Trial:
        return make_trial(
            outcome, lambda again: run_result(self.question.outcome, again) is RunResult.SAME, config=config
        )

    def _add(self, trial: Trial, outcome: Outcome) -> None:
        """Add a finished run to the report, and show it."""
        run = WhyRun(
            dir=trial.dir, end=trial.end, result=run_result(self.question.outcome, outcome), wall_s=trial.wall_s
        )
        planned = self._experiment(trial.config)
        if planned is not None:
            run = self._experiment_run(run, planned, outcome)
        is_control = bool(self.report.runs) and self.report.runs[-1].proof in SUCCESSES
        self.report = replace(self.report, runs=(*self.report.runs, run))
        if planned is not None and planned.origin is not None and run.proof is Proof.ORIGIN:
            self._add_origin(planned.origin)
        if run.proof is Proof.DECISION and run.place is not None and self.report.explanation is not None:
            explanation = with_decision(self.report.explanation, run.place, run.name)
            self.report = replace(self.report, explanation=explanation)
        if is_control:
            self._check_control(outcome)
        elif planned is None and run.result in (RunResult.SAME, RunResult.OTHERWISE):
            self._explain(outcome)
        self.report = replace(self.report, result=result_of(self.report))
        self._write()
        self.experiment.show(partial(shown.run_lines, self.report))

    def _add_origin(self, origin: Candidate) -> None:
        """Add the candidate that the latest experiment proved to the explanation, or replace the one at its line."""
        *before, proved = self.report.runs
        if (explanation := self.report.explanation) is not None:
            places = [candidate.place for candidate in explanation.candidates]
            index = places.index(origin.place) if origin.place in places else len(places)
            candidates = (*explanation.candidates[:index], origin, *explanation.candidates[index + 1 :])
            self.report = replace(
                self.report,
                explanation=replace(explanation, candidates=candidates),
                runs=(*before, replace(proved, candidate=index)),
            )

    def _attempt(self, outcome: Outcome) -> AttemptDir:
        return self.experiment.session.run.attempt(outcome.spec.scenario, outcome.attempt)

    def _explanation(self, outcome: Outcome) -> Explanation | None:
        """Return the stored explanation of a run that failed, or that passed with a silent fault, or None."""
        if outcome.verdict.status is Status.PASS and silent_finding(outcome) is None:
            return None
        try:
            return stored_explanation(self._attempt(outcome))
        except (OSError, ValueError):
            return None

    def _check_control(self, outcome: Outcome) -> None:
        """Withdraw the proof of the latest experiment if the control run after it did not fail in the same way."""
        *before, tried, control = self.report.runs
        explanation, again = self.report.explanation, self._explanation(outcome)
        is_same = explanation is not None and again is not None and is_same_stop(explanation, again)
        if control.result is not RunResult.SAME and not is_same:
            self.report = replace(self.report, runs=(*before, replace(tried, proof=Proof.RACE), control))

    def _explain(self, outcome: Outcome) -> None:
        """Read the explanation of a recorded run, and plan its experiments."""
        attempt, explanation = self._attempt(outcome), self._explanation(outcome)
        if explanation is None:
            return
        self.report = report = replace(self.report, explanation=explanation)
        self.recordings, _ = load_recordings(attempt, self.question.spec.ranks)
        if report.experiments and not report.is_flaky:
            sources = program_texts(attempt, self.recordings)
            self.planned = plan_experiments(explanation, sources, self.recordings)[:MAX_EXPERIMENTS]
            of = f"{report.first.run_id} {report.first.attempt}"
            self.configs += [
                _with_recording(self.question.spec, of, values=report.values, experiment=planned)
                for planned in (*self.planned, *map(control_of, self.planned))
            ]

    def _experiment_run(self, run: WhyRun, planned: PlannedExperiment, outcome: Outcome) -> WhyRun:
        """Return the run of an experiment with what it proves."""
        explanation, attempt = self.report.explanation, self._attempt(outcome)
        candidate = explanation.candidates[planned.candidate] if explanation and explanation.candidates else None
        run = replace(
            run, experiment=planned.kind.value, change=texts.change_text(planned), candidate=planned.candidate,
            place=place_to_change(planned.kind, planned.place, candidate), name=planned.name,
        )  # fmt: skip
        if explanation is None or run.result is RunResult.UNJUDGED:
            return run
        recordings, _ = load_recordings(attempt, self.question.spec.ranks)
        judgement = judge_experiment(
            planned, explanation, self.recordings, recordings,
            events=load_experiment_events(attempt, self.question.spec.ranks),
            new_explanation=self._explanation(outcome), passed=run.result is RunResult.PASSED,
        )  # fmt: skip
        if judgement.result is ExperimentResult.WENT_ON:
            return replace(run, proof=Proof.ORIGIN if planned.proves_origin else Proof.DECISION)
        proof = _PROOFS.get(judgement.result, Proof.NONE)
        is_undone = planned.kind is ExperimentKind.UNDO_LEAK
        if (proof is Proof.DROPPED and (planned.is_of_decision or is_undone)) or (
            proof is Proof.OTHERWISE and is_undone
        ):
            proof = Proof.NONE  # no candidate is tested, or another call, or every rank's call, has the same effect
        reasons = sorted({reason for _, reason in judgement.refused if reason})
        reason = ", ".join(reasons) if judgement.result is ExperimentResult.NOT_MADE else ""
        return replace(run, proof=proof, next_place=judgement.next_place, reason=reason)

    def _write(self) -> None:
        run = self.experiment.session.run
        run.directory.write(run.why, run.redaction.json(why_json(self.report)))

    def _finish(self) -> int:
        session = self.experiment.session
        is_unfinished = session.interrupted or self._wanted() is not None
        self.report = replace(self.report, interrupted=session.interrupted)
        if edited := self.folder.changed_files():
            note = f"{names_with_verb(edited)} changed meanwhile: the runs did not all run the same program"
            self.report = replace(self.report, notes=(*self.report.notes, note))
        self._write()
        session.write_documents(self.experiment.outcomes, plan=self.configs)
        code = INTERRUPTED if session.interrupted else _EXIT.get(self.report.result, 125)
        done = {"event": "done", "scenario": self.report.scenario, "why": why_values(self.report)}
        session.stream({**done, "exit_code": code, "run_dir": str(session.run.path)})
        self.folder.write(ended=not is_unfinished)
        self.experiment.show(lambda width: ["", *shown.answer_lines(self.report, session.run.path, width)])
        return code
