"""`run --verify`: repeat a failed run after an edit, to see whether the failure is fixed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsa_harness.commands.engine_job import check_engine, check_nodes, scripts
from nsa_harness.commands.experiment import Experiment, ledger_side, open_experiment
from nsa_harness.commands.run import judge_attempts
from nsa_harness.commands.stored_job import engine_of
from nsa_harness.core.experiment.claim import VerificationResult, VerifyReport, lowest_failure_rate, verification_result
from nsa_harness.core.experiment.statistics import passes_to_show
from nsa_harness.core.experiment.trial import FAILED_STATUSES, Signature, failure_signature, make_trial
from nsa_harness.core.plan import EngineChoice, RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.schedule import is_as_expected
from nsa_harness.errors import UsageError
from nsa_harness.render.experiments import claim as shown
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.supervisor.launch.launcher import command_line, end_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import (
    AttemptDir,
    RunDir,
    RunOptions,
    earlier_results,
    find_run,
    refuse_if_running,
)

_EXIT = {
    VerificationResult.FIXED: 0,
    VerificationResult.NOT_FIXED: 1,
    VerificationResult.FAILS_OTHERWISE: 1,
    VerificationResult.UNDECIDED: 125,
}
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The failed run to repeat, and the options of the command."""

    run_path: Path  # a run, or one attempt of it
    min_passes: int  # from --repeat
    dry_run: bool
    engine: EngineChoice | None  # runs each launch as a job; None: whatever ran the failed attempt
    options: RunOptions


def run_verify(request: VerifyRequest) -> int:
    """Repeat a failed run until it is clear whether it is fixed. Raise UsageError unless it has one such failure."""
    run = find_run(request.run_path, request.options.parent)
    with refuse_if_running(run):
        before = _before(run, request)
    if request.dry_run:
        TrialScreen.print_lines(lambda width: shown.verify_header(before.report, width))
        print(*_dry_run_lines(before, request.options), sep="\n")
        return 0
    if before.engine is not None:
        check_engine(before.engine)
        check_nodes(before.spec, before.engine)
    end_dead_runs()
    with open_experiment(request.options, (before.spec,), machine_facts(), engine=before.engine) as experiment:
        return _verify(experiment, before)


@dataclass(frozen=True, kw_only=True)
class _Before:
    """The failure before the edit, and the number of times that it occurred."""

    spec: RunSpec  # the launch to repeat, with a new hash
    spec_hash: str  # the hash of the stored launch
    signature: Signature
    report: VerifyReport
    engine: EngineChoice | None

    def fails_alike(self, outcome: Outcome) -> bool:
        """Return whether an outcome is the same failure as before the edit."""
        signature = failure_signature(outcome)
        # The line alone does not decide, because an edit may move lines.
        same_line = signature.place is not None and signature.place == self.signature.place
        return signature.verdict == self.signature.verdict and (signature.cause == self.signature.cause or same_line)


def _before(run: RunDir, request: VerifyRequest) -> _Before:
    """Return the failure of a stored run, with the number of times that this failure occurred."""
    attempts = [outcome for outcome in judge_attempts(run) if outcome.spec.deepening is None]
    last = failed_attempts(run, request.run_path, attempts, "--verify")[-1]
    attempt = run.attempt(last.spec.scenario, last.attempt)
    refuse_observed_nodes(attempt, f"--verify {request.run_path}")
    same = [attempt for attempt in attempts if attempt.spec.spec_hash == last.spec.spec_hash]
    here = _count_failures(attempt.verdict.status for attempt in same)
    earlier = earlier_results(run.path.parent, {last.spec.spec_hash}, excluded_run=run.run_id)
    others = _count_failures(earlier_run.verdict for earlier_run in earlier)
    everywhere = (here[0] + others[0], here[1] + others[1])
    rate = lowest_failure_rate([here, everywhere])
    spec, signature = load_spec(run.path / last.dir / "spec.json", run.directory), failure_signature(last)
    # The stored launch ran other code. With the same hash, passes of the new code would count for the old code.
    new_hash = hashlib.sha256(f"{spec.spec_hash} verifies {run.run_id}".encode()).hexdigest()[:12]
    report = VerifyReport(
        scenario=last.spec.scenario, run_id=run.run_id, end=str(signature), count_in_run=here,
        count_in_all_runs=everywhere, lowest_count=rate,
        passes_needed=max(request.min_passes, passes_to_show(*rate, _CONFIDENCE)), confidence=_CONFIDENCE,
    )  # fmt: skip
    return _Before(
        spec=replace(spec, spec_hash=new_hash), spec_hash=last.spec.spec_hash, signature=signature, report=report,
        engine=request.engine or engine_of(attempt),
    )  # fmt: skip


