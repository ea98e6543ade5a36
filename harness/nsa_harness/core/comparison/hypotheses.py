"""Test hypotheses about causes and fixes by comparing runs that differ in one setting.

Such a pair of runs is called a contrast. A hypothesis without one is not tested; the report then shows the command that
would test it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from nsa_harness.core.comparison.contrasts import (
    NCCL_SETTINGS,
    RELATIONS,
    Comparison,
    Contrast,
    FailureCounts,
    Requirement,
    Variable,
    configuration,
    contrasts,
    failure_counts,
    has_passed,
    is_evidence,
    is_number,
    one_of,
    other_than,
    setting,
    simplicity_key,
    unjudged_pairs,
    unmet_requirements,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.statistics import fails_more_often, runs_to_show
from nsa_harness.core.report import Outcome, Status, Verdict

_MAX_ERROR = 0.05  # accepted probability that an answer from failure counts is wrong
_MAX_NAMED_RUNS = 2  # at most this many runs are named in a reason
NO_CONTROL = "no control run"
_MATRIX_KEY = re.compile(r"(?:^|,)([\w.]+)=")  # in the name of a variant, such as "sweep@gc.mode=reentrant"
_MUCH_SLOWER = 2.0  # a run that takes at least this many times as long as another one is slower than it


def is_our_program(outcome: Outcome) -> bool:
    """Return whether the run belongs to the training program that comes with nsa-harness."""
    return outcome.spec.device != "any" and not {"run.program", "run.command"} & set(configuration(outcome))


class HypothesisKind(StrEnum):
    """The kind of statement that a hypothesis makes about one setting."""

    CAUSE = "cause"  # a run passes without it and fails with it
    CHANGE = "change"  # a run passes on one side and fails on the other
    NEED = "need"  # a run passes with it and fails without it; refuted if all runs that it concerns pass without it


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A statement about one setting, such as "NCCL is the cause", that pairs of runs support or refute."""

    text: str
    kind: HypothesisKind
    variable: Variable
    always_shown: bool = False  # has a row in the table even if no run tests it
    concerns: Callable[[Outcome], bool] = is_our_program  # for a NEED: whether it would matter in a run


def switch(key: str, on: str, *, off: str = "") -> Variable:
    """Return a variable for a setting that changes to `on` from any other value.

    `off` is the value before the change in the command that tests the variable. Without it there is no such command.
    """
    undo, values = ((f"{key}={off}",), (off, on)) if off else ((), None)
    return Variable(
        keys=(key,),
        is_control_value=other_than(on),
        is_changed_value=one_of(on),
        undo_overrides=undo,
        example_values=values,
    )


def swap(
    key: str, control_values: tuple[str, ...], changed_values: tuple[str, ...], *, command_key: str | None = None
) -> Variable:
    """Return a variable for a setting that changes from one of `control_values` to one of `changed_values`.

    `command_key` is the name of the key on the command line, if it differs from `key`.
    """
    undo = (f"{command_key or key}={control_values[0]}",)
    values = (control_values[0], changed_values[0])
    return Variable(
        keys=(key,),
        is_control_value=one_of(*control_values),
        is_changed_value=one_of(*changed_values),
        undo_overrides=undo,
        example_values=values,
    )


def other_than_default(key: str, default: str, example: str) -> Variable:
    """Return a variable for a setting that changes from its default to any other value.

    `example` is the value after the change in the command that tests the variable.
    """
    undo, values = (f"{key}={default}",), (default, example)
    return Variable(
        keys=(key,),
        is_control_value=one_of(default),
        is_changed_value=other_than(default),
        undo_overrides=undo,
        example_values=values,
    )


def rising(key: str, example: tuple[str, str] | None = None) -> Variable:
    """Return a variable for a setting that changes from a smaller to a larger number.

    `example` has both numbers for the command that tests the variable.
    """
    return Variable(
        keys=(key,),
        is_control_value=is_number,
        is_changed_value=is_number,
        relation=RELATIONS[Comparison.MORE],
        example_values=example,
    )


