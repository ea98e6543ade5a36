"""Claim: "with this it ends badly less often": two sides launched in turn until their counts decide it, and no longer.

The first side is the program without what is claimed to help, the second one the program with it. What a trial counts
as, when the counts decide, when "fixed" may be said, and what else differs between the sides: all of it as values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from nsa_harness.core.experiment.statistics import Excess, Separation, interval, tries
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.search.question import CountsAs

MATTERS = 0.5  # the share of failures that a mitigation must take away
MOST_PAIRS = 100  # as many as bisect launches both ends
_MOST_UNJUDGED = 2  # trials of one side that could not be judged, beyond as many as were
_STEPS = 10  # compared steps of each trial: rounding grows from step to step
_TWICE = 2  # trials of each side that show what it computes

FIRST, SECOND = 0, 1  # without it, with it


class Result(StrEnum):
    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Count:
    """How often a side ended badly, of the trials that were judged."""

    bad: int
    of: int
    unjudged: int
    ends: Mapping[str, int]  # each bad end, the most frequent first

    @property
    def rate(self) -> float | None:
        return self.bad / self.of if self.of else None

    def interval(self, confidence: float) -> tuple[float, float]:
        return interval(self.bad, self.of, confidence)

    def __str__(self) -> str:
        return f"{self.bad} of {self.of}"


def count(trials: Iterable[Trial], side: int) -> Count:
    own = [trial for trial in trials if trial.config == side]
    judged = [one for one in own if one.judged]
    bad = [one.end for one in judged if not one.passed]
    ends = dict(Counter(bad).most_common())
    return Count(bad=len(bad), of=len(judged), unjudged=len(own) - len(judged), ends=ends)


# When "fixed" may be said.


def passes_needed(bad: int, of: int, confidence: float) -> int:
    """Return the passes in a row after which a failure that was seen `bad` times in `of` counts as fixed.

    At the rate at which it was seen it would have shown at that confidence. What failed each time needs one.
    """
    assert 0 < bad <= of
    return 1 if bad == of else tries(bad / of, confidence)


def passes_to_be_fixed(first: Count, confidence: float) -> int:
    """The same by the lowest rate that the counts of the first side allow: here it was asked until it is known."""
    return tries(first.interval(confidence)[0], confidence)


class Fixed(StrEnum):
    """Whether the failure is gone, which is more than that it became rarer."""

    YES = "yes"  # none, so often that the failure would have shown at any rate that it can have had
    NOT_YET = "not yet"  # none, but not often enough
    NO = "no"


def fixed(first: Count, second: Count, confidence: float) -> Fixed | None:
    """Return whether the failure is gone; None: the first side never failed, so there was nothing to fix."""
    if not first.bad:
        return None
    if second.bad:
        return Fixed.NO
    return Fixed.YES if second.of >= passes_to_be_fixed(first, confidence) else Fixed.NOT_YET


# What both sides compute.


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether both sides compute the same: their numbers side by side, step by step, from equal seeds."""

    alike: bool | None  # None: not known
    steps: int = 0  # compared
    name: str = ""  # of the number that lies farthest apart, as all that follows
    step: int | None = None  # None: of the whole run
    first: float = 0.0
    second: float = 0.0
    apart: float = 0.0  # the difference, as a share of the larger one
    own: float = 0.0  # the same between trials of one side


def agreement(trials: Sequence[Trial], tolerance: float) -> Agreement:
    """Compare what both sides compute. `tolerance`: the share by which rounding alone may set them apart at first."""
    sides = [_numbers(trials, side) for side in (FIRST, SECOND)]
    common = [key for key in sides[FIRST] if key in sides[SECOND]]
    if not common:
        return Agreement(alike=None)
    compared = [_compared(*key, sides[FIRST][key], sides[SECOND][key]) for key in common]
    worst = max(compared, key=lambda one: one.apart - 2 * one.own)
    steps = len({step for step, _ in common if step is not None})
    return Agreement(
        alike=not any(one.apart > max(tolerance, 2 * one.own) for one in compared), steps=steps, name=worst.name,
        step=worst.step, first=worst.first, second=worst.second, apart=worst.apart, own=worst.own,
    )  # fmt: skip


NO_GRADIENT = "parameters without a gradient"
_Key = tuple[int | None, str]


def _numbers(trials: Sequence[Trial], side: int) -> dict[_Key, list[float]]:
    """Return each number of the first steps with its value in every trial that has it."""
    found: dict[_Key, list[float]] = {}
    for trial in trials:
        if trial.config != side:
            continue
        if trial.without_gradient is not None:
            found.setdefault((None, NO_GRADIENT), []).append(float(trial.without_gradient))
        first_steps = sorted({number.step for number in trial.computed})[:_STEPS]
        for one in trial.computed:
            if one.step in first_steps:
                found.setdefault((one.step, one.name), []).append(one.value)
    return found


def _compared(step: int | None, name: str, first: Sequence[float], second: Sequence[float]) -> Agreement:
    one, other = median(first), median(second)
    own = max(_apart(min(values), max(values)) for values in (first, second))
    return Agreement(alike=None, name=name, step=step, first=one, second=other, apart=_apart(one, other), own=own)


