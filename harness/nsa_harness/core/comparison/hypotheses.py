"""Hypotheses: suspected causes and fixes, each tested against contrasts and never against a single run.

A hypothesis without a contrast is not tested, and gets the command that tests it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from nsa_harness.core.comparison.contrasts import (
    NCCL_SETTINGS,
    RELATED,
    Contrast,
    Endings,
    Test,
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
    setting,
    simplest,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.statistics import more_often, tries
from nsa_harness.core.report import Outcome, Status, Verdict

_BY_CHANCE = 0.05  # probability of a wrong answer by counts
_SHOWN = 2  # runs
NO_CONTROL = "no control run"


def takes_our_keys(outcome: Outcome) -> bool:
    """Whether the program is ours. Another one has no keys model, gc and parallel, and chooses its device itself."""
    return outcome.spec.device != "any" and not {"run.program", "run.command"} & set(configuration(outcome))


class HypothesisKind(StrEnum):
    CAUSE = "cause"  # a run passes without it, and fails with it
    CHANGE = "change"  # a run passes on one side, and fails on the other
    NEED = "need"  # a run passes with it, and fails without it; refuted if all runs that it concerns pass without it


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    text: str
    kind: HypothesisKind
    variable: Variable
    prominent: bool = False  # has a row even if no run tests it
    concerns: Callable[[Outcome], bool] = takes_our_keys  # of a need: the runs in which it would matter


def switch(key: str, on: str, *, off: str = "") -> Variable:
    undo, values = ((f"{key}={off}",), (off, on)) if off else ((), None)
    return Variable(keys=(key,), without=other_than(on), with_it=one_of(on), undo=undo, values=values)


def swap(key: str, control: tuple[str, ...], changed: tuple[str, ...], *, typed: str | None = None) -> Variable:
    """Return a variable with named values on both sides. `typed` is the key on the command line."""
    undo = (f"{typed or key}={control[0]}",)
    values = (control[0], changed[0])
    return Variable(keys=(key,), without=one_of(*control), with_it=one_of(*changed), undo=undo, values=values)


def besides_default(key: str, default: str, example: str) -> Variable:
    """Return a variable for any value but the default. `example` is another value to try."""
    undo, values = (f"{key}={default}",), (default, example)
    return Variable(keys=(key,), without=one_of(default), with_it=other_than(default), undo=undo, values=values)


def rising(key: str, example: tuple[str, str] | None = None) -> Variable:
    return Variable(
        keys=(key,),
        without=is_number,
        with_it=is_number,
        related=RELATED[Test.MORE],
        values=example,
    )


NCCL = replace(swap("backend", ("gloo",), ("nccl",), typed="needs.backend"), besides=NCCL_SETTINGS)
NCCL_HYPOTHESIS = Hypothesis(text="NCCL is the cause", kind=HypothesisKind.CAUSE, variable=NCCL, prominent=True)
ENVIRONMENT_HYPOTHESES = tuple(
    Hypothesis(text=f"{name} changes it", kind=HypothesisKind.CHANGE, variable=switch(f"run.env.{name}", "1"))
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")
)


class Answer(StrEnum):
    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a contrast: its representative run, and how all its attempts ended."""

    run: Outcome
    ended: Endings


@dataclass(frozen=True, kw_only=True)
class HypothesisRow:
    """One hypothesis with one answer. If contrasts answer differently it has a row for each answer."""

    hypothesis: Hypothesis
    answer: Answer
    control: Side | None  # without the suspect; None if not tested
    changed: Side | None  # None also if a run without the suspect is enough
    of_contrasts: tuple[int, int]  # contrasts with this answer, of all contrasts
    reason: str
    command: str | None  # the command that tests it
    cost_s: float | None  # of one of its runs, estimated from these runs


_WEIGHTIEST_FIRST = (Answer.SUPPORTED, Answer.UNDECIDED, Answer.REFUTED, Answer.NOT_TESTED)


def answers(outcomes: Sequence[Outcome], hypotheses: Sequence[Hypothesis]) -> tuple[HypothesisRow, ...]:
    """Return the answers of several runs, the most important first; none for a single run, which has no contrast."""
    if sum(outcome.final for outcome in outcomes) < 2:
        return ()
    of = endings(outcomes)
    rate = _lowest_rate(outcomes, of)
    rows = (row for hypothesis in hypotheses for row in _rows(hypothesis, outcomes, of, rate))
    return tuple(sorted(rows, key=lambda row: _WEIGHTIEST_FIRST.index(row.answer)))


def worth_a_row(row: HypothesisRow) -> bool:
    """Whether the row is shown: it was tested, or is prominent and has a command or a reason."""
    if row.answer is not Answer.NOT_TESTED:
        return True
    return row.hypothesis.prominent and (row.command is not None or row.reason != NO_CONTROL)


