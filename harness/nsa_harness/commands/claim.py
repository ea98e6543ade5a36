"""Test a claim: launch both sides alternately until their counts decide it.

The decision itself is pure (`core/experiment/claim.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsa_harness.commands.experiment import Experiment, ledger_side, open_experiment
from nsa_harness.core.experiment.claim import (
    FIRST,
    SECOND,
    ClaimReport,
    Conclusion,
    Result,
    SequentialTest,
    Terms,
    difference_text,
    fixed,
)
from nsa_harness.core.experiment.statistics import controls
from nsa_harness.core.experiment.trial import BAD_ENDS, Number, Trial, trial_of
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.render.experiments import claim as shown
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.subject.computed import computed, decides_only_how, tolerance
from nsa_harness.subject.files import is_launched_by
from nsa_harness.supervisor.experiments.cache_key import Program, changed, interpreter_of, names_text, without_written
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commit_of
from nsa_harness.supervisor.launch.launcher import command_line, sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.launch.sides import COMMIT, Sides, sides_of
from nsa_harness.supervisor.storage.adapters import plain
from nsa_harness.supervisor.storage.collect import seconds_a_step
from nsa_harness.supervisor.storage.ledger import NAME, LedgerLine, read_ledger
from nsa_harness.supervisor.storage.metrics import table
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import RunOptions, ended_before
from nsa_harness.texts import words

EXIT = {Result.SUPPORTED: 0, Result.REFUTED: 1, Result.UNDECIDED: 125, Result.NOT_COMPARABLE: 2}


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    question: Invocation
    options: RunOptions
    commits: tuple[str, str] | None
    arg: tuple[str, str] | None  # words of the program, of each side
    text: str | None  # what is claimed; None: made of the sides
    confidence: float
    insistent: bool  # a confidence was asked for
    most_pairs: int
    budget_s: float | None  # for all launches together


def run_claim(request: ClaimRequest) -> int:
    """Test it, write the documents, file it; returns the exit code. Raises UsageError for sides without a contrast."""
    facts = machine_facts()
    with ExitStack() as stack:
        sides = _sides(request, facts, stack)
        claim = _claim(request, sides)
        sweep_dead_runs()
        with open_experiment(request.options, (sides.first.spec, sides.second.spec), facts) as experiment:
            return _test(experiment, request, sides, claim)


def _sides(request: ClaimRequest, facts: MachineFacts, stack: ExitStack | None) -> Sides:
    """Return both sides. `stack`: holds the checkouts of two commits during the launches; None: nothing is launched."""
    question, commits = request.question, request.commits
    if commits is None:
        return sides_of(question, facts, arg=request.arg)
    shas = (commit_of(question.working_dir, commits[0])[:12], commit_of(question.working_dir, commits[1])[:12])
    if stack is None:
        return sides_of(question, facts, commits=shas, arg=request.arg)
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsa-harness-claim-")))
    trees = stack.enter_context(closing(Worktrees(repository=question.working_dir, home=home)))
    return sides_of(question, facts, commits=shas, arg=request.arg, tree_of=trees.of)


def _claim(request: ClaimRequest, sides: Sides) -> ClaimReport:
    earlier = ended_before(request.options.parent, {sides.first.spec.spec_hash})
    insistent = request.insistent or any(run.verdict in BAD_ENDS for run in earlier)
    specs = (sides.first.spec, sides.second.spec)
    terms = Terms(
        confidence=request.confidence,
        most_pairs=request.most_pairs,
        controls=controls(request.confidence, insistent=insistent),
        computes_the_same=all(map(is_launched_by, specs)) and decides_only_how(sides.key),
        tolerance=max(map(tolerance, specs)),
    )
    return ClaimReport(
        text=request.text or f"{sides.second.label} helps", scenario=sides.scenario, key=sides.key,
        labels=(sides.first.label, sides.second.label), terms=terms, budget_s=request.budget_s,
        notes=(*sides.notes, *dict.fromkeys(note for spec in specs for note in spec.notes)),
    )  # fmt: skip


def planned_claim(request: ClaimRequest) -> Sides:
    """Return both sides for --dry-run, without launching anything or checking out a commit."""
    return _sides(request, machine_facts(), None)


def show_plan(request: ClaimRequest, sides: Sides) -> None:
    """Print both sides, their commands, and the least and the most time that the test takes."""
    claim, specs = _claim(request, sides), (sides.first.spec, sides.second.spec)
    walls_s = [[run.wall_s for run in ended_before(request.options.parent, {spec.spec_hash})] for spec in specs]
    known = [sum(side_s) / len(side_s) for side_s in walls_s if side_s]
    pair_s = 2 * sum(known) / len(known) if known else None
    redaction = Redaction(on=request.options.redact)
    commands = [redaction.command(command_line(spec, sys.executable, None), spec.env) for spec in specs]
    TrialScreen.print_lines(lambda width: shown.plan_lines(claim, commands, pair_s, width))


def show_ledger(parent: Path, *, as_json: bool) -> int:
    """Print the ledger: a table to paste, or one JSON line per claim."""
    ledger = read_ledger(parent)
    for line in map(json.dumps, map(plain, ledger.lines)) if as_json else shown.ledger_lines(ledger.lines):
        print(line)
    if ledger.unread:
        print(f"note: {words.plural(ledger.unread, 'line')} of {parent / NAME} could not be read", file=sys.stderr)
    return 0


def _test(experiment: Experiment, request: ClaimRequest, sides: Sides, claim: ClaimReport) -> int:
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
        test.learn(trial)
        files.learn_written(test)
        experiment.show_line(partial(shown.trial_line, so_far()))
    conclusion = _end(experiment, request, test)
    assert conclusion is not None
    if other := files.edited():
        why = f"{names_text(other)} changed while it was tested: the runs are not all of the same program"
        conclusion = Conclusion(result=Result.NOT_COMPARABLE, why=why)
    report = replace(so_far(), conclusion=conclusion)
    code, ledger = experiment.finish(_line(experiment, sides, report), EXIT[conclusion.result])
    experiment.show(lambda width: ["", *shown.answer_lines(report, experiment.session.run.path, ledger, width)])
    return code


def _end(experiment: Experiment, request: ClaimRequest, test: SequentialTest) -> Conclusion | None:
    """Return why the test ends; None: the next trial is launched."""
    if conclusion := test.conclusion():
        return conclusion
    counted = f"{test.count(FIRST)} without it and {test.count(SECOND)} with it"
    if experiment.session.interrupted:
        why = f"interrupted at {counted}; the same command starts anew"
    elif request.budget_s is not None and sum(trial.wall_s for trial in test.trials) >= request.budget_s:
        why = f"the budget of {words.seconds(request.budget_s)} is spent: {counted}"
    else:
        return None
    return Conclusion(result=Result.UNDECIDED, why=why)


def _trial(experiment: Experiment, outcome: Outcome, side: int) -> Trial:
    """Judge a trial. For a claim any failure is bad: a change that turns a hang into a crash does not help."""
    spec, attempt = experiment.configs[side], experiment.session.run.attempt(outcome.spec.scenario, outcome.attempt)
    numbers: tuple[Number, ...] = ()
    if is_launched_by(spec):
        numbers = computed(lambda name: table(attempt.door, attempt.path / name, lambda *_: None))
    step_s = seconds_a_step(attempt, spec.ranks)
    return trial_of(outcome, lambda _: True, config=side, step_s=step_s, computed=numbers)


class _Files:
    """The program's own files, to notice an edit during the test. For two commits there are none to watch."""

    def __init__(self, sides: Sides, working_dir: Path) -> None:
        specs = () if sides.key == COMMIT else (sides.first.spec, sides.second.spec)
        self._program = Program(specs=specs, interpreter=interpreter_of(specs), working_dir=working_dir)
        self._before = self._program.files()

    def learn_written(self, test: SequentialTest) -> None:
        """Ignore files that change during the first trial of each side: the program writes them itself."""
        if len(test.trials) <= 2:
            self._before = without_written(self._before, self._program.files())

    def edited(self) -> tuple[str, ...]:
        return changed(self._before, self._program.files())


def _line(experiment: Experiment, sides: Sides, report: ClaimReport) -> LedgerLine:
    assert report.conclusion is not None
    confidence, seen = report.terms.confidence, report.agreement
    kept = fixed(*report.counts, confidence)
    both = zip((sides.first, sides.second), report.counts, strict=True)
    return experiment.ledger_line(
        replace(sides.first.spec, cwd=None),
        kind="claim", text=report.text, result=report.conclusion.result.value, why=report.conclusion.why,
        fixed=kept and kept.value, scenario=report.scenario, key=report.key, confidence=confidence,
        computes="not known" if seen.alike is None else "the same" if seen.alike else difference_text(seen),
        sides=tuple(
            ledger_side(side.label, side.spec.spec_hash, counted.bad, counted.of, confidence, counted.ends)
            for side, counted in both
        ),
        seconds=round(report.took_s, 1),
    )  # fmt: skip
