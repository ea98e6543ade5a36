"""Reports for a bisection: the plan, the output files at the end, and a stored bisection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.session import Session
from nsa_harness.core.experiment.trial import FAILED_STATUSES, Signature
from nsa_harness.core.outcome.reproduction import NAME, repro_command, repro_script
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import HangKind, MachineFacts, Outcome, Status
from nsa_harness.core.search.effort import EffortCase, possible_cases, worst_case_stages
from nsa_harness.core.search.question import CONTROLS, PROOFS, AnswerKind, ProbeResult, SearchAnswer, Subset, spans_of
from nsa_harness.core.search.report import BisectReport, Commands, ProbeReport, floor_probes
from nsa_harness.core.search.subject import SubjectForm
from nsa_harness.errors import HarnessError
from nsa_harness.render.experiments.bisect_json import stored_search
from nsa_harness.render.experiments.screen import BisectScreen, CaseTime, PlannedControl, plan_lines, stored_lines
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    EarlierRuns,
    Launches,
    find_earlier_runs,
    search_question,
)
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.storage.rundir import RunDir, find_run
from nsa_harness.texts import words
from nsa_harness.texts.words import launch_line

ANSWERED, UNDECIDED = 0, 125  # exit codes
_BY_LIMIT = (HangKind.STARVED, HangKind.LIVELOCK)  # kinds of HANG that are proven only when a time limit passes
NOTHING_YET = SearchAnswer(kind=AnswerKind.UNDECIDED, confidence=0.0)


@dataclass(kw_only=True)
class SearchProgress:
    """A requested bisection, and its results so far."""

    request: BisectRequest
    run: RunDir | None = None  # None with --dry-run: nothing is written
    launches: Launches
    facts: MachineFacts
    probes: list[ProbeReport] = field(default_factory=list)
    signature: Signature | None = None
    earlier: EarlierRuns = field(default_factory=EarlierRuns)
    notes: list[str] = field(default_factory=list)


def report_so_far(
    state: SearchProgress, answer: SearchAnswer = NOTHING_YET, *, alone: str | None = None, cut_short: bool = False
) -> BisectReport:
    """Return the report of a bisection so far. `alone`: the command that runs repro.py. `cut_short`: interrupted."""
    spec = _any_spec(state.launches)
    return BisectReport(
        run_id=state.run.run_id if state.run else "",
        harness=__version__,
        machine=state.facts,
        command=state.request.options.command,
        scenario=spec.scenario if spec else state.request.subject.key,
        what=launch_line(spec.ranks, spec.backend, spec.subject) if spec else "",
        subject=state.request.subject,
        signature=state.signature,
        answer=answer,
        probes=tuple(state.probes),
        commands=_commands(state, answer, alone),
        floor_probes=floor_probes(answer, len(state.request.subject.items)),
        search_probes=sum(probe.purpose not in (*PROOFS, *CONTROLS) for probe in state.probes),
        wall_s=sum(probe.wall_s for probe in state.probes),
        interrupted=cut_short,
        notes=(*(spec.notes if spec else ()), *state.notes),
        not_covered=spec.not_covered if spec else (),
    )


def write_answer(
    state: SearchProgress,
    session: Session,
    answer: SearchAnswer,
    outcomes: Mapping[str, Outcome],
    specs: Sequence[RunSpec],
    *,
    cut_short: bool,
) -> BisectReport:
    """Write all output files for the bisection, and return its report. Earlier sessions' runs are judged again."""
    run = session.run
    search = report_so_far(state, answer, alone=_write_repro(state, run, answer), cut_short=cut_short)
    search = run.redaction.value(replace(search, command=run.redaction.command_text(search.command)))
    dirs = [probe.dir for probe in search.probes if probe.dir]
    all_outcomes = {**judge_again(run, [name for name in dirs if name not in outcomes]), **outcomes}
    session.write_documents(
        [all_outcomes[name] for name in dirs if name in all_outcomes],
        plan=specs,
        search=search,
        was_interrupted=cut_short,
    )
    return search


def _any_spec(launches: Launches) -> RunSpec | None:
    good, bad = launches.ends()
    in_order = (good, bad) if launches.subject.open_end else (bad, good)
    return next((spec for spec in in_order if isinstance(spec, RunSpec)), None)


def _commands(state: SearchProgress, answer: SearchAnswer, alone: str | None) -> Commands:
    """Return the commands that reproduce the bisection's answer: `alone`, and those that a run has confirmed."""

    def command(subset: Subset | None, counts: ProbeResult) -> str | None:
        if subset is None or not shown_in_full(state.probes, subset, counts):
            return None
        last = _last_in_full(state.probes, subset)
        spec_file = state.run.attempt(last.dir).spec if state.run and last and last.dir else None
        return state.launches.command(subset, spec_file, starved=last is not None and last.kind in _BY_LIMIT)

    bad, good = command(answer.failing, ProbeResult.BAD), command(answer.passing, ProbeResult.GOOD)
    return Commands(bad=bad, good=good, alone=alone)