def silenced(variable: Variable, outcomes: Sequence[Outcome]) -> str:
    """Return why runs that would have answered do not, such as "ddp_nccl was SKIP"; "" if there are none."""
    for pair in blocked_pairs(variable, outcomes)[:1]:
        ended = {one: _unjudged_word(one) for one in (run.verdict for run in pair)}
        return "; ".join(f"{run.spec.scenario} was {ended[run.verdict]}" for run in pair if ended[run.verdict])
    return ""


def _unjudged_word(verdict: Verdict) -> str:
    """Return "" for a run that was judged on its program."""
    if verdict.status in (Status.SKIP, Status.ERROR):
        return verdict.status.value
    return "killed" if verdict.cause == Cause.KILLED else ""


def _lowest_rate(outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings]) -> float | None:
    """Return the lowest failure rate among configurations that fail sometimes; None if all are steady.

    As long as something fails by chance, one pass and one failure are no contrast.
    """
    rates = [ended.bad / ended.of for outcome in outcomes if outcome.final and not (ended := of(outcome)).steady]
    return min(rates, default=None)


def _rows(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings], rate: float | None
) -> Iterator[HypothesisRow]:
    found = contrasts(hypothesis.variable, outcomes)
    if not found:
        yield _without_it(hypothesis, outcomes, of) or _not_tested(hypothesis, outcomes)
    said = [(*_answer(hypothesis.kind, one, rate), one) for one in found]
    supported = any(given is Answer.SUPPORTED for given, _, _ in said)
    # What breaks one configuration need not break every other one.
    elsewhere = [one for given, _, one in said if supported and given is Answer.REFUTED and passed(one.changed)]
    for answer in Answer:
        saying = [(reason, one) for given, reason, one in said if given is answer and one not in elsewhere]
        if saying:
            reason, one = saying[0]
            if answer is Answer.SUPPORTED and elsewhere:
                reason += f"; no difference in {', '.join(one.changed.spec.scenario for one in elsewhere[:_SHOWN])}"
            yield HypothesisRow(
                hypothesis=hypothesis,
                answer=answer,
                control=Side(run=one.control, ended=one.controls),
                changed=Side(run=one.changed, ended=one.changes),
                of_contrasts=(len(saying), len(found)),
                reason=reason,
                command=_test_command(hypothesis.variable, one.changed) if answer is Answer.UNDECIDED else None,
                cost_s=None,
            )


def _answer(kind: HypothesisKind, one: Contrast, rate: float | None) -> tuple[Answer, str]:
    """Return the answer with its reason. If nothing fails by chance, one run of each side is enough."""
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
    """Return the answer by Fisher's exact test, at 95 %, for failures by chance at that rate or more often."""
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
    """Return the refutation of a need if every run that it concerns passes without it."""
    key = hypothesis.variable.keys[0]
    runs = [
        run
        for run in outcomes
        if is_evidence(run)
        and takes_our_keys(run)
        and hypothesis.variable.without(setting(run, key))
        and hypothesis.concerns(run)
    ]
    if hypothesis.kind is not HypothesisKind.NEED or not runs or not all(map(passed, runs)):
        return None
    run = min(runs, key=simplest)
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
    silent = silenced(hypothesis.variable, outcomes)
    # A machine that could not make these runs cannot make the test either.
    base = None if silent else _base(hypothesis.variable, outcomes)
    wall_s = [outcome.timing.wall_s for outcome in outcomes if outcome.final and outcome.timing.wall_s]
    return HypothesisRow(
        hypothesis=hypothesis,
        answer=Answer.NOT_TESTED,
        control=None,
        changed=None,
        of_contrasts=(0, 0),
        reason=silent or NO_CONTROL,
        command=_test_command(hypothesis.variable, base) if base else None,
        cost_s=(base.timing.wall_s or median(wall_s)) if base and wall_s else None,
    )


def _base(variable: Variable, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the run to test with: an unexpected failure with the suspect enabled; else one that passed."""
    ours = [outcome for outcome in outcomes if is_evidence(outcome) and takes_our_keys(outcome)]
    key = variable.keys[0]
    bad = [one for one in ours if not (passed(one) or one.expected) and variable.with_it(setting(one, key))]
    fitting = bad or [one for one in ours if passed(one) and _fits_either_side(variable, setting(one, key))]
    return min(fitting, key=simplest, default=None)


def _fits_either_side(variable: Variable, value: str) -> bool:
    return variable.with_it(value) or variable.without(value)


def _test_command(variable: Variable, base: Outcome) -> str | None:
    """Return a command that makes both sides of the contrast from this run."""
    if not takes_our_keys(base):
        return None
    typed, *others = (word.partition("=")[0] for word in variable.undo) if variable.undo else ("",)
    value = setting(base, variable.keys[0])
    if variable.values and not others:
        control, example = variable.values
        key = typed or variable.keys[0]
        blamed = variable.with_it(value) and not variable.without(value) and variable.related(control, value)
        changed = value if blamed else example
        return f"nsa-harness claim {shlex.join((base.spec.scenario, f'{key}={control},{changed}'))}"
    if variable.undo and variable.with_it(value):
        return f"nsa-harness run {shlex.join((base.spec.scenario, *variable.undo))}"
    return None
