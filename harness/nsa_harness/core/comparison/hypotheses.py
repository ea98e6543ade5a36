"""Hypotheses: what people blame or hope for, each against the contrasts that can tell, and never against a single run.

What no contrast tells is not tested, with the command that tests it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from nsa_harness.core.comparison.contrasts import (
    NCCL_SETTINGS,
    Contrast,
    Endings,
    Variable,
    blocked_pairs,
    configuration,
    contrasts,
    endings,
    is_evidence,
    is_number,
    one_of,
    other_than,
    passed,
    plainness,
    setting,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.statistics import more_often, tries
from nsa_harness.core.report import Outcome, Status, Verdict

_BY_CHANCE = 0.05  # as often may an answer by counts be wrong
_SHOWN = 2  # runs
NO_CONTROL = "no control run"


def takes_our_keys(outcome: Outcome) -> bool:
    """The program is ours. A foreign one knows nothing of model, gc and parallel, and chooses its device itself."""
    return outcome.device != "any" and not {"run.program", "run.command"} & set(configuration(outcome))


class HypothesisKind(StrEnum):
    CAUSE = "cause"  # without it a run passes, with it it does not
    CHANGE = "change"  # with and without it, one run passes and the other does not
    NEED = "need"  # with it a run passes, without it it does not; refuted where all pass without it that it concerns


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    text: str
    kind: HypothesisKind
    factor: Variable
    prominent: bool = False  # has a row of its own also where nothing tests it
    concerns: Callable[[Outcome], bool] = takes_our_keys  # of a need: the runs in which it would matter


def switch(key: str, on: str, *, off: str = "") -> Variable:
    undo, values = ((f"{key}={off}",), (off, on)) if off else ((), None)
    return Variable(keys=(key,), without=other_than(on), with_it=one_of(on), undo=undo, values=values)


def swap(key: str, control: tuple[str, ...], changed: tuple[str, ...], *, typed: str | None = None) -> Variable:
    """`typed`: the key as the command line knows it."""
    undo = (f"{typed or key}={control[0]}",)
    values = (control[0], changed[0])
    return Variable(keys=(key,), without=one_of(*control), with_it=one_of(*changed), undo=undo, values=values)


def besides_default(key: str, default: str, example: str) -> Variable:
    """`example`: another value, to try it with."""
    undo, values = (f"{key}={default}",), (default, example)
    return Variable(keys=(key,), without=one_of(default), with_it=other_than(default), undo=undo, values=values)


def rising(key: str, example: tuple[str, str] | None = None) -> Variable:
    return Variable(
        keys=(key,),
        without=is_number,
        with_it=is_number,
        related=lambda control, changed: float(control) < float(changed),
        values=example,
    )


NCCL = replace(swap("backend", ("gloo",), ("nccl",), typed="needs.backend"), besides=NCCL_SETTINGS)
NCCL_HYPOTHESIS = Hypothesis(text="NCCL is the cause", kind=HypothesisKind.CAUSE, factor=NCCL, prominent=True)
ENVIRONMENT_HYPOTHESES = tuple(
    Hypothesis(text=f"{name} changes it", kind=HypothesisKind.CHANGE, factor=switch(f"run.env.{name}", "1"))
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")
)


class Answer(StrEnum):
    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a contrast: the run that stands for it, and how all its attempts ended."""

    run: Outcome
    ended: Endings


@dataclass(frozen=True, kw_only=True)
class HypothesisRow:
    """One hypothesis with one answer. Where contrasts answer differently it has a row for each answer."""

    hypothesis: Hypothesis
    answer: Answer
    control: Side | None  # without what is blamed; None where it is not tested
    changed: Side | None  # None also where a run without it is enough
    of_contrasts: tuple[int, int]  # how many say so, of how many
    reason: str
    command: str | None  # what tests it
    cost_s: float | None  # of one of its runs, as those here took


_WEIGHTIEST_FIRST = (Answer.SUPPORTED, Answer.UNDECIDED, Answer.REFUTED, Answer.NOT_TESTED)