_ON_A_GPU = Requirement(key="device", allows=other_than("cpu"))
NCCL = replace(
    swap("backend", ("gloo",), ("nccl",), command_key="needs.backend"),
    ignored_prefixes=NCCL_SETTINGS,
    requirements=(replace(_ON_A_GPU, only_to_launch=True),),
)
NCCL_HYPOTHESIS = Hypothesis(text="NCCL is the cause", kind=HypothesisKind.CAUSE, variable=NCCL, always_shown=True)
_OVER_NCCL = Requirement(key="backend", allows=other_than("gloo"))
ENVIRONMENT_HYPOTHESES = tuple(
    Hypothesis(
        text=f"{name} changes it",
        kind=HypothesisKind.CHANGE,
        variable=replace(switch(f"run.env.{name}", "1"), requirements=(need,)),
    )
    for name, need in (
        ("NCCL_P2P_DISABLE", _OVER_NCCL),
        ("NCCL_IB_DISABLE", _OVER_NCCL),
        ("CUDA_LAUNCH_BLOCKING", _ON_A_GPU),
    )
)


class HypothesisAnswer(StrEnum):
    """The answer to whether the runs support or refute a hypothesis."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of two compared configurations, represented by a run and the failure counts of all attempts."""

    run: Outcome
    counts: FailureCounts


@dataclass(frozen=True, kw_only=True)
class HypothesisRow:
    """A row in the table of hypotheses. A hypothesis has several rows if pairs of runs disagree."""

    hypothesis: Hypothesis
    answer: HypothesisAnswer
    control: Arm | None  # the side without the suspected cause; None if not tested
    changed: Arm | None  # the side with it; also None if a run without it is enough for the answer
    contrast_counts: tuple[int, int]  # (number of contrasts with this answer, number of all contrasts)
    reason: str
    command: str | None  # the command that tests the hypothesis; None if it is tested or if there is no such command
    cost_s: float | None  # estimated duration of one run of the command


_WEIGHTIEST_FIRST = (
    HypothesisAnswer.SUPPORTED,
    HypothesisAnswer.UNDECIDED,
    HypothesisAnswer.REFUTED,
    HypothesisAnswer.NOT_TESTED,
)


def hypothesis_rows(outcomes: Sequence[Outcome], hypotheses: Sequence[Hypothesis]) -> tuple[HypothesisRow, ...]:
    """Return the table of hypotheses with their answers. It is empty if there is only one run."""
    if sum(outcome.final for outcome in outcomes) < 2:
        return ()
    counts_of = failure_counts(outcomes)
    rate = _lowest_rate(outcomes, counts_of)
    rows = (row for hypothesis in hypotheses for row in _rows(hypothesis, outcomes, counts_of, rate))
    return tuple(sorted(rows, key=lambda row: _WEIGHTIEST_FIRST.index(row.answer)))


def is_row_shown(row: HypothesisRow) -> bool:
    """Return whether the report shows this row, because its hypothesis was tested or is always shown."""
    if row.answer is not HypothesisAnswer.NOT_TESTED:
        return True
    return row.hypothesis.always_shown and (row.command is not None or row.reason != NO_CONTROL)


def reason_not_judged(variable: Variable, outcomes: Sequence[Outcome]) -> str:
    """Return the reason why a pair of runs was not compared, such as "ddp_nccl was SKIP".

    Returns "" if there are no two such runs.
    """
    for pair in unjudged_pairs(variable, outcomes)[:1]:
        end_by_verdict = {verdict: _unjudged_word(verdict) for verdict in (run.verdict for run in pair)}
        return "; ".join(
            f"{run.spec.scenario} was {end_by_verdict[run.verdict]}" for run in pair if end_by_verdict[run.verdict]
        )
    return ""


