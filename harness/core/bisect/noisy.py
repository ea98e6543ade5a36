"""Noisy: the search among runs that fail only sometimes. Every answer is evidence, none is believed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, log, log2

from harness.core.bisect.asked import BAD, GOOD, Asked
from harness.core.bisect.asking import PROOFS, CountsAs, Purpose, Subset
from harness.core.bisect.belief import RATES, Belief
from harness.core.bisect.chain import Chain
from harness.core.bisect.split import probes_at_worst

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

    def __init__(self, asked: Asked, end: Subset, doubt: float) -> None:
        self.sure = 1.0
        self._asked = asked
        self._false_bad = asked.question.false_bad
        self._enough = 1 - doubt
        self._shares = self._believed(Chain(base=frozenset(), order=tuple(sorted(end)))).rates()

    @property
    def rate(self) -> float:
        return sum(share * rate for share, rate in zip(self._shares, RATES, strict=True))

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """The likeliest length of the first set that fails. Raises Unsettled if no length becomes likely enough."""
        belief = self._believed(chain)
        bound = len(self._asked.observations) + self._at_most(len(chain))
        while max(belief.edges()) < self._enough:
            points = belief.best(self._asked.question.at_once, self._left_out(chain))
            if not points or len(self._asked.observations) >= bound:
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
        old = len(self._asked.told(subset)) if purpose in PROOFS else 0
        while True:
            told = self._asked.told(subset)[old:]
            if (expected := _EXPECTED.get(purpose)) in told:
                return expected
            bad = self._chance_bad(told.count(BAD), told.count(GOOD))
            if max(bad, 1 - bad) >= self._enough and len(told) >= least:
                self.sure *= max(bad, 1 - bad) if purpose in PROOFS else 1.0
                return BAD if bad > 0.5 else GOOD
            if len(told) >= _MOST_REPEATS or told[:_TWICE].count(CountsAs.UNRESOLVED) == _TWICE:
                return CountsAs.UNRESOLVED
            list(self._asked.ask([subset] * self._asked.question.at_once, purpose, among))

    def _chance_bad(self, bads: int, goods: int) -> float:
        if_bad = sum(share * rate**bads * (1 - rate) ** goods for share, rate in zip(self._shares, RATES, strict=True))
        if_good: float = self._false_bad**bads * (1 - self._false_bad) ** goods
        return if_bad / (if_bad + if_good)

    def _believed(self, chain: Chain) -> Belief:
        belief = Belief(chain, self._false_bad)
        for seen in self._asked.observations:
            belief.learn(seen)
        return belief

    def _ask_at(self, chain: Chain, points: Sequence[int], belief: Belief, purpose: Purpose) -> None:
        likely = [k for k, share in enumerate(belief.edges()) if share > (1 - self._enough) / 10]
        left = probes_at_worst(len(likely), self._asked.question.at_once)
        among = chain.order[min(likely) : max(likely) + 1]
        list(self._asked.ask([chain.at(point) for point in points], purpose, among, ceil(left / self.rate)))
        for seen in self._asked.observations[-len(points) :]:
            belief.learn(seen)

    def _left_out(self, chain: Chain) -> frozenset[int]:
        silent = [one.subset for one in self._asked.observations if one.counts_as not in (GOOD, BAD)]
        times = Counter(chain.length_of(subset) for subset in silent)
        return frozenset(length for length, count in times.items() if length is not None and count >= _TWICE)

    def _at_most(self, length: int) -> int:
        bits = log2(length) + log2(1 / (1 - self._enough))
        return ceil(_PATIENCE * bits / self.rate) * self._asked.question.at_once
