"""Belief: where a chain begins to fail and how often what should fail does, after runs that are not reliable."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from operator import mul

from harness.core.bisect.asked import BAD, GOOD
from harness.core.bisect.asking import Observation
from harness.core.bisect.chain import Chain

RATES = (*(i / 20 for i in range(1, 20)), 0.99)  # how often a set that should fail may do so
_MOST_FUTURES = 8  # answers still out double the futures to weigh; the likeliest are enough to spread a round

Weights = list[list[float]]  # [edge - 1][rate], sums to 1


class Belief:
    """A joint probability of edge and rate; every edge and every rate is equally likely at first."""

    def __init__(self, chain: Chain, false_bad: float) -> None:
        self._chain = chain
        self._rates = [max(rate, false_bad) for rate in RATES]
        self._false_bad = false_bad
        share = 1 / (len(chain) * len(RATES))
        self._weights: Weights = [[share] * len(RATES) for _ in chain.order]

    def learn(self, seen: Observation) -> None:
        """Any set tells of the edges that it reaches or lies before; of the others it tells nothing."""
        if seen.counts_as in (GOOD, BAD):
            inside = self._chain.longest_inside(seen.subset)
            around = self._chain.shortest_around(seen.subset)
            self._weights = self._after(self._weights, inside, around, seen.counts_as is BAD)[1]

    def edges(self) -> list[float]:
        """The probability of each length, from 1 to that of the chain, to be the first that fails."""
        return [sum(row) for row in self._weights]

    def rates(self) -> list[float]:
        return [sum(column) for column in zip(*self._weights, strict=True)]

    def best(self, count: int, excluded: frozenset[int]) -> list[int]:
        """The lengths that tell most of the edge when asked at the same time, no two of them alike."""
        futures = [(1.0, self._weights)]
        points = [k for k in range(1, len(self._chain)) if k not in excluded]
        chosen: list[int] = []
        while points and len(chosen) < count:
            futures = self._futures(futures, chosen[-1]) if chosen else futures
            chosen.append(_most_telling(points, futures, self))
            points.remove(chosen[-1])
        return sorted(chosen)

    def information(self, weights: Weights) -> list[float]:
        """Bits that asking each length tells of the edge, by length from 0: mutual information of edge and answer."""
        shares = [sum(row) for row in weights]
        rates = [self._mean(row, share) for row, share in zip(weights, shares, strict=True)]
        noise = _entropy(self._false_bad)
        bad, known = self._false_bad, noise
        told = [0.0]
        for share, rate in zip(shares, rates, strict=True):
            bad += share * (rate - self._false_bad)
            known += share * (_entropy(rate) - noise)
            told.append(_entropy(bad) - known)
        return told

    def _mean(self, row: Sequence[float], share: float) -> float:
        return sum(map(mul, row, self._rates)) / share if share else 0.0

    def _futures(self, futures: list[tuple[float, Weights]], point: int) -> list[tuple[float, Weights]]:
        after = [
            (chance * likely, weights)
            for chance, before in futures
            for likely, weights in (self._after(before, point, point, bad) for bad in (True, False))
        ]
        return sorted(after, key=lambda future: -future[0])[:_MOST_FUTURES]

    def _after(self, weights: Weights, inside: int, around: int, bad: bool) -> tuple[float, Weights]:
        """How likely the answer was, and the weights after it."""
        reached = self._rates if bad else [1 - rate for rate in self._rates]
        before = self._false_bad if bad else 1 - self._false_bad
        changed = [
            list(map(mul, row, reached))
            if edge <= inside
            else [weight * before for weight in row]
            if edge > around
            else row
            for edge, row in enumerate(weights, start=1)
        ]
        total = sum(map(sum, changed))
        return total, [[weight / total for weight in row] for row in changed]


def _most_telling(points: Sequence[int], futures: Sequence[tuple[float, Weights]], belief: Belief) -> int:
    told = [(chance, belief.information(weights)) for chance, weights in futures]
    return max(points, key=lambda point: sum(chance * bits[point] for chance, bits in told))


def _entropy(chance: float) -> float:
    if chance <= 0 or chance >= 1:
        return 0.0
    return -chance * log2(chance) - (1 - chance) * log2(1 - chance)
