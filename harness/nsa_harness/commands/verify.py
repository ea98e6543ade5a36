"""A failed run repeated after an edit: as often as it takes to say "fixed", and no longer than until it fails."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsa_harness.commands.claim import BAD, INTERRUPTED, RunOptions, Session, ledger_side, now, session_of
from nsa_harness.commands.run import judged
from nsa_harness.core.experiment.claim import (
    Repetition,
    VerificationResult,
    VerifyReport,
    mended,
    passes_needed,
    rate_before,
)
from nsa_harness.core.experiment.signature import Signature, signature_of
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.schedule import as_expected
from nsa_harness.errors import UsageError
from nsa_harness.render import claim as shown
from nsa_harness.render.claim import TrialScreen
from nsa_harness.supervisor.launch.launcher import sweep_dead_runs
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import RunDir, at_rest, ended_before, find_run

_EXIT = {
    VerificationResult.FIXED: 0,
    VerificationResult.NOT_FIXED: 1,
    VerificationResult.FAILS_OTHERWISE: 1,
    VerificationResult.UNDECIDED: 125,
}
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    stored: Path  # a run, or one attempt of it
    least: int  # passes that are asked for anyhow
    dry_run: bool
    manner: RunOptions


def run_verify(request: VerifyRequest) -> int:
    """Repeat it until that is decided, write the documents, file it; returns the exit code. Raises UsageError."""
    stored = find_run(request.stored, request.manner.parent)
    with at_rest(stored):
        before = _before(stored, request)
    if request.dry_run:
        with closing(TrialScreen(sys.stdout, live=False)) as screen:
            screen.show(lambda width: shown.verify_header(before.report, width))
        return 0
    sweep_dead_runs()
    with session_of(request.manner, (before.spec,), machine_facts()) as session:
        return _verified(session, before)


@dataclass(frozen=True, kw_only=True)
class _Before:
    spec: RunSpec
    signature: Signature
    spec_hash: str  # as it was stored
    report: VerifyReport
    run_id: str


def _before(stored: RunDir, request: VerifyRequest) -> _Before:
    """What failed, and how often by all that is stored."""
    attempts = [one for one in judged(stored) if one.spec.deepening is None]
    failed = _failed_scenario(stored, request.stored, attempts)
    last = failed[-1]
    own = [
        one
        for one in attempts
        if one.spec.spec_hash == last.spec.spec_hash and one.verdict.status in (Status.PASS, *BAD)
    ]
    elsewhere = list(ended_before(stored.path.parent, {last.spec.spec_hash}, but=stored.run_id))
    bad = sum(one.verdict.status in BAD for one in own)
    more_bad = sum(one.verdict in BAD for one in elsewhere)
    more = sum(one.verdict in (Status.PASS, *BAD) for one in elsewhere)
    rate = rate_before([(bad, len(own)), (bad + more_bad, len(own) + more)])
    needed = max(request.least, passes_needed(*rate, _CONFIDENCE))
    spec = load_spec(stored.path / last.dir / "spec.json", stored.door)
    # Its passes say nothing of the launch that failed: that had other code.
    fresh = hashlib.sha256(f"{spec.spec_hash} verifies {stored.run_id}".encode()).hexdigest()[:12]
    report = VerifyReport(
        scenario=last.spec.scenario, run_id=stored.run_id, end=str(signature_of(last)), here=(bad, len(own)),
        everywhere=(bad + more_bad, len(own) + more), rate=rate, needed=needed, confidence=_CONFIDENCE,
    )  # fmt: skip
    return _Before(
        spec=replace(spec, spec_hash=fresh), signature=signature_of(last), spec_hash=last.spec.spec_hash, report=report,
        run_id=stored.run_id,
    )  # fmt: skip


def _failed_scenario(stored: RunDir, asked: Path, attempts: Sequence[Outcome]) -> list[Outcome]:
    """The failed attempts of the one scenario that is meant. Raises UsageError where there is none, or several."""
    named = asked.name.partition("~")[0]
    bad = [one for one in attempts if one.verdict.status in BAD]
    if any(one.spec.scenario == named for one in attempts):
        bad = [one for one in bad if one.spec.scenario == named]
    elif surprises := [one for one in bad if not as_expected(one)]:
        bad = surprises
    names = list(dict.fromkeys(one.spec.scenario for one in bad))
    if not names:
        raise UsageError(f"--verify {asked}: nothing failed in it, so there is nothing to verify")
    if len(names) > 1:
        listed = ", ".join(str(stored.path / name) for name in names[:4])
        raise UsageError(f"--verify {asked}: {len(names)} scenarios failed; name one of them: {listed}")
    return bad


def _verified(session: Session, before: _Before) -> int:
    report = before.report
    session.screen.show(lambda width: shown.verify_header(report, width))
    seen: list[Repetition] = []
    while (result := mended(seen, report.needed)) is None and not session.interrupted:
        session.screen.running(f"run {len(seen) + 1} of at most {report.needed}")
        outcome = session.launch(before.spec)
        session.screen.running(None)
        if outcome is None:
            break
        seen.append(_repetition(outcome, before.signature))
        report = replace(report, seen=tuple(seen), last=str(signature_of(outcome)))
        session.say(partial(shown.verify_line, report, outcome.timing.wall_s))
    report = replace(report, result=result or VerificationResult.UNDECIDED, interrupted=session.interrupted)
    code = INTERRUPTED if session.interrupted else _EXIT[report.result or VerificationResult.UNDECIDED]
    ledger = session.write(_verify_line(session, before, report), code, filed=bool(seen))
    session.screen.show(lambda width: ["", *shown.verify_answer(report, session.run.path, ledger, width)])
    return code


def _repetition(outcome: Outcome, before: Signature) -> Repetition:
    """Alike by its cause, or by its line: an edit above it moves the line."""
    if outcome.verdict.status is Status.PASS:
        return Repetition.PASSED
    if outcome.verdict.status not in BAD:
        return Repetition.UNJUDGED
    now = signature_of(outcome)
    same_place = now.place is not None and now.place == before.place
    alike = now.verdict == before.verdict and (now.cause == before.cause or same_place)
    return Repetition.ALIKE if alike else Repetition.OTHERWISE


def _verify_line(session: Session, before: _Before, report: VerifyReport) -> LedgerLine:
    confidence, passed = report.confidence, report.seen.count(Repetition.PASSED)
    failed = sum(one in (Repetition.ALIKE, Repetition.OTHERWISE) for one in report.seen)
    result = report.result or VerificationResult.UNDECIDED
    commit, dirty = session.git(before.spec)
    bad, of = report.rate
    then = ledger_side(f"as in {before.run_id}", before.spec_hash, bad, of, confidence, {report.end: bad})
    ends = {report.last: failed} if failed else {}
    current = ledger_side("as it is now", before.spec.spec_hash, failed, failed + passed, confidence, ends)
    took_s = sum(one.timing.wall_s for one in session.outcomes)
    return LedgerLine(
        kind="verify", at=now(), text=f"{report.scenario} of {before.run_id} is fixed", result=result.value,
        why=shown.verify_why(report),
        fixed="yes" if result is VerificationResult.FIXED else "no" if failed else "not yet",
        computes="not known", scenario=report.scenario, key="code",
        sides=(then, current), confidence=confidence, attempts=len(report.seen), seconds=round(took_s, 1),
        runs=(before.run_id, session.run.run_id), commit=commit, dirty=dirty, machine=session.facts.host,
        command=session.run.redaction.typed(session.manner.command),
    )  # fmt: skip