def _unjudged_word(verdict: Verdict) -> str:
    """Return "SKIP", "ERROR" or "killed" if the verdict says nothing about the program, or else ""."""
    if verdict.status in (Status.SKIP, Status.ERROR):
        return verdict.status.value
    return "killed" if verdict.cause == Cause.KILLED else ""


def _lowest_rate(outcomes: Sequence[Outcome], counts_of: Callable[[Outcome], FailureCounts]) -> float | None:
    """Return the lowest failure rate of any flaky configuration, or None if there is none."""
    # If a configuration fails by chance, one pass and one failure prove nothing.
    rates = [
        counts.failed / counts.attempts
        for outcome in outcomes
        if outcome.final and not (counts := counts_of(outcome)).is_steady
    ]
    return min(rates, default=None)


def _rows(
    hypothesis: Hypothesis,
    outcomes: Sequence[Outcome],
    counts_of: Callable[[Outcome], FailureCounts],
    rate: float | None,
) -> Iterator[HypothesisRow]:
    pairs = contrasts(hypothesis.variable, outcomes)
    if not pairs:
        yield _refuted_need(hypothesis, outcomes, counts_of) or _not_tested(hypothesis, outcomes)
    graded_pairs = [(*_judge_slow(contrast, *_answer(hypothesis.kind, contrast, rate)), contrast) for contrast in pairs]
    is_supported = any(result is HypothesisAnswer.SUPPORTED for result, _, _ in graded_pairs)
    # A setting that makes one configuration fail need not make every other one fail.
    elsewhere = [
        contrast
        for result, _, contrast in graded_pairs
        if is_supported and result is HypothesisAnswer.REFUTED and has_passed(contrast.changed)
    ]
    for answer in HypothesisAnswer:
        with_answer = [
            (reason, contrast)
            for result, reason, contrast in graded_pairs
            if result is answer and contrast not in elsewhere
        ]
        if with_answer:
            reason, contrast = with_answer[0]
            if answer is HypothesisAnswer.SUPPORTED and elsewhere:
                names = [contrast.changed.spec.scenario for contrast in elsewhere[:_MAX_NAMED_RUNS]]
                reason += f"; no difference in {', '.join(names)}"
            yield HypothesisRow(
                hypothesis=hypothesis,
                answer=answer,
                control=Arm(run=contrast.control, counts=contrast.control_counts),
                changed=Arm(run=contrast.changed, counts=contrast.changed_counts),
                contrast_counts=(len(with_answer), len(pairs)),
                reason=reason,
                command=_test_command(hypothesis.variable, contrast.changed)
                if answer is HypothesisAnswer.UNDECIDED
                else None,
                cost_s=None,
            )


def _judge_slow(contrast: Contrast, answer: HypothesisAnswer, reason: str) -> tuple[HypothesisAnswer, str]:
    """Return the answer and the reason of a contrast, corrected for runs that were still active at their deadline.

    Whether a run reaches its deadline depends on the deadline. Such a run counts as worse than one that passed only if
    it takes much longer.
    """
    runs = (contrast.control, contrast.changed)
    slow = [end for run in runs if (end := end_at_deadline(run))]
    passed = [run for run in runs if has_passed(run)]
    is_much_slower = bool(passed and slow) and slow[0].at_least_s >= _MUCH_SLOWER * passed[0].timing.wall_s
    if not slow or is_much_slower or answer is HypothesisAnswer.UNDECIDED:
        return answer, reason
    return HypothesisAnswer.UNDECIDED, "slow with it" if len(slow) == 1 else "slow both ways"


@dataclass(frozen=True, kw_only=True)
class DeadlineEnd:
    """The end of a run that was still active at its deadline."""

    deadline_s: float
    end_s: float | None  # seconds from the launch to the end of the last step at the run's rate; None: not known

    @property
    def at_least_s(self) -> float:
        return self.end_s or self.deadline_s


