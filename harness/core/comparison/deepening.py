"""Deepening: which further launch, with one change, would answer what a run has left open, and what it then showed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from nsa_harness import protocol
from nsa_harness.core.comparison.repeats import place_word
from nsa_harness.core.diagnosis.causes import Cause, SecondRun, row_of
from nsa_harness.core.plan import Deepening, RunSpec
from nsa_harness.core.report import Culprit, Finding, Outcome, Place, Status

MOST_RUNS = 3
CERTAIN = 0.9

_NO_ANOMALY, _ANOMALY = "--no-detect-anomaly", "--detect-anomaly"  # of nsa.train, which spells out every option
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
# DDP speaks of parameters by index; with INFO it names them.
_BY_INDEX = re.compile(r"ready only once|did not receive grad|finished reduction|same model across all ranks")
_RECOMPUTED = re.compile(r"CheckpointError|recomputation|recomputed values", re.IGNORECASE)
_IN_BACKWARD = re.compile(r"modified by an inplace operation|backward through the graph|returned nan values")
_CALLS_BACKWARD = re.compile(r"\bbackward\(|\.grad\(")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that a deeper launch does otherwise."""

    name: SecondRun
    says: str
    env: tuple[tuple[str, str], ...] = ()
    option: tuple[str, str] | None = None  # of nsa.train, and its other value
    switch: tuple[str, str] | None = None  # of nsa.train: a word, and the word in its place
    setting: tuple[str, str] | None = None  # the same as a key of a scenario


NAMES = Change(name=SecondRun.NAMES, says=f"{_DEBUG}=INFO", env=((_DEBUG, "INFO"),))
ANOMALY = Change(
    name=SecondRun.ANOMALY,
    says="autograd's anomaly detection",
    env=((protocol.ENV_ANOMALY, "1"),),
)
OUR_ANOMALY = Change(
    name=SecondRun.ANOMALY,
    says="autograd's anomaly detection",
    switch=(_NO_ANOMALY, _ANOMALY),
    setting=("trace.detect_anomaly", "true"),
)
CHECKPOINT_DEBUG = Change(
    name=SecondRun.CHECKPOINT_DEBUG,
    says="checkpoint's debug mode",
    env=((protocol.ENV_CHECKPOINT_DEBUG, "1"),),
)
LAUNCH_BLOCKING = Change(
    name=SecondRun.LAUNCH_BLOCKING, says="CUDA_LAUNCH_BLOCKING=1", env=(("CUDA_LAUNCH_BLOCKING", "1"),)
)
GLOO = Change(
    name=SecondRun.OTHER_BACKEND,
    says="gloo in place of nccl",
    option=("--backend", "gloo"),
    setting=("needs.backend", "gloo"),
)
VANILLA = Change(
    name=SecondRun.OTHER_ATTENTION,
    says="vanilla attention",
    option=("--attention", "vanilla"),
    setting=("model.attention", "vanilla"),
)
AGAIN = Change(name=SecondRun.AGAIN, says="nothing changed, the same seed")

_CHANGES = {
    SecondRun.NAMES: NAMES,
    SecondRun.CHECKPOINT_DEBUG: CHECKPOINT_DEBUG,
    SecondRun.ANOMALY: ANOMALY,
    SecondRun.LAUNCH_BLOCKING: LAUNCH_BLOCKING,
    SecondRun.OTHER_BACKEND: GLOO,
    SecondRun.OTHER_ATTENTION: VANILLA,
    SecondRun.AGAIN: AGAIN,
}


def next_change(spec: RunSpec, outcome: Outcome, made: Collection[str], *, probe: str) -> Change | None:
    """The change of the next deeper launch; None where nothing is open, or nothing more would tell.

    `outcome` is the attempt of `spec` that counts, `made` the changes that were made already.
    """
    more = row_of(outcome.verdict.cause).second_run
    if outcome.verdict.status not in (Status.FAIL, Status.HANG) or more is None:
        return None
    if len(made) >= MOST_RUNS:
        return None
    wanted = (_fitting(_CHANGES[run], spec) for run in _worth_asking(outcome, more))
    can = (change for change in wanted if change.name not in made and _can(change, spec, outcome, probe))
    return next(can, None)


