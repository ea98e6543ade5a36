"""Diagnostic reruns: which launch with one change would explain what a run left open, and what it showed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Cause, SecondRun, row_of
from nsa_harness.core.diagnosis.confidence import CERTAIN, EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.plan import DiagnosticRerun, RunSpec
from nsa_harness.core.report import Culprit, Facts, Finding, Outcome, Place, Status

MOST_RUNS = 3

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
# DDP speaks of parameters by index; with INFO it names them.
_BY_INDEX = re.compile(r"ready only once|did not receive grad|finished reduction|same model across all ranks")
_RECOMPUTED = re.compile(r"CheckpointError|recomputation|recomputed values", re.IGNORECASE)
_IN_BACKWARD = re.compile(r"modified by an inplace operation|backward through the graph|returned nan values")
_CALLS_BACKWARD = re.compile(r"\bbackward\(|\.grad\(")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that a deeper launch does otherwise."""

    name: str  # of a SecondRun, or of what the program alone can do
    says: str
    env: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ()  # the command line in its place; empty: the same
    backend: str | None = None  # that the command line asks for; None: the same
    setting: tuple[str, str] | None = None  # the same as a key of a scenario


NAMES = Change(name=SecondRun.NAMES, says=f"{_DEBUG}=INFO", env=((_DEBUG, "INFO"),))
ANOMALY = Change(name=SecondRun.ANOMALY, says="autograd's anomaly detection", env=((protocol.ENV_ANOMALY, "1"),))
CHECKPOINT_DEBUG = Change(
    name=SecondRun.CHECKPOINT_DEBUG, says="checkpoint's debug mode", env=((protocol.ENV_CHECKPOINT_DEBUG, "1"),)
)
LAUNCH_BLOCKING = Change(
    name=SecondRun.LAUNCH_BLOCKING, says="CUDA_LAUNCH_BLOCKING=1", env=(("CUDA_LAUNCH_BLOCKING", "1"),)
)
GROWTH = Change(
    name=SecondRun.GROWTH, says="tracemalloc, and what lives after two steps", env=((protocol.ENV_GROWTH, "1"),)
)
AGAIN = Change(name=SecondRun.AGAIN, says="nothing changed, the same seed")

_OF_ANY_PROGRAM = (NAMES, CHECKPOINT_DEBUG, ANOMALY, LAUNCH_BLOCKING)
# What is noted beside a verdict, a PASS too, and that a run of its own tells more about.
_BESIDE = (GROWTH,)


def next_change(
    spec: RunSpec, outcome: Outcome, made: Collection[str], *, probe: str, own: Sequence[Change] = ()
) -> Change | None:
    """The change of the next deeper launch; None where nothing is open, or nothing more would tell.

    `outcome` is the attempt of `spec` that counts, `made` the changes that were made already, `own` what the program of
    `spec` can do otherwise by its command line; of a change that any program takes, it is its own way to make it.
    """
    if len(made) >= MOST_RUNS:
        return None
    asked = {run for one in outcome.findings for run in row_of(one.code).second_run or ()}
    beside = (change for change in _BESIDE if change.name in asked and change.name not in made)
    if (noted := next((change for change in beside if _can(change, spec, outcome, probe)), None)) is not None:
        return noted
    more = row_of(outcome.verdict.cause).second_run
    if outcome.verdict.status not in (Status.FAIL, Status.HANG) or more is None:
        return None
    changes = {change.name: change for change in (*_OF_ANY_PROGRAM, *own, AGAIN)}
    wanted = (changes[run] for run in _worth_asking(outcome, more, changes) if run in changes)
    can = (change for change in wanted if change.name not in made and _can(change, spec, outcome, probe))
    return next(can, None)


def deepened(spec: RunSpec, change: Change, of: int) -> RunSpec:
    """The same launch with that one change. What it was made for it is not expected to find: looking may hide it."""
    asked = tuple(finding for finding in spec.expect.findings if change.name not in (row_of(finding).second_run or ()))
    declared = {**dict(spec.env), **dict(change.env)}
    settings = dict(spec.settings) | {f"run.env.{name}": value for name, value in change.env}
    settings |= dict([change.setting]) if change.setting else {}
    return replace(
        spec,
        program=change.program or spec.program,
        env=tuple(sorted(declared.items())),
        backend=change.backend or spec.backend,
        expect=replace(spec.expect, findings=asked),
        settings=tuple(sorted(settings.items())),
        notes=(*spec.notes, f"to look deeper into attempt {of}: {change.says}"),
        spec_hash=hashlib.sha256(f"{spec.spec_hash} deeper {change.name}".encode()).hexdigest()[:12],
        deepening=DiagnosticRerun(of=of, change=str(change.name), says=change.says),
    )


def _worth_asking(outcome: Outcome, more: Sequence[SecondRun], every: Iterable[str]) -> Iterator[str]:
    """Yield the reruns that the failure's text suggests, those of its cause, and all of them if it is not certain."""
    if _BY_INDEX.search(outcome.verdict.summary):
        yield SecondRun.NAMES
    if _RECOMPUTED.search(outcome.verdict.summary):
        yield SecondRun.CHECKPOINT_DEBUG
    yield from more
    if min((finding.confidence for finding in outcome.findings[:1]), default=0.0) < CERTAIN:
        yield from every


def _in_backward(outcome: Outcome) -> bool:
    """Raised below autograd's engine: the line at fault is one of the forward pass, and the stack does not have it."""
    place = outcome.culprit.place if outcome.culprit else None
    statement = (place.text or "").splitlines()[-1:] if place else []
    named = any(map(_CALLS_BACKWARD.search, statement)) or _IN_BACKWARD.search(outcome.verdict.summary)
    return outcome.phase == "backward" or bool(named)