def end_at_deadline(run: Outcome) -> DeadlineEnd | None:
    """Return how a run that its deadline ended would have gone on, or None if the run did not reach its deadline."""
    facts = next((finding.facts for finding in run.findings if finding.code == Cause.SLOW), {})
    deadline_s, pace = facts.get("deadline_s"), facts.get("pace")
    if run.verdict.cause != Cause.SLOW or not isinstance(deadline_s, int | float):
        return None
    left_s = pace.get("left_s") if isinstance(pace, Mapping) else None
    return DeadlineEnd(deadline_s=deadline_s, end_s=None if left_s is None else deadline_s + left_s)


def _answer(kind: HypothesisKind, contrast: Contrast, rate: float | None) -> tuple[HypothesisAnswer, str]:
    """Return whether one pair of runs supports or refutes the hypothesis, with the reason.

    `rate` is the lowest failure rate of a flaky configuration, or None if nothing fails by chance. Then one run per
    configuration is enough.
    """
    if rate is not None:
        return _answer_by_counts(kind, contrast, rate)
    if has_passed(contrast.control) == has_passed(contrast.changed):
        if has_passed(contrast.control):
            return HypothesisAnswer.REFUTED, "passes with and without it"
        if contrast.ends_same_way:
            return HypothesisAnswer.REFUTED, "ends the same way with and without it"
        return HypothesisAnswer.UNDECIDED, "fails with and without it, in different ways"
    if has_passed(contrast.control):
        return (
            HypothesisAnswer.REFUTED if kind is HypothesisKind.NEED else HypothesisAnswer.SUPPORTED
        ), "fails with it"
    return (
        HypothesisAnswer.REFUTED if kind is HypothesisKind.CAUSE else HypothesisAnswer.SUPPORTED
    ), "passes with it, not without it"


def _answer_by_counts(kind: HypothesisKind, contrast: Contrast, rate: float) -> tuple[HypothesisAnswer, str]:
    """Return whether the failure counts of one pair support or refute the hypothesis, with the reason.

    This is decided by Fisher's exact test at 95 % confidence. `rate` is the lowest failure rate of a flaky
    configuration, and decides how many equal results are enough.
    """
    control, changed = contrast.control_counts, contrast.changed_counts
    if fails_more_often((changed.failed, changed.attempts), (control.failed, control.attempts), 1 - _MAX_ERROR):
        return (
            HypothesisAnswer.REFUTED if kind is HypothesisKind.NEED else HypothesisAnswer.SUPPORTED
        ), "fails more often with it"
    if fails_more_often((control.failed, control.attempts), (changed.failed, changed.attempts), 1 - _MAX_ERROR):
        return (
            HypothesisAnswer.REFUTED if kind is HypothesisKind.CAUSE else HypothesisAnswer.SUPPORTED
        ), "fails less often with it"
    if control.is_steady and changed.is_steady and bool(control.failed) == bool(changed.failed):
        enough = runs_to_show(rate, 1 - _MAX_ERROR) if not control.failed else runs_to_show(1 - rate, 1 - _MAX_ERROR)
        if min(control.attempts, changed.attempts) >= enough and (not control.failed or contrast.ends_same_way):
            return HypothesisAnswer.REFUTED, "ends the same way with and without it, each time"
    return HypothesisAnswer.UNDECIDED, "some configuration fails by chance, and there are too few runs"


def _refuted_need(
    hypothesis: Hypothesis, outcomes: Sequence[Outcome], counts_of: Callable[[Outcome], FailureCounts]
) -> HypothesisRow | None:
    """Return a row that refutes the hypothesis if every run without the setting passes, or else None."""
    key = hypothesis.variable.keys[0]
    runs = [
        run
        for run in outcomes
        if is_evidence(run)
        and is_our_program(run)
        and hypothesis.variable.is_control_value(setting(run, key))
        and hypothesis.concerns(run)
    ]
    if hypothesis.kind is not HypothesisKind.NEED or not runs or not all(map(has_passed, runs)):
        return None
    run = min(runs, key=simplicity_key)
    return HypothesisRow(
        hypothesis=hypothesis,
        answer=HypothesisAnswer.REFUTED,
        control=Arm(run=run, counts=counts_of(run)),
        changed=None,
        contrast_counts=(len(runs), len(runs)),
        reason="passes without it",
        command=None,
        cost_s=None,
    )


