"""Test the claim that a change helps, by launching a program with and without the change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from nsa_harness import __version__
from nsa_harness.commands.engine_job import check_nodes
from nsa_harness.commands.experiment import Experiment, experiment_in, ledger_side, utc_now
from nsa_harness.core.experiment.claim import (
    FIRST,
    SECOND,
    ClaimReport,
    ClaimResult,
    ClaimTerms,
    Conclusion,
    SequentialTest,
    difference_text,
    fix_status,
)
from nsa_harness.core.experiment.statistics import control_runs
from nsa_harness.core.experiment.trial import FAILED_STATUSES, ComputedNumber, Trial, make_trial
from nsa_harness.core.plan import EngineChoice
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.errors import MissingNeed
from nsa_harness.render.experiments import claim as shown
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.subject.computed import computed_numbers, decides_only_how, tolerance
from nsa_harness.subject.files import is_launched_by
from nsa_harness.supervisor.experiments.cache_key import (
    LAUNCH_ENTRY,
    CacheKey,
    LaunchedProgram,
    names_with_verb,
    query_interpreter_of,
    sealed_digest,
)
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commit_of
from nsa_harness.supervisor.experiments.journal import SearchDirectory, TrialJournal, open_search, search_state
from nsa_harness.supervisor.launch.launcher import command_line, end_dead_runs
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.launch.sides import COMMIT, LaunchSides, TreeOf, plan_sides
from nsa_harness.supervisor.storage.adapters import json_object
from nsa_harness.supervisor.storage.collect import step_time_s
from nsa_harness.supervisor.storage.ledger import NAME, LedgerLine, add_line, read_ledger
from nsa_harness.supervisor.storage.metrics import read_table
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import RunOptions, earlier_results
from nsa_harness.texts import words

EXIT = {ClaimResult.SUPPORTED: 0, ClaimResult.REFUTED: 1, ClaimResult.UNDECIDED: 125, ClaimResult.NOT_COMPARABLE: 2}


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    """A claim to test, and the options for the test."""

    question: Invocation
    options: RunOptions
    commits: tuple[str, str] | None
    arg: tuple[str, str] | None  # the program argument of each side
    text: str | None  # the claim in words; None: made from the names of the sides
    confidence: float
    confidence_requested: bool  # --confidence was given, so more controls are run
    most_pairs: int  # at most this many runs per side
    budget_s: float | None  # for all launches together
    facts: MachineFacts  # of this machine, with the GPUs of the engine
    engine: EngineChoice | None  # runs each launch as a job; None: this machine runs it


def run_claim(request: ClaimRequest) -> int:
    """Test a claim, write the output files, and return the exit code. Raise UsageError if the sides do not fit."""
    facts = request.facts
    try:
        planned = planned_claim(request)
    except MissingNeed as error:
        _record_untested(request, facts, str(error))
        raise
    if request.engine is not None:
        check_nodes(planned.first.spec, request.engine)
        check_nodes(planned.second.spec, request.engine)
    program = _program(request, planned)
    state = search_state(
        f"claim about {planned.scenario}", request.options.command, _cache_key(request, planned, program),
        order_seed=draw_order_seed(),
    )  # fmt: skip
    end_dead_runs()
    with (
        open_search(
            request.options, state, program.file_entries, state_file=lambda run: run.claim_state, noun="claim"
        ) as folder,
        _sides_in(folder, request, facts, planned) as sides,
    ):
        journal, specs = TrialJournal(folder.run), (sides.first.spec, sides.second.spec)
        with experiment_in(
            folder.run, request.options, specs, facts, journal.stored, engine=request.engine
        ) as experiment:
            claim = _claim(request, sides, folder)
            if folder.is_continued:
                runs = words.plural(len(journal.stored), "run")
                claim = replace(claim, notes=(*claim.notes, f"continues {folder.run.path}: {runs} already finished"))
            elif folder.note:
                claim = replace(claim, notes=(*claim.notes, folder.note))
            return _test(experiment, request, sides, claim, folder, journal)


def _program(request: ClaimRequest, sides: LaunchSides) -> LaunchedProgram:
    """Return the program that a claim launches. A claim about two commits does not depend on the user's files."""
    specs = () if sides.key == COMMIT else (sides.first.spec, sides.second.spec)
    working_dir = request.question.working_dir
    return LaunchedProgram(specs=specs, interpreter=query_interpreter_of(specs), working_dir=working_dir)