def _named(outcome: Outcome) -> bool:
    place = outcome.culprit.place if outcome.culprit else None
    return place is not None and place.parameter is not None


def _can(change: Change, spec: RunSpec, outcome: Outcome, probe: str) -> bool:
    """The change is one for this launch, and says something about an end of this kind."""
    declared, failed = dict(spec.env), outcome.verdict.status is Status.FAIL
    if change.program == spec.program:
        return False
    match change.name:
        case SecondRun.NAMES:
            return failed and spec.ranks > 1 and declared.get(_DEBUG, "OFF") == "OFF" and not _named(outcome)
        case SecondRun.ANOMALY:
            possible = protocol.ENV_ANOMALY not in declared and (probe != protocol.PROBE_OFF or bool(change.program))
            return failed and possible and _in_backward(outcome)
        case SecondRun.CHECKPOINT_DEBUG:
            asked = outcome.verdict.cause == Cause.CHECKPOINT_RECOMPUTE_MISMATCH
            about = asked or _RECOMPUTED.search(outcome.verdict.summary)
            return failed and probe != protocol.PROBE_OFF and bool(about)
        case SecondRun.GROWTH:
            return probe == protocol.PROBE_FULL and protocol.ENV_GROWTH not in declared
        case SecondRun.LAUNCH_BLOCKING:
            return spec.device == "cuda" and "CUDA_LAUNCH_BLOCKING" not in declared
    return True


class _Ended(StrEnum):
    """How a diagnostic rerun ended, compared with the attempt that it looks into."""

    PASSED = "passed"
    SAME = "the same"
    OTHERWISE = "otherwise"


def with_deeper_runs(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes, each with a finding for every diagnostic rerun that was made of it.

    Verdicts do not change. A place that only a rerun could name becomes the culprit's. Applied twice it changes nothing
    more.
    """
    return tuple(_with_lessons(outcome, outcomes) for outcome in outcomes)


def lesson(base: Outcome, deeper: Outcome) -> Finding:
    """Return what the diagnostic rerun `deeper` shows about `base`, as a finding of `base`."""
    asked = deeper.spec.deepening
    assert asked is not None
    own = _own(deeper)
    ended = _ended(base, deeper)
    return make_finding(
        Cause.DEEPENED,
        {
            "variant": "rerun",
            "change": asked.change,
            "changed": asked.says,
            "attempt": deeper.attempt,
            "shown": own.claim if own else "",
            "shown_advice": own.advice if own else "",
            "ended": ended.value,
            "verdict": deeper.verdict.status.value,
            "cause": deeper.verdict.cause or "",
            "line_before": base.culprit.place if base.culprit else None,
            "line_now": deeper.culprit.place if deeper.culprit else None,
            "losses": _losses(base, deeper) if asked.change == SecondRun.AGAIN else None,
            "repeat": deeper.repeat or "",
        },
        ranks=own.ranks if own else (),
        place=own.place if own else None,
        # A single pair of runs makes it likely, not certain.
        evidence=EvidenceKind.RECORD if own and ended is _Ended.SAME else EvidenceKind.OPEN,
        proof=own.proof if own else ((f"{deeper.dir}/verdict.json",) if deeper.dir else ()),
    )


def _with_lessons(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    looks = sorted((one for one in outcomes if _asks_about(one, outcome)), key=lambda one: one.attempt)
    known = {one.facts.get("attempt") for one in outcome.findings if one.code == Cause.DEEPENED}
    lessons = [(look, lesson(outcome, look)) for look in looks if look.attempt not in known]
    if not lessons:
        return outcome
    better = next((one.place for look, one in lessons if one.place and _ended(outcome, look) is _Ended.SAME), None)
    return replace(
        outcome,
        findings=(*outcome.findings, *(found for _, found in lessons)),
        culprit=_placed(outcome.culprit, better),
    )


def _asks_about(one: Outcome, outcome: Outcome) -> bool:
    asked = one.spec.deepening
    if asked is None or outcome.spec.deepening is not None:
        return False
    return (one.spec.scenario, asked.of) == (outcome.spec.scenario, outcome.attempt)


def _own(deeper: Outcome) -> Finding | None:
    return next((finding for finding in deeper.findings if finding.code == Cause.DEEPENED), None)


def _ended(base: Outcome, deeper: Outcome) -> _Ended:
    if Status.PASS is deeper.verdict.status is not base.verdict.status:
        return _Ended.PASSED
    alike = (base.verdict.status, base.verdict.cause) == (deeper.verdict.status, deeper.verdict.cause)
    asked = deeper.spec.deepening
    if asked and asked.change == "checkpoint_debug" and _own(deeper):
        # In that mode torch raises the same mismatch with another message.
        alike = base.verdict.status == deeper.verdict.status
    return _Ended.SAME if alike else _Ended.OTHERWISE


def _losses(base: Outcome, deeper: Outcome) -> Facts | None:
    """Return the last losses. They are equal to the last digit if the seed determines everything in the program."""
    before, now = (outcome.metrics.get("loss_last") for outcome in (base, deeper))
    return None if before is None or now is None else {"before": before, "now": now}


def _placed(culprit: Culprit | None, place: Place | None) -> Culprit | None:
    """Return the culprit at the new place; what the new place leaves open stays as it was known."""
    if culprit is None or place is None:
        return culprit
    known = culprit.place or Place()
    if place.file is None:
        new = replace(known, module=place.module, layer=place.layer, parameter=place.parameter)
    else:
        new = replace(known, file=place.file, line=place.line, function=place.function, text=place.text)
    return replace(culprit, place=new)