def _not_tested(hypothesis: Hypothesis, outcomes: Sequence[Outcome]) -> HypothesisRow:
    reason = reason_not_judged(hypothesis.variable, outcomes)
    # If the machine could not run these scenarios, it cannot run the test either.
    base = None if reason else _base_run(hypothesis.variable, outcomes)
    wall_s = [outcome.timing.wall_s for outcome in outcomes if outcome.final and outcome.timing.wall_s]
    return HypothesisRow(
        hypothesis=hypothesis,
        answer=HypothesisAnswer.NOT_TESTED,
        control=None,
        changed=None,
        contrast_counts=(0, 0),
        reason=reason or NO_CONTROL,
        command=_test_command(hypothesis.variable, base) if base else None,
        cost_s=(base.timing.wall_s or median(wall_s)) if base and wall_s else None,
    )


def _base_run(variable: Variable, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the run from which a test of the variable should start, or None if there is none.

    Runs from which a command can start are preferred, and then those that meet the requirements of the variable.
    """
    our_runs = [outcome for outcome in outcomes if is_evidence(outcome) and is_our_program(outcome)]
    key = variable.keys[0]
    failures = [
        run
        for run in our_runs
        if not (has_passed(run) or run.expected) and variable.is_changed_value(setting(run, key))
    ]
    candidates = failures or [
        run for run in our_runs if has_passed(run) and _fits_either_side(variable, setting(run, key))
    ]
    return min(
        candidates,
        key=lambda run: (
            _test_command(variable, run) is None,
            len(unmet_requirements(variable, run)),
            simplicity_key(run),
        ),
        default=None,
    )


def _fits_either_side(variable: Variable, value: str) -> bool:
    return variable.is_changed_value(value) or variable.is_control_value(value)


def launch_words(run: Outcome, changed_keys: Collection[str] = ()) -> tuple[str, ...]:
    """Return the arguments that select the run's scenario so that further keys can be overridden.

    For a variant of a matrix, these are the scenario and an override for each key of the matrix, except `changed_keys`.
    """
    family, _, variant = run.spec.scenario.partition("@")
    keys = [key for key in _MATRIX_KEY.findall(variant) if key not in changed_keys]
    return (family, *(f"{key}={setting(run, key)}" for key in keys))


def _test_command(variable: Variable, base: Outcome) -> str | None:
    """Return the command that tests a variable, starting from the run `base`, or None if there is none."""
    unmet = unmet_requirements(variable, base)
    if not is_our_program(base) or not all(need.override for need in unmet):
        return None
    overrides = (*(need.override for need in unmet), *variable.command_overrides)
    command_key, *others = (
        (word.partition("=")[0] for word in variable.undo_overrides) if variable.undo_overrides else ("",)
    )
    changed_keys = {*variable.keys, command_key, *others, *(word.partition("=")[0] for word in overrides)}
    base_words = (*launch_words(base, changed_keys), *overrides)
    value = setting(base, variable.keys[0])
    if variable.example_values and not others:
        control, example = variable.example_values
        key = command_key or variable.keys[0]
        is_changed_run = (
            variable.is_changed_value(value)
            and not variable.is_control_value(value)
            and variable.relation(control, value)
        )
        changed_value = value if is_changed_run else example
        return f"nsa-harness claim {shlex.join((*base_words, f'{key}={control},{changed_value}'))}"
    if variable.undo_overrides and variable.is_changed_value(value):
        return f"nsa-harness run {shlex.join((*base_words, *variable.undo_overrides))}"
    return None