def _cache_key(request: ClaimRequest, sides: LaunchSides, program: LaunchedProgram) -> CacheKey:
    """Return everything that must be unchanged for an interrupted claim to continue."""
    specs, question = (sides.first.spec, sides.second.spec), request.question
    launches = replace(program, specs=specs)
    return {
        **program.file_entries(),
        **launches.environment_entries(),
        "nsa-harness": __version__,
        LAUNCH_ENTRY: sealed_digest(*((spec.spec_hash, spec.expect, spec.limits) for spec in specs)),
        "what is claimed": sealed_digest(
            question.arguments, question.script, question.working_dir, request.arg, request.text, request.confidence,
            request.confidence_requested, request.most_pairs, request.options.probe, request.engine,
        ),
    }  # fmt: skip


@contextmanager
def _sides_in(
    folder: SearchDirectory, request: ClaimRequest, facts: MachineFacts, planned: LaunchSides
) -> Iterator[LaunchSides]:
    """Yield the two launches to run. Two commits are checked out in the run directory until the context ends."""
    if request.commits is None:
        yield planned
        return
    home = folder.run.worktrees.resolve()
    with closing(Worktrees(repository=request.question.working_dir, home=home)) as trees:
        yield _sides(request, facts, trees.checkout)


def _record_untested(request: ClaimRequest, facts: MachineFacts, reason: str) -> None:
    """Add the claim to the ledger as not tested here, because one of its sides cannot be launched."""
    options, redaction = request.options, Redaction(is_on=request.options.redact)
    line = LedgerLine(
        kind="claim", at=utc_now(), text=request.text or " ".join(request.question.arguments),
        result=ClaimResult.NOT_COMPARABLE.value, why=f"not tested here: {reason}", fixed=None, computes="not known",
        scenario="", key="", sides=(), confidence=request.confidence, attempts=0, seconds=0.0, runs=(), commit=None,
        dirty=None, machine=facts.host, command=redaction.command_text(options.command),
    )  # fmt: skip
    options.parent.mkdir(parents=True, exist_ok=True)
    add_line(options.parent, line, redaction)


def _sides(request: ClaimRequest, facts: MachineFacts, tree_of: TreeOf | None) -> LaunchSides:
    """Return the two launches that a claim compares. `tree_of`, if any, checks out a commit."""
    question, commits = request.question, request.commits
    if commits is None:
        return plan_sides(question, facts, arg=request.arg)
    shas = (commit_of(question.working_dir, commits[0])[:12], commit_of(question.working_dir, commits[1])[:12])
    return plan_sides(question, facts, commits=shas, arg=request.arg, tree_of=tree_of)


def draw_order_seed() -> int:
    """Return a new random seed for the order of the runs within each pair."""
    return SystemRandom().getrandbits(32)


def _claim(request: ClaimRequest, sides: LaunchSides, folder: SearchDirectory | None = None) -> ClaimReport:
    """Return the claim before its first run. `folder` is its run directory, or None if nothing is launched."""
    this_run = folder.run.run_id if folder else ""
    earlier = earlier_results(request.options.parent, {sides.first.spec.spec_hash}, excluded_run=this_run)
    must_reach_confidence = request.confidence_requested or any(run.verdict in FAILED_STATUSES for run in earlier)
    specs = (sides.first.spec, sides.second.spec)
    terms = ClaimTerms(
        confidence=request.confidence,
        max_pairs=request.most_pairs,
        controls=control_runs(request.confidence, insistent=must_reach_confidence),
        must_compute_same=all(map(is_launched_by, specs)) and decides_only_how(sides.key),
        tolerance=max(map(tolerance, specs)),
        order_seed=folder.state.order_seed if folder else draw_order_seed(),
    )
    return ClaimReport(
        text=request.text or f"{sides.second.label} helps", scenario=sides.scenario, key=sides.key,
        labels=(sides.first.label, sides.second.label), terms=terms, budget_s=request.budget_s,
        notes=(*sides.notes, *dict.fromkeys(note for spec in specs for note in spec.notes)),
    )  # fmt: skip


def planned_claim(request: ClaimRequest) -> LaunchSides:
    """Return the two launches that a claim compares, without a checkout of any commit."""
    return _sides(request, request.facts, None)


def show_plan(request: ClaimRequest, sides: LaunchSides) -> None:
    """Print the two launches that a claim compares, and the longest duration of the test."""
    claim, specs = _claim(request, sides), (sides.first.spec, sides.second.spec)
    walls_s = [[run.wall_s for run in earlier_results(request.options.parent, {spec.spec_hash})] for spec in specs]
    means_s = [sum(side_s) / len(side_s) for side_s in walls_s if side_s]
    pair_s = 2 * sum(means_s) / len(means_s) if means_s else None
    redaction = Redaction(is_on=request.options.redact)
    commands = [redaction.command(command_line(spec, sys.executable, None), spec.env) for spec in specs]
    TrialScreen.print_lines(lambda width: shown.plan_lines(claim, commands, pair_s, width))