def deepened(spec: RunSpec, change: Change, of: int) -> RunSpec:
    """The same launch with that one change."""
    declared = {**dict(spec.env), **dict(change.env)}
    settings = dict(spec.settings) | {f"run.env.{name}": value for name, value in change.env}
    settings |= dict([change.setting]) if change.setting else {}
    return replace(
        spec,
        program=_reworded(spec.program, change),
        env=tuple(sorted(declared.items())),
        backend="gloo" if change is GLOO else spec.backend,
        settings=tuple(sorted(settings.items())),
        notes=(*spec.notes, f"to look deeper into attempt {of}: {change.says}"),
        spec_hash=hashlib.sha256(f"{spec.spec_hash} deeper {change.name}".encode()).hexdigest()[:12],
        deepening=Deepening(of=of, change=change.name.value, says=change.says),
    )


def _worth_asking(outcome: Outcome, more: Sequence[SecondRun]) -> Iterator[SecondRun]:
    """What the words of the failure leave open, what tells more of the cause, and anything of what is not certain."""
    if _BY_INDEX.search(outcome.verdict.summary):
        yield SecondRun.NAMES
    if _RECOMPUTED.search(outcome.verdict.summary):
        yield SecondRun.CHECKPOINT_DEBUG
    yield from more
    if min((one.confidence for one in outcome.findings[:1]), default=0.0) < CERTAIN:
        yield from _CHANGES


def _in_backward(outcome: Outcome) -> bool:
    """Raised below autograd's engine: the line at fault is one of the forward pass, and the stack does not have it."""
    place = outcome.culprit.place if outcome.culprit else None
    statement = (place.text or "").splitlines()[-1:] if place else []
    named = any(map(_CALLS_BACKWARD.search, statement)) or _IN_BACKWARD.search(outcome.verdict.summary)
    return outcome.phase == "backward" or bool(named)


def _named(outcome: Outcome) -> bool:
    place = outcome.culprit.place if outcome.culprit else None
    return place is not None and place.parameter is not None


def _fitting(change: Change, spec: RunSpec) -> Change:
    return OUR_ANOMALY if change is ANOMALY and _NO_ANOMALY in spec.program else change


def _can(change: Change, spec: RunSpec, outcome: Outcome, probe: str) -> bool:
    """The change is one for this launch, and says something about an end of this kind."""
    declared, failed = dict(spec.env), outcome.verdict.status is Status.FAIL
    match change.name:
        case SecondRun.NAMES:
            return failed and spec.ranks > 1 and declared.get(_DEBUG, "OFF") == "OFF" and not _named(outcome)
        case SecondRun.ANOMALY:
            on = _ANOMALY in spec.program or protocol.ENV_ANOMALY in declared
            return (
                failed and not on and _in_backward(outcome) and (probe != protocol.PROBE_OFF or change is OUR_ANOMALY)
            )
        case SecondRun.CHECKPOINT_DEBUG:
            asked = outcome.verdict.cause == Cause.CHECKPOINT_RECOMPUTE_MISMATCH
            about = asked or _RECOMPUTED.search(outcome.verdict.summary)
            return failed and probe != protocol.PROBE_OFF and bool(about)
        case SecondRun.LAUNCH_BLOCKING:
            return spec.device == "cuda" and "CUDA_LAUNCH_BLOCKING" not in declared
        case SecondRun.OTHER_BACKEND:
            return _value(spec.program, "--backend") == "nccl"
        case SecondRun.OTHER_ATTENTION:
            return _value(spec.program, "--attention") == "nsa" and _value(spec.program, "--branch") == "all"
    return True


def _value(program: tuple[str, ...], option: str) -> str | None:
    """Of nsa.train alone, which always gets the switch of anomaly detection too."""
    ours = {_NO_ANOMALY, _ANOMALY} & set(program)
    at = program.index(option) + 1 if ours and option in program else len(program)
    return program[at] if at < len(program) else None


def _reworded(program: tuple[str, ...], change: Change) -> tuple[str, ...]:
    if change.switch is not None:
        old, new = change.switch
        return tuple(new if word == old else word for word in program)
    if change.option is None:
        return program
    option, value = change.option
    return tuple(value if before == option else word for before, word in zip(("", *program), program, strict=False))


_PASSED, _SAME, _OTHER = "passed", "the same", "another"
# (change, how it ended beside the first attempt) -> what follows. One pair of runs makes it likely, not certain.
_FOLLOWS = {
    (SecondRun.OTHER_BACKEND, _PASSED): "so it needs NCCL: its transport, or the order of work on the device",
    (SecondRun.OTHER_BACKEND, _SAME): "so it is not NCCL",
    (SecondRun.OTHER_ATTENTION, _PASSED): "so the fault lies in NSA's attention",
    (SecondRun.OTHER_ATTENTION, _SAME): "so it does not need NSA's attention",
    (SecondRun.AGAIN, _PASSED): "so it does not come each time: --repeat=5 says how often",
    (SecondRun.AGAIN, _SAME): "so it comes each time, as far as two attempts tell",
    ("launch_blocking", _SAME): "there the kernel that failed was launched",
    ("names", _PASSED): "so it does not come each time, or depends on time",
    ("anomaly", _PASSED): "so it does not come each time, or depends on time",
    ("checkpoint_debug", _PASSED): "so it does not come each time, or depends on time",
}
_LIKELY, _SEEN = 0.7, 0.95


