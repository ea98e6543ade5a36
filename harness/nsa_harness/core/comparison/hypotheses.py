"""Test hypotheses, suspected causes and fixes, by contrasts between runs and never by a single run.

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
    unjudged_pairs,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.statistics import more_often, tries
from nsa_harness.core.report import Outcome, Status, Verdict

_BY_CHANCE = 0.05  # accepted probability that an answer by counts is wrong
_SHOWN = 2  # runs that a reason names
NO_CONTROL = "no control run"


def takes_our_keys(outcome: Outcome) -> bool:
    """Whether the run is one of our own program. Other programs have no keys model, gc and parallel."""
    return outcome.spec.device != "any" and not {"run.program", "run.command"} & set(configuration(outcome))


class HypothesisKind(StrEnum):
    CAUSE = "cause"  # a run passes without it, and fails with it
    CHANGE = "change"  # a run passes on one side, and fails on the other
    NEED = "need"  # a run passes with it, and fails without it; refuted if all runs concerned pass without it


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    text: str
    kind: HypothesisKind
    variable: Variable
    prominent: bool = False  # has a row even if no run tests it
    concerns: Callable[[Outcome], bool] = takes_our_keys  # for a NEED: the runs in which it would matter


def switch(key: str, on: str, *, off: str = "") -> Variable:
    """Return a variable that sets `key` to `on` in the changed run. `off` is the control's value for a command."""
    undo, values = ((f"{key}={off}",), (off, on)) if off else ((), None)
    return Variable(keys=(key,), without=other_than(on), with_it=one_of(on), undo=undo, values=values)


def swap(key: str, control: tuple[str, ...], changed: tuple[str, ...], *, typed: str | None = None) -> Variable:
    """Return a variable whose `key` has a value of `control` in the control run and of `changed` in the changed run.

    `typed` is the name of the key in commands, if it differs.
    """
    undo = (f"{typed or key}={control[0]}",)
    values = (control[0], changed[0])
    return Variable(keys=(key,), without=one_of(*control), with_it=one_of(*changed), undo=undo, values=values)


def other_than_default(key: str, default: str, example: str) -> Variable:
    """Return a variable whose key has the default in the control run and any other value in the changed run.

    `example` is another value, for a command.
    """
    undo, values = (f"{key}={default}",), (default, example)
    return Variable(keys=(key,), without=one_of(default), with_it=other_than(default), undo=undo, values=values)


def rising(key: str, example: tuple[str, str] | None = None) -> Variable:
    """Return a variable whose number is larger in the changed run than in the control run."""
    return Variable(
        keys=(key,),
        without=is_number,
        with_it=is_number,
        related=RELATED[Test.MORE],
        values=example,
    )


NCCL = replace(swap("backend", ("gloo",), ("nccl",), typed="needs.backend"), ignored_prefixes=NCCL_SETTINGS)
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
    """One answer to one hypothesis. If contrasts give several answers, the hypothesis has several rows."""

    hypothesis: Hypothesis
    answer: Answer
    control: Side | None  # without the suspect; None if not tested
    changed: Side | None  # None also if a run without the suspect is enough
    of_contrasts: tuple[int, int]  # contrasts with this answer, of all contrasts
    reason: str
    command: str | None  # the command that tests the hypothesis
    cost_s: float | None  # estimated duration of one run of the command


_WEIGHTIEST_FIRST = (Answer.SUPPORTED, Answer.UNDECIDED, Answer.REFUTED, Answer.NOT_TESTED)


def answers(outcomes: Sequence[Outcome], hypotheses: Sequence[Hypothesis]) -> tuple[HypothesisRow, ...]:
    """Return the answers to the hypotheses, the most important first; none for a single run, which has no contrast."""
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


def why_not_judged(variable: Variable, outcomes: Sequence[Outcome]) -> str:
    """Return why a pair of runs that could be a contrast is none, such as "ddp_nccl was SKIP"; "" without a pair."""
    for pair in unjudged_pairs(variable, outcomes)[:1]:
        ended = {verdict: _unjudged_word(verdict) for verdict in (run.verdict for run in pair)}
        return "; ".join(f"{run.spec.scenario} was {ended[run.verdict]}" for run in pair if ended[run.verdict])
    return ""


def _unjudged_word(verdict: Verdict) -> str:
    """Return why the verdict shows nothing about the program, "SKIP", "ERROR" or "killed"; "" if it does."""
    if verdict.status in (Status.SKIP, Status.ERROR):
        return verdict.status.value
    return "killed" if verdict.cause == Cause.KILLED else ""


def _lowest_rate(outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings]) -> float | None:
    """Return the lowest failure rate among configurations that fail only sometimes; None if there are none.

    If something fails by chance, one pass and one failure prove nothing.
    """
    rates = [ended.bad / ended.of for outcome in outcomes if outcome.final and not (ended := of(outcome)).steady]
    return min(rates, default=None)


