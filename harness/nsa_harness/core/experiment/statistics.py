"""Rates from counts: an interval of one rate, sequential tests of two, and how many runs show a rare failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, comb, cos, hypot, log, pi, sqrt, tan
from statistics import NormalDist

# Turner, Ly and Grünwald, "Generic E-variables for exact sequential k-sample tests" (arXiv:2106.02693), section 4:
# the prior of a rate under which evidence of a difference grows about as fast as it can.
_PRIOR = 0.18


def interval(bad: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's exact interval of a rate seen `bad` times in `of`; (0, 1) if nothing was seen."""
    tail = (1 - confidence) / 2
    low = 0.0 if bad == 0 else _where(lambda rate: _at_least(bad, of, rate) < tail)
    high = 1.0 if bad == of else _where(lambda rate: 1 - _at_least(bad + 1, of, rate) > tail)
    return low, high


def tries(rate: float, confidence: float) -> int:
    """Return how many runs show something that happens at this rate, at this confidence."""
    return ceil(log(1 - confidence) / log(1 - rate))


RAREST = 0.2  # the rate of a failure that is still looked for, if the user insists or has seen one
_CONTROLS = 3  # passes after which an end is said to pass, if the user does not insist


def controls(confidence: float, *, insistent: bool) -> int:
    """Return how often an end must pass before it is said to."""
    return tries(RAREST, confidence) if insistent else _CONTROLS


def more_often(first: tuple[int, int], second: tuple[int, int], confidence: float) -> bool:
    """Whether the first rate, bad of all, is the higher one: Fisher's exact test, one-sided, to be looked at once."""
    (bad, of), (other_bad, other_of) = first, second
    all_bad, ways = bad + other_bad, comb(of + other_of, of)
    chance = sum(comb(all_bad, k) * comb(of + other_of - all_bad, of - k) for k in range(bad, min(of, all_bad) + 1))
    return chance <= (1 - confidence) * ways


@cache
def student(confidence: float, freedom: int) -> float:
    """Return how many standard errors from its mean a value lies at this confidence, by Student's distribution."""
    # With t as the root of the degrees of freedom times the tangent of an angle, the density is a power of its cosine.
    whole = _cosines(freedom - 1, pi / 2)
    share = _where(lambda share: _cosines(freedom - 1, share * pi / 2) < confidence * whole)
    return sqrt(freedom) * tan(share * pi / 2)


class Separation:
    """Whether two rates differ, asked after every pair of runs without paying for having looked before.

    Evidence against one common rate, as an e-process (Turner, Ly and Grünwald, arXiv:2106.02693, theorem 1, blocks of
    one run each): if the rates are equal, whatever they are, it ever exceeds 1/a with a chance of at most a.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self.first_bad = 0
        self.second_bad = 0
        self._log_evidence = 0.0

    def learn(self, first_bad: bool, second_bad: bool) -> None:
        """One run of each; what is expected of them comes from the pairs before."""
        first, second = self._expected(self.first_bad), self._expected(self.second_bad)
        against = self._nearest(first, second)
        for rate, null, bad in ((first, against[0], first_bad), (second, against[1], second_bad)):
            self._log_evidence += log(rate / null) if bad else log((1 - rate) / (1 - null))
        self.pairs += 1
        self.first_bad += first_bad
        self.second_bad += second_bad

    def shown(self, confidence: float) -> bool:
        """Whether the rates differ, at that confidence."""
        return self._log_evidence >= -log(1 - confidence)

    def no_more_than(self, difference: float, confidence: float) -> bool:
        """Whether the second rate is higher by less than that: Newcombe's interval, from two of Wilson's (1998, 10)."""
        if not self.pairs:
            return False
        first, second = self.first_bad / self.pairs, self.second_bad / self.pairs
        low, high = (
            _wilson(self.first_bad, self.pairs, confidence)[0],
            _wilson(self.second_bad, self.pairs, confidence)[1],
        )
        return second - first + hypot(high - second, first - low) < difference

    def _nearest(self, first: float, second: float) -> tuple[float, float]:
        """Return the rates under the null hypothesis that explain the expected ones best."""
        common = (first + second) / 2
        return common, common

    def _expected(self, bad: int) -> float:
        return (bad + _PRIOR) / (self.pairs + 2 * _PRIOR)


class Excess(Separation):
    """Whether the second rate is more than a share of the first one, asked after every pair as well.

    Evidence against all rates of which the second is at most that share of the first. They are a convex set, so the
    pair of them nearest to what is expected gives an e-process (Turner and Grünwald, arXiv:2203.09785, theorem 1).
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def _nearest(self, first: float, second: float) -> tuple[float, float]:
        share = self._share
        if second <= share * first:
            return first, second
        # Where the derivative along the border, second = share * first, is nought.
        middle = 1 + second + share * (1 + first)
        nearest = (middle - sqrt(middle * middle - 8 * share * (first + second))) / (4 * share)
        return nearest, share * nearest


def _wilson(bad: int, of: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval, one tail each."""
    z = NormalDist().inv_cdf(confidence)
    middle = (bad + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * sqrt(bad * (of - bad) / of + z * z / 4)
    return middle - half, middle + half


def _at_least(bad: int, of: int, rate: float) -> float:
    """The chance of so many or more; the shorter of both sums."""
    if bad > of // 2:
        return sum(_exactly(k, of, rate) for k in range(bad, of + 1))
    return 1 - sum(_exactly(k, of, rate) for k in range(bad))


def _exactly(bad: int, of: int, rate: float) -> float:
    return comb(of, bad) * rate**bad * (1 - rate) ** (of - bad)


_SLICES = 256


def _cosines(power: int, end: float) -> float:
    """The integral of that power of the cosine from 0 on, by Simpson's rule."""
    values = [max(0.0, cos(end * i / _SLICES)) ** power for i in range(_SLICES + 1)]
    return end / (3 * _SLICES) * (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]))


def _where(below: Callable[[float], bool]) -> float:
    """The rate up to which `below` holds."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low
