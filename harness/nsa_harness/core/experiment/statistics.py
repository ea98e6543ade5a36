"""Statistics of failure rates, such as confidence intervals and the number of runs needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, comb, cos, exp, hypot, lgamma, log, log1p, pi, sqrt, tan
from statistics import NormalDist

# With this prior of a rate, the evidence of a difference grows about as fast as possible. See Turner, Ly and Grünwald,
# "Generic E-variables for exact sequential k-sample tests" (arXiv:2106.02693), section 4.
_PRIOR = 0.18


def interval(bad: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a failure rate, given `bad` failures in `of` runs."""
    tail = (1 - confidence) / 2
    low = 0.0 if bad == 0 else _find_rate(lambda rate: _binomial_tail(bad, of, rate) < tail)
    high = 1.0 if bad == of else _find_rate(lambda rate: 1 - _binomial_tail(bad + 1, of, rate) > tail)
    return low, high


def runs_to_show(rate: float, confidence: float) -> int:
    """Return the number of runs that show a failure with the given rate at least once, with this confidence."""
    return ceil(log(1 - confidence) / log(1 - rate))


def passes_to_show(bad: int, of: int, confidence: float) -> int:
    """Return how many consecutive passes show that a failure seen in `bad` of `of` runs has become rarer."""
    passes, chance = 0, 1.0  # the probability that a failure of the same rate would be missed in so many runs
    while chance > 1 - confidence:
        chance *= (of - bad + 1 + passes) / (of + 2 + passes)
        passes += 1
    return passes


# The lowest failure rate that a bisection looks for, if the user requests a confidence or a stored run has failed.
MIN_RATE = 0.2
_CONTROLS = 3  # without a requested confidence, a configuration counts as passing after this many passes


def control_runs(confidence: float, *, insistent: bool) -> int:
    """Return the number of passing runs needed to conclude that a configuration passes.

    `insistent` means that the user has requested this confidence, or that a stored run has failed.
    """
    return runs_to_show(MIN_RATE, confidence) if insistent else _CONTROLS


def fails_more_often(first: tuple[int, int], second: tuple[int, int], confidence: float) -> bool:
    """Return whether the first of two (failures, runs) has a higher rate: a one-sided Fisher test, applied once."""
    (bad, of), (other_bad, other_of) = first, second
    all_bad, all_choices = bad + other_bad, comb(of + other_of, of)
    at_least_this_many = sum(
        comb(all_bad, k) * comb(of + other_of - all_bad, of - k) for k in range(bad, min(of, all_bad) + 1)
    )
    return at_least_this_many <= (1 - confidence) * all_choices


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t-distribution with `freedom` degrees of freedom."""
    # If t is written as sqrt(freedom) * tan(angle), the density is a power of the cosine of the angle.
    total = _cosine_integral(freedom - 1, pi / 2)
    share = _find_rate(lambda share: _cosine_integral(freedom - 1, share * pi / 2) < confidence * total)
    return sqrt(freedom) * tan(share * pi / 2)


class RateDifferenceTest:
    """A sequential test of whether two failure rates differ. The result can be read after every pair of runs.

    It accumulates evidence against equal rates as an e-process (Turner, Ly and Grünwald, arXiv:2106.02693, theorem 1,
    with blocks of one run). If the rates are equal, the probability that the evidence ever exceeds 1/a is at most a.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self.first_bad = 0
        self.second_bad = 0
        self._log_evidence = 0.0

    def add_pair(self, first_bad: bool, second_bad: bool) -> None:
        """Add the results of one pair of runs. Each argument says whether the run failed."""
        first, second = self._predicted_rate(self.first_bad), self._predicted_rate(self.second_bad)
        against = self._nearest_null(first, second)
        for rate, null, bad in ((first, against[0], first_bad), (second, against[1], second_bad)):
            self._log_evidence += log(rate / null) if bad else log((1 - rate) / (1 - null))
        self.pairs += 1
        self.first_bad += first_bad
        self.second_bad += second_bad

    def is_shown(self, confidence: float) -> bool:
        """Return whether the runs so far show, with this confidence, that the rates differ."""
        return self._log_evidence >= -log(1 - confidence)

    def differs_by_less_than(self, difference: float, confidence: float) -> bool:
        """Return whether the second rate exceeds the first by less than `difference` (Newcombe 1998, method 10)."""
        if not self.pairs:
            return False
        first, second = self.first_bad / self.pairs, self.second_bad / self.pairs
        low, high = (
            _wilson(self.first_bad, self.pairs, confidence)[0],
            _wilson(self.second_bad, self.pairs, confidence)[1],
        )
        return second - first + hypot(high - second, first - low) < difference

    def _nearest_null(self, first: float, second: float) -> tuple[float, float]:
        """Return the pair of equal rates that is closest to the given rates."""
        common = (first + second) / 2
        return common, common

    def _predicted_rate(self, bad: int) -> float:
        return (bad + _PRIOR) / (self.pairs + 2 * _PRIOR)