def _apart(one: float, other: float) -> float:
    """Return the difference as a share of the larger value; a value that is no number is infinitely far from one."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / (max(abs(one), abs(other)) or 1.0)
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf


# What else differs.


@dataclass(frozen=True, kw_only=True)
class Spread:
    middle: float  # the median
    low: float
    high: float
    of: int


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One quantity on both sides, of the trials that passed; None: none of a side has it."""

    name: str
    unit: str  # "s", "bytes", or empty
    first: Spread | None
    second: Spread | None

    @property
    def change(self) -> float | None:
        """The change from the first side to the second, as a share of the first."""
        if self.first is None or self.second is None or not self.first.middle:
            return None
        return self.second.middle / self.first.middle - 1

    @property
    def overlap(self) -> bool:
        """Whether trials of one side differ as much as the sides do."""
        one, other = self.first, self.second
        return one is not None and other is not None and one.low <= other.high and other.low <= one.high


_QUANTITIES = (
    ("a step", "s", "step_s"),
    ("a run", "s", "wall_s"),
    ("loss", "", "loss"),
    ("memory", "bytes", "rss_bytes"),
    ("GPU memory", "bytes", "gpu_bytes"),
)


def effects(trials: Sequence[Trial]) -> Iterator[Effect]:
    for name, unit, attribute in _QUANTITIES:
        first, second = (_spread(trials, side, attribute) for side in (FIRST, SECOND))
        if first is not None or second is not None:
            yield Effect(name=name, unit=unit, first=first, second=second)


def _spread(trials: Sequence[Trial], side: int, attribute: str) -> Spread | None:
    found = (getattr(trial, attribute) for trial in trials if trial.config == side and trial.passed)
    values = [float(value) for value in found if value is not None and math.isfinite(value)]
    if not values:
        return None
    return Spread(middle=median(values), low=min(values), high=max(values), of=len(values))


