"""Diagnostic reruns: which launch with one change would explain what a run left open, and what it showed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Cause, SecondRun, row_of
from nsa_harness.core.diagnosis.confidence import CERTAIN, EvidenceKind
from nsa_harness.core.diagnosis.explanation import stated
from nsa_harness.core.experiment.repeats import place_word
from nsa_harness.core.plan import DiagnosticRerun, RunSpec
from nsa_harness.core.report import Culprit, Finding, Outcome, Place, Status

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


PASSED, SAME, _OTHER = "passed", "the same", "another"
# (change, how it ended beside the first attempt) -> what follows. One pair of runs makes it likely, not certain.
Follows = Mapping[tuple[str, str], str]
FOLLOWS: Follows = {
    (SecondRun.OTHER_BACKEND, PASSED): "so it needs NCCL: its transport, or the order of work on the device",
    (SecondRun.OTHER_BACKEND, SAME): "so it is not NCCL",
    (SecondRun.AGAIN, PASSED): "so it does not come each time: --repeat=5 says how often",
    (SecondRun.AGAIN, SAME): "so it comes each time, as far as two attempts tell",
    ("launch_blocking", SAME): "there the kernel that failed was launched",
    ("names", PASSED): "so it does not come each time, or depends on time",
    ("anomaly", PASSED): "so it does not come each time, or depends on time",
    ("checkpoint_debug", PASSED): "so it does not come each time, or depends on time",
}


def with_deeper_runs(outcomes: Sequence[Outcome], follows: Follows = FOLLOWS) -> tuple[Outcome, ...]:
    """The outcomes, in their order: each look says what it showed, and what was looked into has that as a finding.

    Verdicts stay as they are. A place that only a deeper run could name becomes the culprit's. Applied twice it changes
    nothing more.
    """
    return tuple(_looked_into(outcome, outcomes, follows) for outcome in outcomes)


def lesson(base: Outcome, deeper: Outcome, follows: Follows = FOLLOWS) -> Finding:
    """Return what `deeper` shows about `base`, as a finding of `base`."""
    asked = deeper.spec.deepening
    assert asked is not None
    own = _own(deeper)
    how = _how(base, deeper)
    shown = own.claim if own else _ended(base, deeper, how)
    lead = "" if own else follows.get((asked.change, how), "")
    losses = _losses(base, deeper) if asked.change == SecondRun.AGAIN else ""
    unlike = f"; it ended otherwise, though: {_verdict(deeper)}" if own and how != SAME else ""
    return stated(
        Cause.DEEPENED,
        f"with {asked.says} (attempt {deeper.attempt}) {shown}{f': {lead}' if lead else ''}{losses}{unlike}",
        ranks=own.ranks if own else (),
        place=own.place if own else None,
        evidence=EvidenceKind.RECORD if own and how == SAME else EvidenceKind.OPEN,
        proof=own.proof if own else ((f"{deeper.dir}/verdict.json",) if deeper.dir else ()),
        advice=own.advice if own else _advice(deeper, asked),
    )


def _looked_into(outcome: Outcome, outcomes: Sequence[Outcome], follows: Follows) -> Outcome:
    if outcome.spec.deepening is not None:
        base = next((one for one in outcomes if _asks_about(outcome, one)), None)
        return replace(outcome, showed=lesson(base, outcome, follows).claim) if base and not outcome.showed else outcome
    looks = sorted((one for one in outcomes if _asks_about(one, outcome)), key=lambda one: one.attempt)
    known = {finding.claim for finding in outcome.findings}
    lessons = [(look, found) for look in looks if (found := lesson(outcome, look, follows)).claim not in known]
    if not lessons:
        return outcome
    better = next((one.place for look, one in lessons if one.place and _how(outcome, look) == SAME), None)
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


def _how(base: Outcome, deeper: Outcome) -> str:
    if Status.PASS is deeper.verdict.status is not base.verdict.status:
        return PASSED
    alike = (base.verdict.status, base.verdict.cause) == (deeper.verdict.status, deeper.verdict.cause)
    asked = deeper.spec.deepening
    if asked and asked.change == "checkpoint_debug" and _own(deeper):
        # In that mode torch raises the same mismatch in other words.
        alike = base.verdict.status == deeper.verdict.status
    return SAME if alike else _OTHER


def _ended(base: Outcome, deeper: Outcome, how: str) -> str:
    if how == PASSED:
        return "it passed"
    if how == _OTHER:
        return f"it ended otherwise: {_verdict(deeper)}"
    before, after = (one.culprit.place if one.culprit else None for one in (base, deeper))
    there, now = place_word(before), place_word(after)
    if there == now:
        return f"it ended the same way{f' at the same line {now}' if now else ''}"
    return f"it ended the same way, at {now or 'no known line'} instead of {there or 'no known line'}"


def _losses(base: Outcome, deeper: Outcome) -> str:
    """Compare the last losses. If they differ under one seed, something in the program does not depend on it alone."""
    one, other = (outcome.metrics.get("loss_last") for outcome in (base, deeper))
    if one is None or other is None:
        return ""
    return "; the last losses are equal" if one == other else f"; the last losses differ: {one:.9g} and {other:.9g}"


def _verdict(deeper: Outcome) -> str:
    return f"{deeper.verdict.status.value} {deeper.verdict.cause or ''}".strip()


def _advice(deeper: Outcome, asked: DiagnosticRerun) -> str:
    repeat = f"; {deeper.repeat} repeats it" if deeper.repeat else ""
    return f"Changed was this alone: {asked.says}{repeat}."


def _placed(culprit: Culprit | None, place: Place | None) -> Culprit | None:
    """A line for the line, a parameter beside it: what was known already stays where the new place says nothing."""
    if culprit is None or place is None:
        return culprit
    known = culprit.place or Place()
    if place.file is None:
        new = replace(known, module=place.module, layer=place.layer, parameter=place.parameter)
    else:
        new = replace(known, file=place.file, line=place.line, function=place.function, text=place.text)
    return replace(culprit, place=new)
