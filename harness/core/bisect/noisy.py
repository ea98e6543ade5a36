"""Noisy: the search among runs that fail only sometimes. Every answer is evidence, none is believed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, log, log2
from operator import mul

from nsa_harness.core.bisect.chain import Chain, probes_at_worst
from nsa_harness.core.bisect.oracle import BAD, GOOD, Oracle
from nsa_harness.core.bisect.question import PROOFS, CountsAs, ProbeAnswer, Purpose, Subset

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

    def learn(self, seen: ProbeAnswer) -> None:
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
        sums = [sum(map(mul, row, self._rates)) for row in weights]
        rates = [one / share if share else 0.0 for one, share in zip(sums, shares, strict=True)]
        noise = _entropy(self._false_bad)
        bad, known = self._false_bad, noise
        bits = [0.0]
        for share, rate in zip(shares, rates, strict=True):
            bad += share * (rate - self._false_bad)
            known += share * (_entropy(rate) - noise)
            bits.append(_entropy(bad) - known)
        return bits

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
    worth = [(chance, belief.information(weights)) for chance, weights in futures]
    return max(points, key=lambda point: sum(chance * bits[point] for chance, bits in worth))


def _entropy(chance: float) -> float:
    if chance <= 0 or chance >= 1:
        return 0.0
    return -chance * log2(chance) - (1 - chance) * log2(1 - chance)


_PATIENCE = 4  # a search may need as many times its expected probes before it is given up
_MOST_REPEATS = 100  # of one set: a failure in one of twenty runs shows at least once with 99 %
# Of an end that was judged before, one answer as expected is enough.
_EXPECTED = {Purpose.RECHECK_GOOD: GOOD, Purpose.RECHECK_BAD: BAD}
_TWICE = 2  # a point that could not be judged so often is left out


class Unsettled(Exception):
    """The answers do not settle the question; the message says why, `open` which units are left if that is known."""

    def __init__(self, why: str, open_units: Subset = frozenset()) -> None:
        super().__init__(why)
        self.open_units = open_units


def tries(rate: float, confidence: float) -> int:
    """How often to ask until something that happens at that rate has shown, at that confidence."""
    return ceil(log(1 - confidence) / log(1 - rate))


class Noisy:
    """A judge that repeats until it is sure enough. `sure` is what is left of certainty after the proofs so far.

    What passes should pass but for `false_bad`; what fails does so at a rate that `end`, known to fail, has shown.
    """

    def __init__(self, oracle: Oracle, end: Subset, doubt: float) -> None:
        self.sure = 1.0
        self._oracle = oracle
        self._false_bad = oracle.question.false_bad
        self._enough = 1 - doubt
        self._shares = self._believed(Chain(base=frozenset(), order=tuple(sorted(end)))).rates()

    @property
    def rate(self) -> float:
        return sum(share * rate for share, rate in zip(self._shares, RATES, strict=True))

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """The likeliest length of the first set that fails. Raises Unsettled if no length becomes likely enough."""
        belief = self._believed(chain)
        bound = len(self._oracle.observations) + self._at_most(len(chain))
        while max(belief.edges()) < self._enough:
            points = belief.best(self._oracle.question.at_once, self._given_up(chain))
            if not points or len(self._oracle.observations) >= bound:
                raise Unsettled(f"the runs do not settle where it begins, at {self.rate:.0%} failing")
            self._ask_at(chain, points, belief, purpose)
        self._shares = belief.rates()
        edges = belief.edges()
        return edges.index(max(edges)) + 1

    def each(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[CountsAs]:
        """What each set counts as, repeated until that is sure enough; a proof counts only what is launched for it."""
        for subset in subsets:
            yield self._settled(subset, purpose, tuple(among), times if purpose in PROOFS else 0)

    def _settled(self, subset: Subset, purpose: Purpose, among: tuple[int, ...], least: int) -> CountsAs:
        old = len(self._oracle.answers(subset)) if purpose in PROOFS else 0
        while True:
            answers = self._oracle.answers(subset)[old:]
            if (expected := _EXPECTED.get(purpose)) in answers:
                return expected
            bad = self._chance_bad(answers.count(BAD), answers.count(GOOD))
            if max(bad, 1 - bad) >= self._enough and len(answers) >= least:
                self.sure *= max(bad, 1 - bad) if purpose in PROOFS else 1.0
                return BAD if bad > 0.5 else GOOD
            if len(answers) >= _MOST_REPEATS or answers[:_TWICE].count(CountsAs.UNRESOLVED) == _TWICE:
                return CountsAs.UNRESOLVED
            list(self._oracle.ask([subset] * self._oracle.question.at_once, purpose, among))

    def _chance_bad(self, bads: int, goods: int) -> float:
        if_bad = sum(share * rate**bads * (1 - rate) ** goods for share, rate in zip(self._shares, RATES, strict=True))
        if_good: float = self._false_bad**bads * (1 - self._false_bad) ** goods
        return if_bad / (if_bad + if_good)

    def _believed(self, chain: Chain) -> Belief:
        belief = Belief(chain, self._false_bad)
        for seen in self._oracle.observations:
            belief.learn(seen)
        return belief

    def _ask_at(self, chain: Chain, points: Sequence[int], belief: Belief, purpose: Purpose) -> None:
        likely = [k for k, share in enumerate(belief.edges()) if share > (1 - self._enough) / 10]
        left = probes_at_worst(len(likely), self._oracle.question.at_once)
        among = chain.order[min(likely) : max(likely) + 1]
        list(self._oracle.ask([chain.at(point) for point in points], purpose, among, ceil(left / self.rate)))
        for seen in self._oracle.observations[-len(points) :]:
            belief.learn(seen)

    def _given_up(self, chain: Chain) -> frozenset[int]:
        silent = [one.subset for one in self._oracle.observations if one.counts_as not in (GOOD, BAD)]
        times = Counter(chain.length_of(subset) for subset in silent)
        return frozenset(length for length, count in times.items() if length is not None and count >= _TWICE)

    def _at_most(self, length: int) -> int:
        bits = log2(length) + log2(1 / (1 - self._enough))
        return ceil(_PATIENCE * bits / self.rate) * self._oracle.question.at_once
