"""Test the claim that a change helps, by launching a program with and without the change.

`core/experiment/claim.py` decides when the counts of failures are conclusive.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from nsa_harness.commands.experiment import Experiment, ledger_side, open_experiment, utc_now
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
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.errors import MissingNeed
from nsa_harness.render.experiments import claim as shown
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.subject.computed import computed_numbers, decides_only_how, tolerance
from nsa_harness.subject.files import is_launched_by
from nsa_harness.supervisor.experiments.cache_key import (
    LaunchedProgram,
    changed_entries,
    mark_outputs,
    names_with_verb,
    query_interpreter_of,
)
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commit_of
from nsa_harness.supervisor.launch.launcher import command_line, end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.launch.sides import COMMIT, LaunchSides, plan_sides
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


def run_claim(request: ClaimRequest) -> int:
    """Test a claim, write the output files, and return the exit code.

    Raises UsageError if the two sides do not differ in exactly one key, commit or argument.
    """
    facts = machine_facts()
    with ExitStack() as stack:
        try:
            sides = _sides(request, facts, stack)
        except MissingNeed as error:
            _record_untested(request, facts, str(error))
            raise
        claim = _claim(request, sides)
        end_dead_runs()
        with open_experiment(request.options, (sides.first.spec, sides.second.spec), facts) as experiment:
            return _test(experiment, request, sides, claim)


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


def _sides(request: ClaimRequest, facts: MachineFacts, stack: ExitStack | None) -> LaunchSides:
    """Return the two launches, with and without the change, that a claim compares.

    `stack` removes the worktrees of two commits when it is closed. If it is None, no commit is checked out.
    """
    question, commits = request.question, request.commits
    if commits is None:
        return plan_sides(question, facts, arg=request.arg)
    shas = (commit_of(question.working_dir, commits[0])[:12], commit_of(question.working_dir, commits[1])[:12])
    if stack is None:
        return plan_sides(question, facts, commits=shas, arg=request.arg)
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsa-harness-claim-")))
    trees = stack.enter_context(closing(Worktrees(repository=question.working_dir, home=home)))
    return plan_sides(question, facts, commits=shas, arg=request.arg, tree_of=trees.checkout)


def draw_order_seed() -> int:
    """Return a new random seed for the order of the runs within each pair."""
    return SystemRandom().getrandbits(32)


def _claim(request: ClaimRequest, sides: LaunchSides) -> ClaimReport:
    earlier = earlier_results(request.options.parent, {sides.first.spec.spec_hash})
    must_reach_confidence = request.confidence_requested or any(run.verdict in FAILED_STATUSES for run in earlier)
    specs = (sides.first.spec, sides.second.spec)
    terms = ClaimTerms(
        confidence=request.confidence,
        max_pairs=request.most_pairs,
        controls=control_runs(request.confidence, insistent=must_reach_confidence),
        must_compute_same=all(map(is_launched_by, specs)) and decides_only_how(sides.key),
        tolerance=max(map(tolerance, specs)),
        order_seed=draw_order_seed(),
    )
    return ClaimReport(
        text=request.text or f"{sides.second.label} helps", scenario=sides.scenario, key=sides.key,
        labels=(sides.first.label, sides.second.label), terms=terms, budget_s=request.budget_s,
        notes=(*sides.notes, *dict.fromkeys(note for spec in specs for note in spec.notes)),
    )  # fmt: skip


def planned_claim(request: ClaimRequest) -> LaunchSides:
    """Return the two launches that a claim compares, without a checkout of any commit, for --dry-run."""
    return _sides(request, machine_facts(), None)


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


def _test(experiment: Experiment, request: ClaimRequest, sides: LaunchSides, claim: ClaimReport) -> int:
    """Run trials until the claim is decided, report the conclusion, and return the exit code."""
    experiment.show(lambda width: shown.header_lines(claim, width))
    files = _Files(sides, request.question.working_dir)
    test = SequentialTest(terms=claim.terms)

    def so_far() -> ClaimReport:
        return replace(claim, trials=tuple(test.trials))

    for trial in experiment.trials_until(
        lambda: _end(experiment, request, test) is not None,
        next_config=lambda: test.next_side,
        judge=lambda outcome, side: _trial(experiment, outcome, side),
        progress=lambda side: shown.progress_text(so_far(), side),
    ):
        test.add_trial(trial)
        files.learn_written(test)
        experiment.show(partial(shown.trial_lines, so_far()))
    conclusion = _end(experiment, request, test)
    assert conclusion is not None
    if edited_files := files.edited_files():
        reason = f"{names_with_verb(edited_files)} changed during the test: the runs did not all run the same program"
        conclusion = Conclusion(result=ClaimResult.NOT_COMPARABLE, why=reason)
    report = replace(so_far(), conclusion=conclusion)
    code, ledger = experiment.finish(_line(experiment, sides, report), EXIT[conclusion.result])
    experiment.show(lambda width: ["", *shown.answer_lines(report, experiment.session.run.path, ledger, width)])
    return code


def _end(experiment: Experiment, request: ClaimRequest, test: SequentialTest) -> Conclusion | None:
    if conclusion := test.conclusion():
        if conclusion.is_by_deadline:
            return replace(conclusion, why=shown.deadline_text([test.count(FIRST), test.count(SECOND)]))
        return conclusion
    counts = f"{test.count(FIRST)} runs failed without the change, {test.count(SECOND)} with it"
    if experiment.session.interrupted:
        reason = f"interrupted; {counts}; the same command starts from the beginning"
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


class _Files:
    """A monitor that finds out which of the program's files were edited during a test."""

    def __init__(self, sides: LaunchSides, working_dir: Path) -> None:
        specs = () if sides.key == COMMIT else (sides.first.spec, sides.second.spec)
        self._program = LaunchedProgram(specs=specs, interpreter=query_interpreter_of(specs), working_dir=working_dir)
        self._before = self._program.file_entries()

    def learn_written(self, test: SequentialTest) -> None:
        """Ignore the files that the program itself writes during the first trial of each side."""
        if len(test.trials) <= 2:
            self._before = mark_outputs(self._before, self._program.file_entries())

    def edited_files(self) -> tuple[str, ...]:
        return changed_entries(self._before, self._program.file_entries())


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