def show_ledger(parent: Path, *, as_json: bool) -> int:
    """Print the ledger of earlier claims, as a table or as JSON lines, and return the exit code."""
    ledger = read_ledger(parent)
    for line in map(json.dumps, map(json_object, ledger.lines)) if as_json else shown.ledger_lines(ledger.lines):
        print(line)
    if ledger.unread_count:
        print(
            f"note: {words.plural(ledger.unread_count, 'line')} of {parent / NAME} could not be read", file=sys.stderr
        )
    return 0


def _test(
    experiment: Experiment, request: ClaimRequest, sides: LaunchSides, claim: ClaimReport, folder: SearchDirectory,
    journal: TrialJournal,
) -> int:  # fmt: skip
    """Run trials until the claim is decided, report the conclusion, and return the exit code."""
    experiment.show(lambda width: shown.header_lines(claim, width))
    test = SequentialTest(terms=claim.terms)

    def so_far() -> ClaimReport:
        return replace(claim, trials=tuple(test.trials))

    def add(trial: Trial) -> None:
        test.add_trial(trial)
        experiment.show(partial(shown.trial_lines, so_far()))

    for trial in journal.stored:
        add(trial)
    for trial in experiment.trials_until(
        lambda: _end(experiment, request, test) is not None,
        next_config=lambda: test.next_side,
        judge=lambda outcome, side: _trial(experiment, outcome, side),
        progress=lambda side: shown.progress_text(so_far(), side),
    ):
        journal.append(trial)
        add(trial)
        if len(test.trials) <= 2:  # the first run of each side
            folder.ignore_program_outputs()
    conclusion = _end(experiment, request, test)
    assert conclusion is not None
    # Without a conclusion of the test, the budget is used up or the user interrupted, and the claim can continue.
    is_unfinished = test.conclusion() is None
    if edited_files := folder.changed_files():
        reason = f"{names_with_verb(edited_files)} changed during the test: the runs did not all run the same program"
        conclusion = Conclusion(result=ClaimResult.NOT_COMPARABLE, why=reason)
    report = replace(so_far(), conclusion=conclusion)
    code, ledger = experiment.finish(_line(experiment, sides, report), EXIT[conclusion.result])
    folder.write(ended=not is_unfinished)
    experiment.show(lambda width: ["", *shown.answer_lines(report, experiment.session.run.path, ledger, width)])
    return code


def _end(experiment: Experiment, request: ClaimRequest, test: SequentialTest) -> Conclusion | None:
    if conclusion := test.conclusion():
        if conclusion.is_by_deadline:
            return replace(conclusion, why=shown.deadline_text([test.count(FIRST), test.count(SECOND)]))
        return conclusion
    counts = f"{test.count(FIRST)} runs failed without the change, {test.count(SECOND)} with it"
    if experiment.session.interrupted:
        reason = f"interrupted; {counts}; the same command continues the claim"
    elif request.budget_s is not None and sum(trial.wall_s for trial in test.trials) >= request.budget_s:
        reason = f"the budget of {words.seconds(request.budget_s)} is used up: {counts}"
    else:
        return None
    return Conclusion(result=ClaimResult.UNDECIDED, why=reason)


def _trial(experiment: Experiment, outcome: Outcome, side: int) -> Trial:
    """Return a trial with the result of one launch. A failure of any kind counts."""
    spec, attempt = experiment.configs[side], experiment.session.run.attempt(outcome.spec.scenario, outcome.attempt)
    numbers: tuple[ComputedNumber, ...] = ()
    if is_launched_by(spec):
        numbers = computed_numbers(lambda name: read_table(attempt.directory, attempt.path / name, lambda *_: None))
    step_s = step_time_s(attempt, spec.ranks)
    return make_trial(outcome, lambda _: True, config=side, step_s=step_s, numbers=numbers)


def _line(experiment: Experiment, sides: LaunchSides, report: ClaimReport) -> LedgerLine:
    assert report.conclusion is not None
    confidence, agreement = report.terms.confidence, report.number_comparison
    differences = (
        "not known" if agreement.is_same is None else "the same" if agreement.is_same else difference_text(agreement)
    )
    is_fixed = fix_status(*report.counts, confidence)
    both = zip((sides.first, sides.second), report.counts, strict=True)
    return experiment.ledger_line(
        replace(sides.first.spec, cwd=None),
        kind="claim", text=report.text, result=report.conclusion.result.value, why=report.conclusion.why,
        fixed=is_fixed and is_fixed.value, scenario=report.scenario, key=report.key, confidence=confidence,
        computes=differences,
        sides=tuple(
            ledger_side(side.label, side.spec.spec_hash, count.bad, count.judged, confidence, count.ends)
            for side, count in both
        ),
        seconds=round(report.took_s, 1), order_seed=report.terms.order_seed,
    )  # fmt: skip