def _rows(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings], rate: float | None
) -> Iterator[HypothesisRow]:
    pairs = contrasts(hypothesis.variable, outcomes)
    if not pairs:
        yield _refuted_need(hypothesis, outcomes, of) or _not_tested(hypothesis, outcomes)
    graded = [(*_answer(hypothesis.kind, contrast, rate), contrast) for contrast in pairs]
    supported = any(given is Answer.SUPPORTED for given, _, _ in graded)
    # A setting that breaks one configuration need not break every other one.
    elsewhere = [
        contrast for given, _, contrast in graded if supported and given is Answer.REFUTED and passed(contrast.changed)
    ]
    for answer in Answer:
        answering = [
            (reason, contrast) for given, reason, contrast in graded if given is answer and contrast not in elsewhere
        ]
        if answering:
            reason, contrast = answering[0]
            if answer is Answer.SUPPORTED and elsewhere:
                reason += (
                    f"; no difference in {', '.join(contrast.changed.spec.scenario for contrast in elsewhere[:_SHOWN])}"
                )
            yield HypothesisRow(
                hypothesis=hypothesis,
                answer=answer,
                control=Side(run=contrast.control, ended=contrast.controls),
                changed=Side(run=contrast.changed, ended=contrast.changes),
                of_contrasts=(len(answering), len(pairs)),
                reason=reason,
                command=_test_command(hypothesis.variable, contrast.changed) if answer is Answer.UNDECIDED else None,
                cost_s=None,
            )


def _answer(kind: HypothesisKind, contrast: Contrast, rate: float | None) -> tuple[Answer, str]:
    """Return the answer of one contrast, with its reason. If nothing fails by chance, one run per side is enough."""
    if rate is not None:
        return _by_counts(kind, contrast, rate)
    if passed(contrast.control) == passed(contrast.changed):
        if passed(contrast.control):
            return Answer.REFUTED, "passes with and without it"
        if contrast.ends_alike:
            return Answer.REFUTED, "ends the same way with and without it"
        return Answer.UNDECIDED, "ends badly with and without it, not alike"
    if passed(contrast.control):
        return (Answer.REFUTED if kind is HypothesisKind.NEED else Answer.SUPPORTED), "breaks it"
    return (Answer.REFUTED if kind is HypothesisKind.CAUSE else Answer.SUPPORTED), "passes with it, not without it"


def _by_counts(kind: HypothesisKind, contrast: Contrast, rate: float) -> tuple[Answer, str]:
    """Return the answer of one contrast by Fisher's exact test at 95 %, if something fails by chance at that rate."""
    control, changed = contrast.controls, contrast.changes
    if more_often((changed.bad, changed.of), (control.bad, control.of), 1 - _BY_CHANCE):
        return (Answer.REFUTED if kind is HypothesisKind.NEED else Answer.SUPPORTED), "fails more often with it"
    if more_often((control.bad, control.of), (changed.bad, changed.of), 1 - _BY_CHANCE):
        return (Answer.REFUTED if kind is HypothesisKind.CAUSE else Answer.SUPPORTED), "fails less often with it"
    if control.steady and changed.steady and bool(control.bad) == bool(changed.bad):
        enough = tries(rate, 1 - _BY_CHANCE) if not control.bad else tries(1 - rate, 1 - _BY_CHANCE)
        if min(control.of, changed.of) >= enough and (not control.bad or contrast.ends_alike):
            return Answer.REFUTED, "ends the same way with and without it, each time"
    return Answer.UNDECIDED, "something here fails by chance, and these are too few runs"


def _refuted_need(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], of: Callable[[Outcome], Endings]
) -> HypothesisRow | None:
    """Return the row that refutes a NEED because every run concerned passes without it, or None."""
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
    silent = why_not_judged(hypothesis.variable, outcomes)
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
    """Return the run from which to test a hypothesis: an unexpected failure with the suspect, else one that passed."""
    ours = [outcome for outcome in outcomes if is_evidence(outcome) and takes_our_keys(outcome)]
    key = variable.keys[0]
    bad = [run for run in ours if not (passed(run) or run.expected) and variable.with_it(setting(run, key))]
    fitting = bad or [run for run in ours if passed(run) and _fits_either_side(variable, setting(run, key))]
    return min(fitting, key=simplest, default=None)


def _fits_either_side(variable: Variable, value: str) -> bool:
    return variable.with_it(value) or variable.without(value)


def _test_command(variable: Variable, base: Outcome) -> str | None:
    """Return a command that makes both sides of a contrast from this run, or the missing side; None if impossible."""
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
