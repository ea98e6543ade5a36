"""Outcome: evidence, judgement and diagnosis, put into the words and numbers that every report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from harness.core.diagnosed.case import at
from harness.core.diagnosed.causes import Cause
from harness.core.diagnosed.diagnosis import Diagnosis, diagnose
from harness.core.judged.verdict import Judgement, judge
from harness.core.observed.evidence import Evidence, RankEvidence
from harness.core.parted.ledger import last_agreed
from harness.core.plan import RunSpec, Skip
from harness.core.report import (
    Artifact,
    Culprit,
    Finding,
    Outcome,
    Status,
    Timing,
    Usage,
    Verdict,
)
from harness.core.told.deeper import shown_deeper
from harness.core.told.expectation import criteria, is_expected, missed
from harness.core.told.telling import checked, ended, own_exit, ruled_out, standings, vital


def outcome_of(
    spec: RunSpec,
    evidence: Evidence,
    *,
    attempt: int,
    directory: str,
    artifacts: Sequence[Artifact],
    metrics: Mapping[str, float],
    repeat: str,
) -> Outcome:
    """Judge, diagnose and tell one attempt. `metrics`: what the program reported, foreign expressions included."""
    judgement = judge(evidence)
    diagnosis = diagnose(evidence, judgement)
    misses = missed(spec.expect, evidence, metrics) if judgement.status is Status.PASS else ()
    verdict = _verdict(judgement, diagnosis, misses)
    told = (*misses, *diagnosis.findings, *shown_deeper(spec, evidence))
    findings = tuple(_rooted(finding, directory) for finding in told)
    culprit = diagnosis.culprit
    return Outcome(
        scenario=spec.scenario,
        about=spec.about,
        spec_hash=spec.spec_hash,
        attempt=attempt,
        final=True,
        verdict=verdict,
        expected=is_expected(spec.expect, verdict.status, verdict.cause),
        flaky=False,
        phase=_phase(evidence, culprit),
        culprit=culprit,
        victims=_victims(evidence, culprit),
        last_step={rank.rank: _steps_done(rank) for rank in evidence.ranks},
        exit_codes={rank.rank: own_exit(rank) for rank in evidence.ranks},
        findings=findings,
        trouble=evidence.trouble,
        timing=_timing(evidence, judgement, culprit),
        usage=_usage(evidence, metrics),
        dir=directory,
        subject=spec.subject,
        ranks=spec.ranks,
        backend=spec.backend,
        notes=spec.notes,
        checked=tuple(checked(evidence, verdict)),
        not_covered=spec.not_covered,
        ruled_out=tuple(ruled_out(evidence, judgement)),
        standings=tuple(standings(evidence, judgement, culprit)),
        vitals=tuple(vital(rank) for rank in evidence.ranks),
        metrics=dict(metrics),
        artifacts=tuple(artifacts),
        why=judgement.proof.reason if judgement.proof and verdict.status is Status.HANG else None,
        ended=ended(evidence),
        repeat=repeat,
        next=None,
        device=spec.device,
        tags=spec.tags,
        settings=_settings(spec),
        criteria=criteria(spec.expect, spec.limits),
        missing_gradients=_missing_gradients(evidence),
        last_agreed=_last_agreed(evidence) if verdict.status is Status.HANG else None,
        deepening=spec.deepening,
    )


def skipped(skip: Skip) -> Outcome:
    """A scenario that this machine cannot run."""
    nothing = Timing(launch_s=None, wall_s=0.0, quiet_s=None, detected_s=None, teardown_s=None)
    return Outcome(
        scenario=skip.scenario,
        about=skip.about,
        spec_hash="",
        attempt=1,
        final=True,
        verdict=Verdict(status=Status.SKIP, kind=None, cause=Cause.MISSING_NEED, summary=skip.reason),
        expected=True,
        flaky=False,
        phase=None,
        culprit=None,
        victims=(),
        last_step={},
        exit_codes={},
        findings=(),
        trouble=(),
        timing=nothing,
        usage=Usage(peak_rss_bytes=None, peak_gpu_bytes=None, tokens_per_s=None),
        dir="",
        subject="",
        ranks=0,
        backend="",
        notes=(),
        checked=(),
        not_covered=(),
        ruled_out=(),
        standings=(),
        vitals=(),
        metrics={},
        artifacts=(),
        why=None,
        ended="nothing was started",
        repeat=None,
        next=None,
        tags=skip.tags,
        settings=skip.settings,
    )


def unjudged(spec: RunSpec | Skip, *, attempt: int, directory: str, error: str) -> Outcome:
    """A run that the harness itself failed: ERROR, never folded into FAIL. Of a Skip no more than its name is known."""
    empty = skipped(Skip(scenario=spec.scenario, about=spec.about, reason=error))
    failed = replace(
        empty,
        attempt=attempt,
        verdict=Verdict(status=Status.ERROR, kind=None, cause=Cause.HARNESS_ERROR, summary=error),
        expected=False,
        dir=directory,
        ended="see processes.jsonl",
    )
    if isinstance(spec, Skip):
        return failed
    return replace(
        failed,
        spec_hash=spec.spec_hash,
        subject=spec.subject,
        ranks=spec.ranks,
        backend=spec.backend,
        device=spec.device,
        tags=spec.tags,
        settings=_settings(spec),
        criteria=criteria(spec.expect, spec.limits),
        deepening=spec.deepening,
    )


def _settings(spec: RunSpec) -> tuple[tuple[str, str], ...]:
    """The scenario's own, and the planted fault: a run with one is comparable only to a run with the same."""
    planted = asdict(spec.fault) if spec.fault else {}
    fault = {f"fault.{key}": str(value) for key, value in planted.items() if value is not None}
    return tuple(sorted({**dict(spec.settings), **fault}.items()))


