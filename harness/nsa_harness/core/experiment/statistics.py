"""Failure rates from counts: the interval of a rate, sequential tests of two rates, and numbers of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, comb, cos, hypot, log, pi, sqrt, tan
from statistics import NormalDist

# The prior of a rate with which evidence of a difference grows about as fast as possible: Turner, Ly and Grünwald,
# "Generic E-variables for exact sequential k-sample tests" (arXiv:2106.02693), section 4.
_PRIOR = 0.18


def interval(bad: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact Clopper-Pearson interval of a rate after `bad` failures in `of` runs; (0, 1) without runs."""
    tail = (1 - confidence) / 2
    low = 0.0 if bad == 0 else _find_rate(lambda rate: _binomial_tail(bad, of, rate) < tail)
    high = 1.0 if bad == of else _find_rate(lambda rate: 1 - _binomial_tail(bad + 1, of, rate) > tail)
    return low, high


def runs_to_show(rate: float, confidence: float) -> int:
    """Return the number of runs that show a failure of this rate at least once, at this confidence."""
    return ceil(log(1 - confidence) / log(1 - rate))


MIN_RATE = 0.2  # the lowest failure rate that is searched for, if the user asks for confidence or has seen a failure
_CONTROLS = 3  # passes after which an end counts as passing, if the user asks for no confidence


def control_runs(confidence: float, *, insistent: bool) -> int:
    """Return the passes after which an end counts as passing. `insistent`: the user asked for the confidence."""
    return runs_to_show(MIN_RATE, confidence) if insistent else _CONTROLS


def fails_more_often(first: tuple[int, int], second: tuple[int, int], confidence: float) -> bool:
    """Whether the first rate (bad, of) is higher, by Fisher's exact one-sided test. Apply it only once to the data."""
    (bad, of), (other_bad, other_of) = first, second
    all_bad, all_choices = bad + other_bad, comb(of + other_of, of)
    at_least_this_many = sum(
        comb(all_bad, k) * comb(of + other_of - all_bad, of - k) for k in range(bad, min(of, all_bad) + 1)
    )
    return at_least_this_many <= (1 - confidence) * all_choices


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's distribution: how many standard errors the interval extends."""
    # With t as the root of the degrees of freedom times the tangent of an angle, the density is a power of its cosine.
    total = _cosine_integral(freedom - 1, pi / 2)
    share = _find_rate(lambda share: _cosine_integral(freedom - 1, share * pi / 2) < confidence * total)
    return sqrt(freedom) * tan(share * pi / 2)


class RateDifferenceTest:
    """A sequential test whether two rates differ. It may be read after every pair of runs without losing confidence.

    It accumulates evidence against one common rate as an e-process (Turner, Ly and Grünwald, arXiv:2106.02693, theorem
    1, with blocks of one run): if the rates are equal, the evidence ever exceeds 1/a with probability at most a.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self.first_bad = 0
        self.second_bad = 0
        self._log_evidence = 0.0

    def add_pair(self, first_bad: bool, second_bad: bool) -> None:
        """Add one run of each side. The rates expected of them come from the pairs before."""
        first, second = self._predicted_rate(self.first_bad), self._predicted_rate(self.second_bad)
        against = self._nearest_null(first, second)
        for rate, null, bad in ((first, against[0], first_bad), (second, against[1], second_bad)):
            self._log_evidence += log(rate / null) if bad else log((1 - rate) / (1 - null))
        self.pairs += 1
        self.first_bad += first_bad
        self.second_bad += second_bad

    def is_shown(self, confidence: float) -> bool:
        """Whether the rates differ, at this confidence."""
        return self._log_evidence >= -log(1 - confidence)

    def differs_by_less_than(self, difference: float, confidence: float) -> bool:
        """Whether the second rate is higher by less than `difference`, by Newcombe's interval (1998, method 10)."""
        if not self.pairs:
            return False
        first, second = self.first_bad / self.pairs, self.second_bad / self.pairs
        low, high = (
            _wilson(self.first_bad, self.pairs, confidence)[0],
            _wilson(self.second_bad, self.pairs, confidence)[1],
        )
        return second - first + hypot(high - second, first - low) < difference

    def _nearest_null(self, first: float, second: float) -> tuple[float, float]:
        """Return the pair of rates of the null hypothesis nearest to the expected rates: here their mean, twice."""
        common = (first + second) / 2
        return common, common

    def _predicted_rate(self, bad: int) -> float:
        return (bad + _PRIOR) / (self.pairs + 2 * _PRIOR)


class RateRatioTest(RateDifferenceTest):
    """A sequential test whether the second rate is more than a `share` of the first, with the same properties.

    Its null hypothesis contains all pairs of rates whose second is at most that share of the first. This is a convex
    set, so its pair nearest to the expected rates gives an e-process (Turner and Grünwald, arXiv:2203.09785, theorem
    1).
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def _nearest_null(self, first: float, second: float) -> tuple[float, float]:
        share = self._share
        if second <= share * first:
            return first, second
        # The point on the border, second = share * first, where the derivative is zero.
        middle = 1 + second + share * (1 + first)
        nearest = (middle - sqrt(middle * middle - 8 * share * (first + second))) / (4 * share)
        return nearest, share * nearest


def _wilson(bad: int, of: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval with one-sided confidence at each end."""
    z = NormalDist().inv_cdf(confidence)
    middle = (bad + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * sqrt(bad * (of - bad) / of + z * z / 4)
    return middle - half, middle + half


def _binomial_tail(bad: int, of: int, rate: float) -> float:
    """Return the binomial probability of `bad` or more failures in `of` runs, by the shorter of two sums."""
    if bad > of // 2:
        return sum(_binomial(k, of, rate) for k in range(bad, of + 1))
    return 1 - sum(_binomial(k, of, rate) for k in range(bad))


def _binomial(bad: int, of: int, rate: float) -> float:
    return comb(of, bad) * rate**bad * (1 - rate) ** (of - bad)


_SLICES = 256


def _cosine_integral(power: int, end: float) -> float:
    """Return the integral of a power of the cosine from 0 to `end`, by Simpson's rule."""
    values = [max(0.0, cos(end * i / _SLICES)) ** power for i in range(_SLICES + 1)]
    return end / (3 * _SLICES) * (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]))


def _find_rate(below: Callable[[float], bool]) -> float:
    """Return the rate in [0, 1] up to which `below` holds, by halving."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low