def _count_failures(verdicts: Iterable[str]) -> tuple[int, int]:
    """Return the number of failed runs, and the number of runs that failed or passed."""
    judged_ends = [verdict for verdict in verdicts if verdict in (Status.PASS, *FAILED_STATUSES)]
    return sum(verdict in FAILED_STATUSES for verdict in judged_ends), len(judged_ends)


def _dry_run_lines(before: _Before, options: RunOptions) -> Iterator[str]:
    """Yield the command of a launch, or the script of its job, without secrets."""
    if before.engine is not None:
        yield from scripts((before.spec,), before.engine, options)
        return
    redaction = Redaction(is_on=options.redact)
    redaction.learn_launch(before.spec)
    yield redaction.command(command_line(before.spec, sys.executable, None))


def refuse_observed_nodes(attempt: AttemptDir, command: str) -> None:
    """Raise UsageError if agents of `watch --shared` observed an attempt, which one machine cannot launch again."""
    if attempt.nodes() and engine_of(attempt) is None:
        raise UsageError(
            f"{command}: agents on the nodes observed this job, so it cannot be launched again from here; run the"
            " program with `nsa-harness run FILE.py --engine slurm --nodes N`, or observe it again with `nsa-harness"
            " watch --shared DIR` on each node"
        )


def failed_attempts(run: RunDir, path: Path, attempts: Sequence[Outcome], option: str) -> list[Outcome]:
    """Return the failed attempts of the only scenario that failed, or of the one that `path` names.

    Raises UsageError if no scenario failed, or if several failed and `path` names none of them. `option`: the word of
    the command line for which the attempts are needed.
    """
    scenario = path.name.partition("~")[0]
    bad = [attempt for attempt in attempts if attempt.verdict.status in FAILED_STATUSES]
    if any(attempt.spec.scenario == scenario for attempt in attempts):
        bad = [attempt for attempt in bad if attempt.spec.scenario == scenario]
    elif surprises := [attempt for attempt in bad if not is_as_expected(attempt)]:
        bad = surprises
    names = list(dict.fromkeys(attempt.spec.scenario for attempt in bad))
    if not names:
        words = {"--verify": "verify", "why": "explain"}
        raise UsageError(f"{option} {path}: nothing failed in this run, so there is nothing to {words[option]}")
    if len(names) > 1:
        directories = ", ".join(str(run.path / name) for name in names[:4])
        raise UsageError(f"{option} {path}: {len(names)} scenarios failed; name one of them: {directories}")
    return bad


def _verify(experiment: Experiment, before: _Before) -> int:
    """Run trials until it is clear whether the failure is fixed, and return the exit code."""
    report, needed_passes = before.report, before.report.passes_needed
    experiment.show(lambda width: shown.verify_header(report, width))
    for _ in experiment.trials_until(
        lambda: verification_result(experiment.trials, needed_passes) is not None,
        next_config=lambda: 0,
        judge=lambda outcome, _: make_trial(outcome, before.fails_alike),
        progress=lambda _: f"run {len(experiment.trials) + 1} of at most {needed_passes}",
    ):
        report = replace(report, trials=tuple(experiment.trials))
        experiment.show(partial(shown.verify_lines, report))
    result = verification_result(experiment.trials, needed_passes) or VerificationResult.UNDECIDED
    report = replace(report, result=result, interrupted=experiment.session.interrupted)
    code, ledger = experiment.finish(_ledger_line(experiment, before, report), _EXIT[result])
    experiment.show(lambda width: ["", *shown.verify_answer(report, experiment.session.run.path, ledger, width)])
    return code


def _ledger_line(experiment: Experiment, before: _Before, report: VerifyReport) -> LedgerLine:
    confidence, passes, bad, of = report.confidence, report.passes, *report.lowest_count
    failures = sum(trial.judged and not trial.passed for trial in report.trials)
    ends = {report.last_end: failures} if failures else {}
    then = ledger_side(f"as in {report.run_id}", before.spec_hash, bad, of, confidence, {report.end: bad})
    now = ledger_side("as it is now", before.spec.spec_hash, failures, failures + passes, confidence, ends)
    result = report.result or VerificationResult.UNDECIDED
    return experiment.ledger_line(
        before.spec, [report.run_id],
        kind="verify", text=f"{report.scenario} of {report.run_id} is fixed", result=result.value,
        why=shown.verify_why(report), computes="not known", scenario=report.scenario, key="code",
        fixed="yes" if result is VerificationResult.FIXED else "no" if failures else "not yet", confidence=confidence,
        sides=(then, now), seconds=round(experiment.took_s, 1),
    )  # fmt: skip