def _missing_gradients(evidence: Evidence) -> tuple[str, ...] | None:
    traces = [rank.traces for rank in evidence.ranks]
    if not traces or any(trace.missing is None for trace in traces):
        return None
    return tuple(sorted({name for trace in traces for name in trace.missing_parameters}))


def _last_agreed(evidence: Evidence) -> str | None:
    """None where a rank has no board: it may have left anything."""
    boards = {rank.rank: rank.board for rank in evidence.ranks if rank.board is not None}
    call = last_agreed(boards) if len(boards) == len(evidence.ranks) else None
    return None if call is None else f"{call.op}{at(call.place)} in step {call.step}"


def _steps_done(rank: RankEvidence) -> int | None:
    """Finished optimizer steps; None without a board."""
    if rank.board is None:
        return None
    return rank.board.steps_s[-1][0] if rank.board.steps_s else 0


def _verdict(judgement: Judgement, diagnosis: Diagnosis, misses: Sequence[Finding]) -> Verdict:
    if misses:
        more = f" (and {len(misses) - 1} more)" if len(misses) > 1 else ""
        return Verdict(status=Status.FAIL, kind=None, cause=Cause.EXPECTATION_MISSED, summary=misses[0].claim + more)
    if judgement.status is Status.PASS:
        return Verdict(status=Status.PASS, kind=None, cause=None, summary="every rank ended with exit code 0")
    kind = judgement.proof.kind if judgement.status is Status.HANG and judgement.proof else None
    return Verdict(status=judgement.status, kind=kind, cause=diagnosis.cause, summary=diagnosis.findings[0].claim)


def _rooted(finding: Finding, directory: str) -> Finding:
    """Proof paths of an attempt, as seen from the run's directory."""
    return replace(finding, proof=tuple(f"{directory}/{path}" for path in finding.proof))


def _phase(evidence: Evidence, culprit: Culprit | None) -> str | None:
    marks = [
        rank.board.training or rank.board.newest
        for rank in evidence.ranks
        if rank.board and rank.board.newest and (culprit is None or not culprit.ranks or rank.rank in culprit.ranks)
    ]
    return min(marks, key=lambda mark: mark.at_s).kind if marks else None


def _victims(evidence: Evidence, culprit: Culprit | None) -> tuple[int, ...]:
    if culprit is None or not culprit.ranks:
        return ()
    return tuple(rank.rank for rank in evidence.ranks if rank.rank not in culprit.ranks)


def _timing(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> Timing:
    last = evidence.last_progress_s
    failed_s = judgement.failures[0].at_s if judgement.failures else None
    since = failed_s if failed_s is not None else _last_mark_s(evidence, culprit)
    hangs = judgement.status is Status.HANG
    return Timing(
        launch_s=evidence.launch_s,
        wall_s=evidence.ended_s + evidence.teardown_s,
        quiet_s=evidence.ended_s - last if last is not None and hangs else None,
        detected_s=evidence.ended_s - since if since is not None and judgement.status is not Status.PASS else None,
        teardown_s=evidence.teardown_s,
    )


def _last_mark_s(evidence: Evidence, culprit: Culprit | None) -> float | None:
    """As the last look saw it: a stopped rank that our own end of the run resumed has marked again since."""
    ranks = culprit.ranks if culprit else ()
    looked = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    boards = {
        **{rank.rank: rank.board for rank in evidence.ranks},
        **{rank.rank: rank.board for rank in looked if rank.board},
    }
    marks = [board.newest.at_s for rank, board in boards.items() if rank in ranks and board and board.newest]
    return max(marks, default=None)


def _usage(evidence: Evidence, metrics: Mapping[str, float]) -> Usage:
    rss = [rank.peak_rss_bytes for rank in evidence.ranks if rank.peak_rss_bytes is not None]
    gpu = [rank.peak_gpu_bytes for rank in evidence.ranks if rank.peak_gpu_bytes is not None]
    return Usage(
        peak_rss_bytes=max(rss, default=None),
        peak_gpu_bytes=max(gpu, default=None),
        tokens_per_s=metrics.get("tokens_per_s"),
    )