def with_deeper_runs(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes, in their order: each look says what it showed, and what was looked into has that as a finding.

    Verdicts stay as they are. A place that only a deeper run could name becomes the culprit's. Applied twice it changes
    nothing more.
    """
    return tuple(_looked_into(outcome, outcomes) for outcome in outcomes)


def lesson(base: Outcome, deeper: Outcome) -> Finding:
    """What `deeper` says about `base`, as a finding of `base`."""
    asked = deeper.deepening
    assert asked is not None
    own = _own(deeper)
    how = _how(base, deeper)
    said = own.claim if own else _ended(base, deeper, how)
    follows = "" if own else _FOLLOWS.get((asked.change, how), "")
    losses = _losses(base, deeper) if asked.change == SecondRun.AGAIN else ""
    unlike = f"; it ended otherwise, though: {_verdict(deeper)}" if own and how != _SAME else ""
    return Finding(
        code=Cause.DEEPENED,
        claim=f"with {asked.says} (attempt {deeper.attempt}) {said}{f': {follows}' if follows else ''}{losses}{unlike}",
        ranks=own.ranks if own else (),
        place=own.place if own else None,
        confidence=_SEEN if own and how == _SAME else _LIKELY,
        proof=own.proof if own else ((f"{deeper.dir}/verdict.json",) if deeper.dir else ()),
        advice=own.advice if own else _advice(deeper, asked),
    )


def _looked_into(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    if outcome.deepening is not None:
        base = next((one for one in outcomes if _asks_about(outcome, one)), None)
        return replace(outcome, showed=lesson(base, outcome).claim) if base and not outcome.showed else outcome
    looks = sorted((one for one in outcomes if _asks_about(one, outcome)), key=lambda one: one.attempt)
    known = {one.claim for one in outcome.findings}
    lessons = [(look, found) for look in looks if (found := lesson(outcome, look)).claim not in known]
    if not lessons:
        return outcome
    better = next((one.place for look, one in lessons if one.place and _how(outcome, look) == _SAME), None)
    return replace(
        outcome,
        findings=(*outcome.findings, *(found for _, found in lessons)),
        culprit=_placed(outcome.culprit, better),
    )


def _asks_about(one: Outcome, outcome: Outcome) -> bool:
    asked = one.deepening
    if asked is None or outcome.deepening is not None:
        return False
    return (one.scenario, asked.of) == (outcome.scenario, outcome.attempt)


def _own(deeper: Outcome) -> Finding | None:
    return next((one for one in deeper.findings if one.code == Cause.DEEPENED), None)


def _how(base: Outcome, deeper: Outcome) -> str:
    if deeper.verdict.status is Status.PASS:
        return _PASSED
    alike = (base.verdict.status, base.verdict.cause) == (deeper.verdict.status, deeper.verdict.cause)
    asked = deeper.deepening
    if asked and asked.change == "checkpoint_debug" and _own(deeper):
        # In that mode torch raises the same mismatch in other words.
        alike = base.verdict.status == deeper.verdict.status
    return _SAME if alike else _OTHER


def _ended(base: Outcome, deeper: Outcome, how: str) -> str:
    if how == _PASSED:
        return "it passed"
    if how == _OTHER:
        return f"it ended otherwise: {_verdict(deeper)}"
    before, after = (one.culprit.place if one.culprit else None for one in (base, deeper))
    there, now = place_word(before), place_word(after)
    if there == now:
        return f"it ended the same way{f' at the same line {now}' if now else ''}"
    return f"it ended the same way, at {now or 'no known line'} instead of {there or 'no known line'}"


def _losses(base: Outcome, deeper: Outcome) -> str:
    """Equal to the last digit under one seed, or something in the program is not determined by it."""
    one, other = (outcome.metrics.get("loss_last") for outcome in (base, deeper))
    if one is None or other is None:
        return ""
    return "; the last losses are equal" if one == other else f"; the last losses differ: {one:.9g} and {other:.9g}"


def _verdict(deeper: Outcome) -> str:
    return f"{deeper.verdict.status.value} {deeper.verdict.cause or ''}".strip()


def _advice(deeper: Outcome, asked: Deepening) -> str:
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