def answers(outcomes: Sequence[Outcome], hypotheses: Sequence[Hypothesis]) -> tuple[HypothesisRow, ...]:
    """Of several runs, the weightiest answers first; of a single one, which has no contrast, none."""
    if sum(outcome.final for outcome in outcomes) < 2:
        return ()
    of = endings(outcomes)
    rate = _lowest_rate(outcomes, of)
    rows = (row for one in hypotheses for row in _rows(one, outcomes, of, rate))
    return tuple(sorted(rows, key=lambda row: _WEIGHTIEST_FIRST.index(row.answer)))


def worth_a_row(row: HypothesisRow) -> bool:
    """It was tested, or is one of those that everybody asks for, and something can be said of it."""
    if row.answer is not Answer.NOT_TESTED:
        return True
    return row.hypothesis.prominent and (row.command is not None or row.reason != NO_CONTROL)


def silenced(factor: Variable, outcomes: Sequence[Outcome]) -> str:
    """ "ddp_nccl was SKIP": why runs that would have answered say nothing; empty where there are none."""
    for pair in blocked_pairs(factor, outcomes)[:1]:
        ended = {one: _unjudged_word(one) for one in (run.verdict for run in pair)}
        return "; ".join(f"{run.scenario} was {ended[run.verdict]}" for run in pair if ended[run.verdict])
    return ""


def _unjudged_word(verdict: Verdict) -> str:
    """Empty of a run that tells of the program."""
    if verdict.status in (Status.SKIP, Status.ERROR):
        return verdict.status.value
    return "killed" if verdict.cause == Cause.KILLED else ""


def _lowest_rate(outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings]) -> float | None:
    """How often fails what fails least often among what does not fail each time; None where all is steady.

    As long as something fails by chance, one pass and one failure are no contrast.
    """
    rates = [ended.bad / ended.of for one in outcomes if one.final and not (ended := of(one)).steady]
    return min(rates, default=None)


def _rows(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings], rate: float | None
) -> Iterator[HypothesisRow]:
    found = contrasts(hypothesis.factor, outcomes)
    if not found:
        yield _without_it(hypothesis, outcomes, of) or _not_tested(hypothesis, outcomes)
    said = [(*_answer(hypothesis.kind, one, rate), one) for one in found]
    supported = any(given is Answer.SUPPORTED for given, _, _ in said)
    # What breaks it in one place need not do so in every other one.
    elsewhere = [one for given, _, one in said if supported and given is Answer.REFUTED and passed(one.changed)]
    for answer in Answer:
        saying = [(reason, one) for given, reason, one in said if given is answer and one not in elsewhere]
        if saying:
            reason, one = saying[0]
            if answer is Answer.SUPPORTED and elsewhere:
                reason += f"; no difference in {', '.join(one.changed.scenario for one in elsewhere[:_SHOWN])}"
            yield HypothesisRow(
                hypothesis=hypothesis,
                answer=answer,
                control=Side(run=one.control, ended=one.controls),
                changed=Side(run=one.changed, ended=one.changes),
                of_contrasts=(len(saying), len(found)),
                reason=reason,
                command=_test_command(hypothesis.factor, one.changed) if answer is Answer.UNDECIDED else None,
                cost_s=None,
            )


def _answer(kind: HypothesisKind, one: Contrast, rate: float | None) -> tuple[Answer, str]:
    """With its reason. Where nothing fails by chance, one run of each side tells."""
    if rate is not None:
        return _by_counts(kind, one, rate)
    if passed(one.control) == passed(one.changed):
        if passed(one.control):
            return Answer.REFUTED, "passes with and without it"
        if one.ends_alike:
            return Answer.REFUTED, "ends the same way with and without it"
        return Answer.UNDECIDED, "ends badly with and without it, not alike"
    if passed(one.control):
        return (Answer.REFUTED if kind is HypothesisKind.NEED else Answer.SUPPORTED), "breaks it"
    return (Answer.REFUTED if kind is HypothesisKind.CAUSE else Answer.SUPPORTED), "passes with it, not without it"