class RateRatioTest(RateDifferenceTest):
    """A sequential test of whether the second failure rate is more than `share` times the first.

    The result can be read after every pair of runs. The pairs of rates for which this is false form a convex set, so
    the nearest pair gives an e-process (Turner and Grünwald, arXiv:2203.09785, theorem 1).
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def _nearest_null(self, first: float, second: float) -> tuple[float, float]:
        share = self._share
        if second <= share * first:
            return first, second
        # The point on the border (second = share * first) at which the derivative is zero.
        middle = 1 + second + share * (1 + first)
        nearest = (middle - sqrt(middle * middle - 8 * share * (first + second))) / (4 * share)
        return nearest, share * nearest


# How much of the evidence bets that the failed run of a pair is on one side with this probability.
_BETS = ((1.0, 0.5), (0.95, 0.2), (0.85, 0.15), (0.75, 0.15))


class PairOrderTest:
    """A sequential test of whether one side fails more often, for pairs whose order was drawn at random.

    Only pairs with exactly one failure count. If the sides do not differ, the random order alone decides which side has
    that failure, whatever makes runs fail: also if every second run fails, or if failures come in bursts. It is an
    e-process: if the sides do not differ, the probability that the evidence for one side ever exceeds 1/a is at most a.
    """

    def __init__(self) -> None:
        self._only_first_bad = 0
        self._only_second_bad = 0

    def add_pair(self, first_bad: bool, second_bad: bool) -> None:
        """Add one run of each side: whether it failed."""
        self._only_first_bad += first_bad and not second_bad
        self._only_second_bad += second_bad and not first_bad

    def is_shown(self, confidence: float, *, first_more: bool) -> bool:
        """Return whether the first side fails more often, or the second side if `first_more` is False."""
        counts = (self._only_first_bad, self._only_second_bad)
        more, fewer = counts if first_more else counts[::-1]
        evidence = sum(share * (2 * chance) ** more * (2 - 2 * chance) ** fewer for chance, share in _BETS)
        return evidence >= 1 / (1 - confidence)


def _wilson(bad: int, of: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval of a failure rate, each end with this one-sided confidence."""
    z = NormalDist().inv_cdf(confidence)
    middle = (bad + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * sqrt(bad * (of - bad) / of + z * z / 4)
    return middle - half, middle + half


def _binomial_tail(bad: int, of: int, rate: float) -> float:
    """Return the probability of at least `bad` failures in `of` runs at this failure rate."""
    if bad > of // 2:
        return sum(_binomial(k, of, rate) for k in range(bad, of + 1))
    return 1 - sum(_binomial(k, of, rate) for k in range(bad))


_MOST_EXACT = 1000  # runs; with more, the number of combinations may be too large for a float


def _binomial(bad: int, of: int, rate: float) -> float:
    if of <= _MOST_EXACT:
        return comb(of, bad) * rate**bad * (1 - rate) ** (of - bad)
    choices = lgamma(of + 1) - lgamma(bad + 1) - lgamma(of - bad + 1)
    return exp(choices + bad * log(rate) + (of - bad) * log1p(-rate))


_SLICES = 256


def _cosine_integral(power: int, end: float) -> float:
    # Simpson's rule
    values = [max(0.0, cos(end * i / _SLICES)) ** power for i in range(_SLICES + 1)]
    return end / (3 * _SLICES) * (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]))


def _find_rate(below: Callable[[float], bool]) -> float:
    """Return, by bisection, the largest value in [0, 1] for which `below` returns True."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low