def shown_in_full(probes: Sequence[ProbeReport], subset: Subset, counts: ProbeResult) -> bool:
    """Return whether the last test run of `subset` under torchrun had the result `counts`."""
    last = _last_in_full(probes, subset)
    return last is not None and last.counts_as is counts


def _last_in_full(probes: Sequence[ProbeReport], subset: Subset) -> ProbeReport | None:
    spans = spans_of(subset)
    return next((probe for probe in reversed(probes) if probe.subset == spans and probe.in_full), None)


def _write_repro(state: SearchProgress, run: RunDir, answer: SearchAnswer) -> str | None:
    """Write a script that reproduces the failure. Return the command that runs it, or None if there is no script."""
    if answer.failing is None or state.request.subject.form is SubjectForm.COMMIT:
        return None
    spec = state.launches.spec_or_reason(answer.failing)
    if isinstance(spec, str):
        return None
    about = run.redaction.text(f"{state.request.subject.describe(answer.failing)}: {state.signature}")
    script = repro_script(run.redaction.spec(spec), working_dir=os.getcwd(), about=about)
    if script is None:
        return None
    run.directory.make_directory(run.repro)
    run.directory.write(run.repro / NAME, script)
    return f"cd {run.repro} && {repro_command(spec)}"


def judge_again(run: RunDir, dirs: Sequence[str]) -> dict[str, Outcome]:
    """Judge stored test runs again, and map each directory name to the resulting outcome."""
    from nsa_harness.commands.judge import judge_stored

    outcomes = {}
    for name in dirs:
        with suppress(HarnessError):
            outcomes[name] = judge_stored(run.attempt(name))
    return outcomes


def show_plan(request: BisectRequest) -> int:
    """Print what a bisection would launch and how long it could take, for --dry-run."""
    facts, subject = machine_facts(), request.subject
    launches = Launches(request=request, facts=facts)
    earlier = find_earlier_runs(launches, request.options.parent)
    state = SearchProgress(request=request, launches=launches, facts=facts, earlier=earlier, notes=[*earlier.notes])
    question, all_items = search_question(request, earlier), range(len(subject.items))
    ends: list[tuple[str, Sequence[int]]] = [("good", ()), ("up to" if subject.open_end else "bad", all_items)]
    if subject.form is SubjectForm.CHOICE:
        ends = [("" if index else "each", (index,)) for index in all_items]
    controls = [_control(launches, name, subset) for name, subset in ends]
    expected_cases = [
        CaseTime(case=case, takes_s=_takes_s(case, earlier, request.jobs)) for case in possible_cases(question)
    ]
    time_source = _time_source(earlier)
    report, stages = report_so_far(state), worst_case_stages(question)
    BisectScreen.print_lines(lambda width: plan_lines(report, stages, expected_cases, controls, width, time_source))
    return ANSWERED


def _control(launches: Launches, name: str, subset: Sequence[int]) -> PlannedControl:
    """Return a run with the known-good or known-bad configuration, in the form that --dry-run shows."""
    config, spec = launches.subject.describe(subset), launches.spec_or_reason(subset)
    if isinstance(spec, str):
        return PlannedControl(name=name, config=config, command=None, reason=spec)
    return PlannedControl(name=name, config=config, command=launches.command(subset, None) or f"{config}, as stored")


def _takes_s(case: EffortCase, earlier: EarlierRuns, jobs: int) -> float | None:
    passing = earlier.run_s((Status.PASS,)) or earlier.run_s()
    failing = earlier.run_s(FAILED_STATUSES) or passing
    if passing is None or failing is None:
        return None
    return case.probes * ((1 - case.failing_share) * passing + case.failing_share * failing) / jobs


def _time_source(earlier: EarlierRuns) -> str:
    """Return a phrase that says how long the stored runs took, or "" if that is unknown."""
    means = [
        (word, earlier.run_s(verdicts)) for word, verdicts in (("passes", (Status.PASS,)), ("fails", FAILED_STATUSES))
    ]
    took = " and ".join(f"{words.seconds(mean_s)} if it {word}" for word, mean_s in means if mean_s is not None)
    runs = sum(run.verdict in (Status.PASS, *FAILED_STATUSES) for run in (*earlier.good, *earlier.bad))
    return f"a run takes {took}, according to {words.plural(runs, 'stored run')}" if took else ""


def show_stored(path: Path, out: Path | None) -> int:
    """Print a stored bisection again and return its exit code. Raise StoredRunError if it cannot be read."""
    run = find_run(path, out or Path("reports"))
    search = stored_search(run)
    BisectScreen.print_lines(lambda width: stored_lines(search, run.path, width))
    return UNDECIDED if search.answer.kind is AnswerKind.UNDECIDED else ANSWERED
