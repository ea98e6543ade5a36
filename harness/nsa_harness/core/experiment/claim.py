"""Decide, based on repeated runs, whether a change to a program makes it fail less often.

The first side is the program without the change, the second side the program with it. Both are run in pairs, in random
order. This module decides when the failure counts are enough, when a failure counts as fixed, and what else differs
between the sides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from statistics import median

from nsa_harness.core.experiment.statistics import (
    PairOrderTest,
    RateDifferenceTest,
    RateRatioTest,
    interval,
    passes_to_show,
)
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.search.question import ProbeResult

MIN_REDUCTION = 0.5  # a change must prevent at least this share of the failures to count as a mitigation
MAX_PAIRS = 100  # maximum number of pairs of trials; the same limit as for both ends of a bisection
_MAX_EXCESS_UNJUDGED = 2  # one side may have this many more unjudged than judged trials
_COMPARED_STEPS = 10  # only the first steps of each trial are compared, because rounding grows from step to step
_MIN_COMPARED_TRIALS = 2  # each side needs this many trials with numbers before the numbers are compared

FIRST, SECOND = 0, 1  # indices of the side without the change, and of the side with it


class ClaimResult(StrEnum):
    """The result of testing the claim that a change makes a program fail less often."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """The number of runs with or without a change that failed, and the ways in which they failed."""

    bad: int  # number of failed trials
    judged: int  # number of trials that could be judged
    unjudged: int  # number of trials that could not be judged
    ends: Mapping[str, int]  # how often each failure occurred, the most frequent first
    slow: int = 0  # number of failed trials that were still active at their deadline
    wall_s: float = 0.0  # median time of the judged trials

    @property
    def rate(self) -> float | None:
        """The fraction of runs that failed, or None if no run could be judged."""
        return self.bad / self.judged if self.judged else None

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the confidence interval of the failure rate."""
        return interval(self.bad, self.judged, confidence)

    def __str__(self) -> str:
        return f"{self.bad} of {self.judged}"


def count(trials: Iterable[Trial], side: int) -> FailureCount:
    """Count the failed runs on one side: without the change (FIRST) or with it (SECOND)."""
    trials_of_side = [trial for trial in trials if trial.config == side]
    judged_trials = [trial for trial in trials_of_side if trial.judged]
    failures = [trial.end for trial in judged_trials if not trial.passed]
    ends = dict(Counter(failures).most_common())
    return FailureCount(
        bad=len(failures), judged=len(judged_trials), unjudged=len(trials_of_side) - len(judged_trials), ends=ends,
        slow=sum(trial.is_slow for trial in judged_trials if not trial.passed),
        wall_s=median(trial.wall_s for trial in judged_trials) if judged_trials else 0.0,
    )  # fmt: skip


# When a failure counts as fixed.


class FixStatus(StrEnum):
    """The answer to whether a change has removed a failure completely."""

    YES = "yes"  # no failure in enough runs to have shown it
    NOT_YET = "not yet"  # no failure, but too few runs
    NO = "no"  # it still occurs


def fix_status(first: FailureCount, second: FailureCount, confidence: float) -> FixStatus | None:
    """Return whether the change has removed the failure, or None if there was none but slow runs without the change."""
    if first.bad == first.slow:
        return None
    if second.bad:
        return FixStatus.NO
    needed_passes = passes_to_show(first.bad, first.judged, confidence)
    return FixStatus.YES if second.judged >= needed_passes else FixStatus.NOT_YET


# What both sides compute.


@dataclass(frozen=True, kw_only=True)
class NumberComparison:
    """A comparison of the loss and other numbers that a program computes with and without a change."""

    is_same: bool | None  # whether all numbers are equal up to rounding; None: not known
    steps: int = 0  # number of compared steps
    name: str = ""  # "grad_norm"
    step: int | None = None  # None: a number of the whole run
    first: float = 0.0  # its value on the first side
    second: float = 0.0  # its value on the second side
    difference: float = 0.0  # the difference between the sides, as a share of the larger value
    within_side: float = 0.0  # the largest such difference between trials of one side