def _by_counts(kind: HypothesisKind, one: Contrast, rate: float) -> tuple[Answer, str]:
    """Something fails by chance, at that rate or more often: by Fisher's exact test, at 95 %."""
    control, changed = one.controls, one.changes
    if more_often((changed.bad, changed.of), (control.bad, control.of), 1 - _BY_CHANCE):
        return (Answer.REFUTED if kind is HypothesisKind.NEED else Answer.SUPPORTED), "fails more often with it"
    if more_often((control.bad, control.of), (changed.bad, changed.of), 1 - _BY_CHANCE):
        return (Answer.REFUTED if kind is HypothesisKind.CAUSE else Answer.SUPPORTED), "fails less often with it"
    if control.steady and changed.steady and bool(control.bad) == bool(changed.bad):
        enough = tries(rate, 1 - _BY_CHANCE) if not control.bad else tries(1 - rate, 1 - _BY_CHANCE)
        if min(control.of, changed.of) >= enough and (not control.bad or one.ends_alike):
            return Answer.REFUTED, "ends the same way with and without it, each time"
    return Answer.UNDECIDED, "something here fails by chance, and these are too few runs"


def _without_it(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings]
) -> HypothesisRow | None:
    """What is said to be needed is not, where every run passes without it in which it would matter."""
    key = hypothesis.factor.keys[0]
    runs = [
        run
        for run in outcomes
        if is_evidence(run)
        and takes_our_keys(run)
        and hypothesis.factor.without(setting(run, key))
        and hypothesis.concerns(run)
    ]
    if hypothesis.kind is not HypothesisKind.NEED or not runs or not all(map(passed, runs)):
        return None
    run = min(runs, key=plainness)
    return HypothesisRow(
        hypothesis=hypothesis,
        answer=Answer.REFUTED,
        control=Side(run=run, ended=of(run)),
        changed=None,
        of_contrasts=(len(runs), len(runs)),
        reason="passes without it",
        command=None,
        cost_s=None,
    )


def _not_tested(hypothesis: Hypothesis, outcomes: Sequence[Outcome]) -> HypothesisRow:
    silent = silenced(hypothesis.factor, outcomes)
    # What this machine could not run it cannot test either.
    base = None if silent else _base(hypothesis.factor, outcomes)
    wall_s = [one.timing.wall_s for one in outcomes if one.final and one.timing.wall_s]
    return HypothesisRow(
        hypothesis=hypothesis,
        answer=Answer.NOT_TESTED,
        control=None,
        changed=None,
        of_contrasts=(0, 0),
        reason=silent or NO_CONTROL,
        command=_test_command(hypothesis.factor, base) if base else None,
        cost_s=(base.timing.wall_s or median(wall_s)) if base and wall_s else None,
    )


def _base(factor: Variable, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The run to test it with: an unannounced failure in which what is blamed was on; else one that passed."""
    ours = [one for one in outcomes if is_evidence(one) and takes_our_keys(one)]
    key = factor.keys[0]
    bad = [one for one in ours if not (passed(one) or one.expected) and factor.with_it(setting(one, key))]
    fitting = bad or [one for one in ours if passed(one) and _either(factor, setting(one, key))]
    return min(fitting, key=plainness, default=None)


def _either(factor: Variable, value: str) -> bool:
    return factor.with_it(value) or factor.without(value)


def _test_command(factor: Variable, base: Outcome) -> str | None:
    """Both sides of the contrast, made from this run."""
    if not takes_our_keys(base):
        return None
    typed, *others = (word.partition("=")[0] for word in factor.undo) if factor.undo else ("",)
    value = setting(base, factor.keys[0])
    if factor.values and not others:
        control, example = factor.values
        key = typed or factor.keys[0]
        blamed = factor.with_it(value) and not factor.without(value) and factor.related(control, value)
        changed = value if blamed else example
        return f"nsa-harness claim {shlex.join((base.scenario, f'{key}={control},{changed}'))}"
    if factor.undo and factor.with_it(value):
        return f"nsa-harness run {shlex.join((base.scenario, *factor.undo))}"
    return None
