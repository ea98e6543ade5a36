"""Deepening: which further launch, with one change, would answer what a run has left open."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from harness import protocol
from harness.core.diagnosed.causes import Cause, SecondRun, row_of
from harness.core.plan import Deepening, RunSpec
from harness.core.report import Outcome, Status

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