def compare_numbers(trials: Sequence[Trial], tolerance: float) -> NumberComparison:
    """Compare the numbers computed on both sides. A relative difference up to `tolerance` counts as rounding."""
    numbers_by_side = [_numbers(trials, side) for side in (FIRST, SECOND)]
    common = [key for key in numbers_by_side[FIRST] if key in numbers_by_side[SECOND]]
    if not common:
        return NumberComparison(is_same=None)
    differences = [_compare(*key, numbers_by_side[FIRST][key], numbers_by_side[SECOND][key]) for key in common]
    largest = max(differences, key=lambda number: number.difference - 2 * number.within_side)
    is_same = not any(number.difference > max(tolerance, 2 * number.within_side) for number in differences)
    return replace(largest, is_same=is_same, steps=len({step for step, _ in common if step is not None}))


NO_GRADIENT = "parameters without a gradient"
_Key = tuple[int | None, str]


def _numbers(trials: Sequence[Trial], side: int) -> dict[_Key, list[float]]:
    """Return the values of each computed number in the first steps, collected from all runs of one side."""
    values: dict[_Key, list[float]] = {}
    for trial in trials:
        if trial.config != side:
            continue
        if trial.without_gradient is not None:
            values.setdefault((None, NO_GRADIENT), []).append(float(trial.without_gradient))
        first_steps = sorted({number.step for number in trial.computed})[:_COMPARED_STEPS]
        for number in trial.computed:
            if number.step in first_steps:
                values.setdefault((number.step, number.name), []).append(number.value)
    return values


def _compare(step: int | None, name: str, first: Sequence[float], second: Sequence[float]) -> NumberComparison:
    medians = median(first), median(second)
    within_sides = max(_relative_difference(min(values), max(values)) for values in (first, second))
    return NumberComparison(
        is_same=None,
        name=name,
        step=step,
        first=medians[0],
        second=medians[1],
        difference=_relative_difference(*medians),
        within_side=within_sides,
    )


def _relative_difference(first: float, second: float) -> float:
    """Return the difference relative to the larger value; if one is not finite, 0 for equal values or infinity."""
    if math.isfinite(first) and math.isfinite(second):
        return abs(first - second) / (max(abs(first), abs(second)) or 1.0)
    return 0.0 if first == second or (math.isnan(first) and math.isnan(second)) else math.inf


# What else differs.


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and range of one measured quantity over several runs."""

    middle: float  # the median
    low: float
    high: float
    count: int  # number of trials


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A quantity, such as the step time, that was measured in passing runs with and without the change."""

    name: str
    unit: str  # "s", "bytes", or empty
    first: Spread | None  # None: no trial of this side has the quantity
    second: Spread | None

    @property
    def change(self) -> float | None:
        """The relative difference of the medians with and without the change, or None if it is unknown."""
        if self.first is None or self.second is None or not self.first.middle:
            return None
        return self.second.middle / self.first.middle - 1

    @property
    def overlaps(self) -> bool:
        """Whether the values with and without the change overlap, which means that a difference could be chance."""
        first, second = self.first, self.second
        return first is not None and second is not None and first.low <= second.high and second.low <= first.high


_QUANTITIES = (
    ("step time", "s", "step_s"),
    ("run time", "s", "wall_s"),
    ("loss", "", "loss"),
    ("memory", "bytes", "rss_bytes"),
    ("GPU memory", "bytes", "gpu_bytes"),
)


def effects(trials: Sequence[Trial]) -> Iterator[Effect]:
    """Yield the step time, memory and other quantities, measured with and without the change."""
    for name, unit, attribute in _QUANTITIES:
        first, second = (_spread(trials, side, attribute) for side in (FIRST, SECOND))
        if first is not None or second is not None:
            yield Effect(name=name, unit=unit, first=first, second=second)


def _spread(trials: Sequence[Trial], side: int, attribute: str) -> Spread | None:
    raw_values = (getattr(trial, attribute) for trial in trials if trial.config == side and trial.passed)
    values = [float(value) for value in raw_values if value is not None and math.isfinite(value)]
    if not values:
        return None
    return Spread(middle=median(values), low=min(values), high=max(values), count=len(values))


