"""Deeper runs: what each of them, laid beside the attempt it was made for, says about that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.compared.same_place import place_word
from harness.core.diagnosed.causes import Cause, SecondRun
from harness.core.place import Place
from harness.core.plan import Deepening
from harness.core.report import Culprit, Finding, Outcome, Status

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