# The decision.


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that were set before the first trial."""

    confidence: float
    most_pairs: int = MOST_PAIRS
    controls: int = 3  # so many passes of the first side, and no failure, end it
    computes_the_same: bool = False  # what differs may change how, and never what, is computed
    tolerance: float = 0.0  # of what is computed


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    result: Result
    why: str  # a sentence
    by_counts: bool = False  # so it is as sure as was asked for


@dataclass(kw_only=True)
class SequentialTest:
    """Both sides, trial by trial. Its conclusion may be asked for after each pair without loss of confidence.

    Two tests are asked side by side, each wrong in at most one of 1 / (1 - confidence) claims: that the rates differ,
    and that the second one is more than half of the first. Of a claim that is true as far as it matters only the second
    can be wrong, of one that is false only the first.
    """

    terms: Terms
    trials: list[Trial] = field(default_factory=list)
    _judged: tuple[list[bool], list[bool]] = field(default_factory=lambda: ([], []))  # of each side: was it bad
    _unjudged: list[int] = field(default_factory=lambda: [0, 0])
    _differ: Separation = field(default_factory=Separation)
    _remains: Excess = field(default_factory=lambda: Excess(1 - MATTERS))

    @property
    def pairs(self) -> int:
        return self._differ.pairs

    @property
    def next_side(self) -> int:
        """The side to launch next: they alternate, and a trial that could not be judged is repeated."""
        first, second = self._judged
        return FIRST if len(first) <= len(second) else SECOND

    def count(self, side: int) -> Count:
        return count(self.trials, side)

    def learn(self, trial: Trial) -> None:
        self.trials.append(trial)
        if not trial.judged:
            self._unjudged[trial.config] += 1
            return
        self._judged[trial.config].append(not trial.passed)
        if self.pairs < min(map(len, self._judged)):
            pair = (self._judged[FIRST][self.pairs], self._judged[SECOND][self.pairs])
            self._differ.learn(*pair)
            self._remains.learn(*pair)

    def conclusion(self) -> Conclusion | None:
        """Return the conclusion; None: nothing is decided, or one side is a trial ahead."""
        if len(self._judged[FIRST]) != len(self._judged[SECOND]):
            return self._stuck()
        return self._computes_otherwise() or self._decided() or self._given_up()

    def _computes_otherwise(self) -> Conclusion | None:
        if not self.terms.computes_the_same:
            return None
        known = [
            sum(trial.config == side and bool(trial.computed) for trial in self.trials) for side in (FIRST, SECOND)
        ]
        if min(known) < _TWICE:
            return None
        seen = agreement(self.trials, self.terms.tolerance)
        if seen.alike is not False:
            return None
        why = f"it changes what is computed: {difference_text(seen)}"
        return Conclusion(result=Result.REFUTED, why=why)

    def _decided(self) -> Conclusion | None:
        confidence = self.terms.confidence
        if self._differ.shown(confidence):
            if self._differ.first_bad > self._differ.second_bad:
                why = f"it fails less often: {self._counts()}"
                return Conclusion(result=Result.SUPPORTED, why=why, by_counts=True)
            why = f"it fails more often with it: {self._counts()}"
            return Conclusion(result=Result.REFUTED, why=why, by_counts=True)
        if self._remains.shown(confidence):
            why = f"it does not take away half of the failures: {self._counts()}"
            return Conclusion(result=Result.REFUTED, why=why, by_counts=True)
        return None

    def _given_up(self) -> Conclusion | None:
        failed = self._differ.first_bad + self._differ.second_bad
        if self.pairs >= self.terms.controls and not failed:
            why = f"nothing failed in {self.pairs} runs of each side: there is no failure that it could take away"
            return Conclusion(result=Result.UNDECIDED, why=why)
        if self.pairs >= self.terms.most_pairs:
            return Conclusion(result=Result.UNDECIDED, why=f"{self.pairs} pairs do not tell: {self._counts()}")
        return self._stuck()

    def _counts(self) -> str:
        return f"{self.count(FIRST)} without it and {self.count(SECOND)} with it"

    def _stuck(self) -> Conclusion | None:
        for side, which in ((FIRST, "without it"), (SECOND, "with it")):
            if self._unjudged[side] > len(self._judged[side]) + _MOST_UNJUDGED:
                why = f"{self._unjudged[side]} runs {which} could not be judged"
                return Conclusion(result=Result.UNDECIDED, why=why)
        return None


@dataclass(frozen=True, kw_only=True)
class ClaimReport:
    """A claim while it is tested, and once it is; `conclusion` is None until then."""

    text: str
    scenario: str
    key: str  # in which the sides differ
    labels: tuple[str, str]  # of the sides
    terms: Terms
    trials: tuple[Trial, ...] = ()
    conclusion: Conclusion | None = None
    budget_s: float | None = None  # for all trials together
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[Count, Count]:
        return count(self.trials, FIRST), count(self.trials, SECOND)

    @property
    def agreement(self) -> Agreement:
        return agreement(self.trials, self.terms.tolerance)

    @property
    def took_s(self) -> float:
        return sum(trial.wall_s for trial in self.trials)

    @property
    def left_s(self) -> float | None:
        """The most time that is left; None: no trial of one of the sides has ended."""
        each = [[trial.wall_s for trial in self.trials if trial.config == side] for side in (FIRST, SECOND)]
        if not all(each):
            return None
        pairs = max(0, self.terms.most_pairs - min(one.of for one in self.counts))
        left_s = pairs * sum(sum(one) / len(one) for one in each)
        return left_s if self.budget_s is None else max(0.0, min(left_s, self.budget_s - self.took_s))


def difference_text(seen: Agreement) -> str:
    """ "grad_norm of step 1 is 1.2 without it and 0.9 with it (25 % apart; runs of one side: 0 %)"."""
    of = f" of step {seen.step}" if seen.step is not None else ""
    apart = "" if math.isinf(seen.apart) else f" ({share(seen.apart)} apart; runs of one side: {share(seen.own)})"
    return f"{seen.name}{of} is {seen.first:.6g} without it and {seen.second:.6g} with it{apart}"


def share(value: float) -> str:
    """ "25 %", "0.02 %", "0 %"."""
    percent = value * 100
    return f"{percent:.0f} %" if percent == 0 or percent >= 10 else f"{percent:.2g} %"


# A failed run again, after an edit.


class VerificationResult(StrEnum):
    FIXED = "fixed"
    NOT_FIXED = "not fixed"
    FAILS_OTHERWISE = "fails otherwise"
    UNDECIDED = "undecided"


def verified(trials: Sequence[Trial], needed: int) -> VerificationResult | None:
    """Return what the trials decide; None while more passes are needed.

    One failure decides: if only passes counted, a longer series would always find enough of them.
    """
    seen = [trial.counts_as for trial in trials]
    if CountsAs.BAD in seen:
        return VerificationResult.NOT_FIXED
    if CountsAs.DIFFERENT in seen:
        return VerificationResult.FAILS_OTHERWISE
    if seen.count(CountsAs.GOOD) >= needed:
        return VerificationResult.FIXED
    is_stuck = seen[-_MOST_UNJUDGED - 1 :] == [CountsAs.UNRESOLVED] * (_MOST_UNJUDGED + 1)
    return VerificationResult.UNDECIDED if is_stuck else None


def rate_before(runs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the lowest rate among several counts of one failure, as bad and of: it needs the most passes."""
    return min((run for run in runs if run[0]), key=lambda one: (one[0] / one[1], -one[1]))


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """A failed run that is repeated, and how far that is. Pairs are failures and of how many runs."""

    scenario: str
    run_id: str
    end: str  # how it failed
    here: tuple[int, int]  # in that run
    everywhere: tuple[int, int]  # in all stored runs of this launch
    rate: tuple[int, int]  # the lower of both
    needed: int  # passes
    confidence: float
    trials: tuple[Trial, ...] = ()
    result: VerificationResult | None = None  # None: not decided yet
    interrupted: bool = False

    @property
    def passes(self) -> int:
        return sum(trial.passed for trial in self.trials)

    @property
    def last(self) -> str:
        """The end of the last trial."""
        return self.trials[-1].end if self.trials else ""