# The decision.


@dataclass(frozen=True, kw_only=True)
class ClaimTerms:
    """The rules by which a claim is tested, fixed before the first run."""

    confidence: float
    max_pairs: int = MAX_PAIRS
    controls: int = 3  # the test ends undecided after this many pairs without any failure
    must_compute_same: bool = False  # the claim is refuted if the change alters the computed numbers
    tolerance: float = 0.0  # largest relative difference of computed numbers that counts as rounding
    order_seed: int = 0  # decides which side of each pair runs first


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The conclusion on whether a claim is supported or refuted, with the reason."""

    result: ClaimResult
    why: str  # the reason as a sentence
    is_by_counts: bool = False  # the failure counts decided, so the result holds at the requested confidence
    is_by_deadline: bool = False  # the sides differ only because the deadline lies between their durations


_LESS, _MORE, _TOO_MANY = (
    "it fails less often",
    "it fails more often with it",
    "it does not prevent half of the failures",
)


class _PairTests:
    """The tests of the failure counts, updated after each pair of runs."""

    def __init__(self) -> None:
        self._difference_test = RateDifferenceTest()
        self._order_test = PairOrderTest()
        self._remaining_test = RateRatioTest(1 - MIN_REDUCTION)

    @property
    def pairs(self) -> int:
        return self._difference_test.pairs

    @property
    def failures(self) -> int:
        return self._difference_test.first_bad + self._difference_test.second_bad

    def add_pair(self, first_bad: bool, second_bad: bool) -> None:
        for test in (self._difference_test, self._order_test, self._remaining_test):
            test.add_pair(first_bad, second_bad)

    def decide(self, confidence: float) -> str | None:
        """Return _LESS, _MORE or _TOO_MANY, or None if more pairs are needed."""
        is_less = self._difference_test.first_bad > self._difference_test.second_bad
        is_shown = self._order_test.is_shown(confidence, first_more=is_less)
        if is_shown and self._difference_test.is_shown(confidence):
            return _LESS if is_less else _MORE
        return _TOO_MANY if self._remaining_test.is_shown(confidence) else None


@dataclass(kw_only=True)
class SequentialTest:
    """A test, based on pairs of runs, of the claim that a change makes a program fail less often.

    The conclusion may be read after each pair without losing confidence (a sequential test). It combines two tests:
    that the failure rates of the sides differ, and that the second rate is more than half of the first. Each is wrong
    in at most a share of 1 - confidence of all claims. If the change prevents at least half of the failures, only the
    second test can be wrong; if it has no effect, only the first. The order within each pair is drawn at random, and
    the first test must also hold if only this draw is chance. A conclusion must not depend on runs that were only too
    slow for their deadline.
    """

    terms: ClaimTerms
    trials: list[Trial] = field(default_factory=list)
    # For each side: whether each judged trial failed, and whether it failed for another reason than its deadline.
    _failures: tuple[list[tuple[bool, bool]], list[tuple[bool, bool]]] = field(default_factory=lambda: ([], []))
    _unjudged_counts: list[int] = field(default_factory=lambda: [0, 0])
    _tests: _PairTests = field(default_factory=_PairTests)
    _tests_without_slow: _PairTests = field(default_factory=_PairTests)  # slow runs count as passes

    @property
    def pairs(self) -> int:
        """The number of pairs of runs with and without the change so far."""
        return self._tests.pairs

    @property
    def next_side(self) -> int:
        """FIRST or SECOND: the side to run next, in an order drawn for each pair. An unjudged run is repeated."""
        first, second = map(len, self._failures)
        if first != second:
            return FIRST if first < second else SECOND
        return sha256(f"{self.terms.order_seed} {first}".encode()).digest()[0] & 1

    def count(self, side: int) -> FailureCount:
        """Return the failure count of the runs without the change (FIRST) or with it (SECOND)."""
        return count(self.trials, side)

    def add_trial(self, trial: Trial) -> None:
        """Add the result of a run, which is evaluated once there is a run of the other side to pair it with."""
        self.trials.append(trial)
        if not trial.judged:
            self._unjudged_counts[trial.config] += 1
            return
        self._failures[trial.config].append((not trial.passed, not (trial.passed or trial.is_slow)))
        if self.pairs < min(map(len, self._failures)):
            first, second = (failures[self.pairs] for failures in self._failures)
            for tests, first_bad, second_bad in zip(
                (self._tests, self._tests_without_slow), first, second, strict=True
            ):
                tests.add_pair(first_bad, second_bad)

    def conclusion(self) -> Conclusion | None:
        """Return a conclusion on the claim, or None if more runs are needed."""
        if len(self._failures[FIRST]) != len(self._failures[SECOND]):
            return self._cannot_be_judged()
        return self._computes_differently() or self._counts_decide() or self._counts_cannot_decide()

    def _computes_differently(self) -> Conclusion | None:
        if not self.terms.must_compute_same:
            return None
        known_trials = [
            sum(trial.config == side and bool(trial.computed) for trial in self.trials) for side in (FIRST, SECOND)
        ]
        if min(known_trials) < _MIN_COMPARED_TRIALS:
            return None
        comparison = compare_numbers(self.trials, self.terms.tolerance)
        if comparison.is_same is not False:
            return None
        why = f"it changes what is computed: {difference_text(comparison)}"
        return Conclusion(result=ClaimResult.REFUTED, why=why)

    def _counts_decide(self) -> Conclusion | None:
        finding = self._tests.decide(self.terms.confidence)
        if finding is None:
            return None
        finding_without_slow = self._tests_without_slow.decide(self.terms.confidence)
        agree = finding_without_slow is not None and (finding == _LESS) == (finding_without_slow == _LESS)
        if not agree and self._deadline_separates():
            may_still_decide = self._tests_without_slow.failures and self.pairs < self.terms.max_pairs
            if finding_without_slow is None and may_still_decide:
                return None
            return Conclusion(result=ClaimResult.UNDECIDED, why="", is_by_deadline=True)
        result = ClaimResult.SUPPORTED if finding == _LESS else ClaimResult.REFUTED
        return Conclusion(result=result, why=f"{finding}: {self._counts_text()}", is_by_counts=True)

    def _deadline_separates(self) -> bool:
        """Return whether runs reach their deadline on one side, and mostly do not on the other side."""
        slow = [self.count(side).slow / self.count(side).judged for side in (FIRST, SECOND)]
        return max(slow) > 0 and min(slow) < 0.5

    def _counts_cannot_decide(self) -> Conclusion | None:
        """Return an "undecided" conclusion, or None if more runs could still decide the claim."""
        if self.pairs >= self.terms.controls and not self._tests.failures:
            why = f"nothing failed in {self.pairs} runs of each side, so there is no failure to prevent"
            return Conclusion(result=ClaimResult.UNDECIDED, why=why)
        if self.pairs >= self.terms.max_pairs:
            return Conclusion(
                result=ClaimResult.UNDECIDED, why=f"{self.pairs} pairs do not decide it: {self._counts_text()}"
            )
        return self._cannot_be_judged()

    def _counts_text(self) -> str:
        return f"{self.count(FIRST)} without it and {self.count(SECOND)} with it"

    def _cannot_be_judged(self) -> Conclusion | None:
        for side, side_text in ((FIRST, "without it"), (SECOND, "with it")):
            if self._unjudged_counts[side] > len(self._failures[side]) + _MAX_EXCESS_UNJUDGED:
                why = f"{self._unjudged_counts[side]} runs {side_text} could not be judged"
                return Conclusion(result=ClaimResult.UNDECIDED, why=why)
        return None


@dataclass(frozen=True, kw_only=True)
class ClaimReport:
    """A report on the test of a claim, with all its runs so far."""

    text: str  # the claim as the user wrote it, or made from the key
    scenario: str
    key: str  # the key in which the sides differ
    labels: tuple[str, str]  # the names of both sides
    terms: ClaimTerms
    trials: tuple[Trial, ...] = ()
    conclusion: Conclusion | None = None
    budget_s: float | None = None  # maximum time of all trials together
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[FailureCount, FailureCount]:
        """The failure counts of the runs without the change and of the runs with it."""
        return count(self.trials, FIRST), count(self.trials, SECOND)

    @property
    def number_comparison(self) -> NumberComparison:
        """A comparison of the numbers that the program computes with and without the change."""
        return compare_numbers(self.trials, self.terms.tolerance)

    @property
    def took_s(self) -> float:
        """The total time of all runs, in seconds."""
        return sum(trial.wall_s for trial in self.trials)

    @property
    def left_s(self) -> float | None:
        """The maximum remaining time in seconds, or None if it cannot be estimated yet."""
        walls_s = [[trial.wall_s for trial in self.trials if trial.config == side] for side in (FIRST, SECOND)]
        if not all(walls_s):
            return None
        pairs = max(0, self.terms.max_pairs - min(side.judged for side in self.counts))
        left_s = pairs * sum(sum(side_s) / len(side_s) for side_s in walls_s)
        return left_s if self.budget_s is None else max(0.0, min(left_s, self.budget_s - self.took_s))


def difference_text(worst: NumberComparison) -> str:
    """Return the largest difference as text, such as "grad_norm of step 1 is 1.2 without it and 0.9 with it"."""
    of = f" of step {worst.step}" if worst.step is not None else ""
    apart = (
        ""
        if math.isinf(worst.difference)
        else f" ({format_share(worst.difference)} apart; runs of one side: {format_share(worst.within_side)})"
    )
    return f"{worst.name}{of} is {worst.first:.6g} without it and {worst.second:.6g} with it{apart}"


def format_share(value: float) -> str:
    """Return a fraction as a percentage, such as "25 %", "0.02 %" or "0 %"."""
    percent = value * 100
    return f"{percent:.0f} %" if percent == 0 or percent >= 10 else f"{percent:.2g} %"


# Verification: a failed run is repeated after the user changed the program.


class VerificationResult(StrEnum):
    """The result of rerunning a failed program, to check whether a change fixed the failure."""

    FIXED = "fixed"
    NOT_FIXED = "not fixed"
    FAILS_OTHERWISE = "fails otherwise"
    UNDECIDED = "undecided"


def verification_result(trials: Sequence[Trial], required_passes: int) -> VerificationResult | None:
    """Return whether the failure is fixed, or None before `required_passes` without a single failure."""
    results = [trial.counts_as for trial in trials]
    if ProbeResult.BAD in results:
        return VerificationResult.NOT_FIXED
    if ProbeResult.DIFFERENT in results:
        return VerificationResult.FAILS_OTHERWISE
    if results.count(ProbeResult.GOOD) >= required_passes:
        return VerificationResult.FIXED
    is_stuck = results[-_MAX_EXCESS_UNJUDGED - 1 :] == [ProbeResult.UNRESOLVED] * (_MAX_EXCESS_UNJUDGED + 1)
    return VerificationResult.UNDECIDED if is_stuck else None


def lowest_failure_rate(runs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the pair (failures, runs) with the lowest failure rate that is above 0."""
    return min((run for run in runs if run[0]), key=lambda run: (run[0] / run[1], -run[1]))


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """A report on rerunning a failed program to check that it is fixed. Counts are pairs (failures, runs)."""

    scenario: str
    run_id: str  # the failed run
    end: str  # how it failed
    count_in_run: tuple[int, int]  # count in that run
    count_in_all_runs: tuple[int, int]  # count in all stored runs of this launch
    lowest_count: tuple[int, int]  # of both counts, the one with the lower failure rate
    passes_needed: int  # the failure counts as fixed after this many passes
    confidence: float
    trials: tuple[Trial, ...] = ()
    result: VerificationResult | None = None  # None: not decided yet
    interrupted: bool = False

    @property
    def passes(self) -> int:
        """The number of runs that passed."""
        return sum(trial.passed for trial in self.trials)

    @property
    def last_end(self) -> str:
        """The way the last run ended, or "" if there was no run."""
        return self.trials[-1].end if self.trials else ""
