"""Edge: the noise-free search. An answer given once holds, and more items never turn bad into good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.search.chain import Chain, beside, cuts, depth, probes_at_worst
from nsa_harness.core.search.probe_cache import BAD, GOOD, ProbeCache, together
from nsa_harness.core.search.question import CountsAs, Purpose, Subset

_LAUNCHED_AGAIN = frozenset({Purpose.PROOF_BAD, Purpose.PROOF_GOOD, Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
# A claim about this very set: that it follows from others is not enough.
_FOR_ITSELF = frozenset({Purpose.DROP_ONE, Purpose.ELSEWHERE, Purpose.AS_MANY, Purpose.ONE_FEWER})


@dataclass(eq=False, kw_only=True)
class Contradicted(Exception):
    """`good` passed though it holds all of `bad`, which failed: flaky if they are the same, or else not monotone."""

    good: Subset
    bad: Subset


@dataclass(eq=False, kw_only=True)
class Unjudged(Exception):
    """Of what was asked between these two nothing counts as good or bad."""

    passing: Subset
    failing: Subset


class ExactSearch:
    """A judge that believes each answer. Raises Contradicted at the first that does not go with the others."""

    sure = 1.0
    rate = None

    def __init__(self, oracle: ProbeCache) -> None:
        self._oracle = oracle

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """The length of the first set of the chain that fails; the whole chain does, its base does not.

        Raises Unjudged if what is neither good nor bad, all of it as far as was asked, keeps the two apart.
        """
        low, high = self._known(chain)
        unresolved = self._unresolved(chain)
        rounds = depth(high - low)
        while high - low > 1:
            points = self._points(low, high, unresolved, rounds)
            if not points:
                raise Unjudged(passing=chain.at(low), failing=chain.at(high))
            rounds = max(rounds - 1, 0)
            answers = self._answers_at(chain, points, (low, high), rounds, purpose)
            for point, counts_as in zip(points, answers, strict=True):
                low = max(low, point) if counts_as is GOOD else low
                high = min(high, point) if counts_as is BAD else high
                unresolved |= set() if counts_as in (GOOD, BAD) else {point}
        return high

    def each(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[CountsAs]:
        """The answers in order, each told so many times; asks what that lacks, or all if it is to be launched again."""
        known = [self._before(subset, purpose, times) for subset in subsets]
        lacking = [times - len(answers) for answers in known]
        missing = [subset for subset, lack in zip(subsets, lacking, strict=True) for _ in range(lack)]
        fresh = self._fresh(missing, purpose, among)
        for answers, lack in zip(known, lacking, strict=True):
            yield together([*answers, *(next(fresh) for _ in range(lack))])

    def failed(self) -> Iterable[Subset]:
        """What was seen to fail."""
        return [one.subset for one in self._oracle.observations if one.counts_as is BAD]

    def make_sure(self, confidence: float) -> None:
        """Each answer holds once it was given."""

    def _known(self, chain: Chain) -> tuple[int, int]:
        """The longest set that must pass and the shortest that must fail, after all that was asked."""
        seen = self._oracle.observations
        passed = (chain.longest_inside(one.subset) for one in seen if one.counts_as is GOOD)
        failed = (chain.shortest_around(one.subset) for one in seen if one.counts_as is BAD)
        return max(0, *passed), min(len(chain), *failed)

    def _unresolved(self, chain: Chain) -> set[int]:
        silent = [one.subset for one in self._oracle.observations if one.counts_as not in (GOOD, BAD)]
        return {length for subset in silent if (length := chain.length_of(subset)) is not None}

    def _points(self, low: int, high: int, unresolved: set[int], rounds: int) -> list[int]:
        question = self._oracle.question
        inside = [k for k in unresolved if low < k < high]
        if not inside:
            return [low + cut for cut in cuts(high - low, question.at_once, rounds, question.bad_cost())]
        return beside(low, high, inside, question.at_once)

    def _answers_at(
        self, chain: Chain, points: Sequence[int], bounds: tuple[int, int], rounds: int, purpose: Purpose
    ) -> list[CountsAs]:
        low, high = bounds
        largest = max(after - before for before, after in zip((low, *points), (*points, high), strict=True))
        at_once = self._oracle.question.at_once
        # One at a time, a cut that spares dear answers may use up all rounds that are left.
        left = max(rounds, depth(largest)) if at_once == 1 else probes_at_worst(largest, at_once)
        subsets = [chain.at(point) for point in points]
        return list(self._fresh(subsets, purpose, chain.order[low:high], left))

    def _before(self, subset: Subset, purpose: Purpose, times: int) -> list[CountsAs]:
        """What is known of it, at most as often as needed."""
        if purpose in _LAUNCHED_AGAIN:
            return []
        answers = self._oracle.answers(subset)[-times:]
        judged = GOOD in answers or BAD in answers
        implied = None if judged or purpose in _FOR_ITSELF else self._oracle.implied(subset)
        return answers if implied is None else [implied] * times

    def _fresh(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], left: int = 0
    ) -> Iterator[CountsAs]:
        answers = self._oracle.ask(subsets, purpose, among, left)
        for subset, counts_as in zip(subsets, answers, strict=True):
            self._check(subset, counts_as)
            yield counts_as

    def _check(self, subset: Subset, counts_as: CountsAs) -> None:
        for seen in self._oracle.observations:
            if (counts_as, seen.counts_as) == (GOOD, BAD) and seen.subset <= subset:
                raise Contradicted(good=subset, bad=seen.subset)
            if (counts_as, seen.counts_as) == (BAD, GOOD) and subset <= seen.subset:
                raise Contradicted(good=seen.subset, bad=subset)
