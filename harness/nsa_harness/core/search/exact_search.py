"""The exact search: where on a chain of growing sets to launch next, if an answer given once holds.

Between what passes and what fails neighbours may count as neither: a zone, whose borders are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from nsa_harness.core.search.question import BAD, GOOD, CountsAs, ProbeCache, Purpose, Subset, Zone, together


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Sets that grow by one item: the k-th is `base` and the first k of `order`. One of them is the first to fail."""

    base: Subset
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def at(self, length: int) -> Subset:
        return self.base | frozenset(self.order[:length])

    def longest_inside(self, subset: Subset) -> int:
        """The longest set of the chain that lies in `subset`; -1 if not even the base does."""
        if not self.base <= subset:
            return -1
        return next((k for k, item in enumerate(self.order) if item not in subset), len(self))

    def shortest_around(self, subset: Subset) -> int:
        """The shortest set of the chain that `subset` lies in; one more than there are if none does."""
        return max((self._lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """Return the length of the set in the chain, or None if it is not one of its sets."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """The first length that holds each item."""
        return {item: length for length, item in enumerate(self.order, start=1)}


_LARGEST_EXACT = 128  # the table grows with the square of the gap; above this its proportions are close enough


def depth(gap: int) -> int:
    """Return how often `gap` places must be halved until one is left."""
    return (gap - 1).bit_length()


def probes_at_worst(gap: int, at_once: int) -> int:
    """Return all probes of a search among `gap` places, `at_once` of them in each round."""
    total = 0
    while gap > 1:
        probes = min(at_once, gap - 1)
        total += probes
        gap = -(-gap // (probes + 1))
    return total


def cuts(gap: int, at_once: int, rounds: int, bad_cost: float) -> list[int]:
    """Return where to probe among `gap` places, as distances from the good end: several in equal steps, one by cost.

    `rounds` is how many may still be needed at worst; a dearer bad answer never adds to them.
    """
    probes = min(at_once, gap - 1)
    if probes > 1:
        return [gap * i // (probes + 1) for i in range(1, probes + 1)]
    return [_scaled(gap, max(rounds, depth(gap)), round(max(bad_cost, 0.1), 1))]


def _scaled(gap: int, rounds: int, bad_cost: float) -> int:
    half = 1 << (rounds - 1)
    exact = min(gap, _LARGEST_EXACT)
    cut = _cheapest(exact, depth(exact) if exact < gap else rounds, bad_cost)[1]
    return min(max(cut * gap // exact, gap - half, 1), half, gap - 1)


@lru_cache(maxsize=100_000)
def _cheapest(gap: int, rounds: int, bad_cost: float) -> tuple[float, int]:
    """Return the expected cost and the first cut, in times of a good probe, within the number of rounds.

    A bad answer leaves the places up to the cut, a good one those behind it; each place is as likely as any.
    """
    if gap == 1:
        return 0.0, 0
    half = 1 << (rounds - 1)
    # The middle comes first: min keeps it among cuts of equal cost.
    allowed = sorted(range(max(1, gap - half), min(half, gap - 1) + 1), key=lambda cut: abs(2 * cut - gap))
    return min(((_cost(gap, cut, rounds, bad_cost), cut) for cut in allowed), key=lambda option: option[0])


def _cost(gap: int, cut: int, rounds: int, bad_cost: float) -> float:
    if_bad = bad_cost + _cheapest(cut, rounds - 1, bad_cost)[0]
    if_good = 1.0 + _cheapest(gap - cut, rounds - 1, bad_cost)[0]
    return (cut * if_bad + (gap - cut) * if_good) / gap


_UNASKED = 4  # of a zone no stretch wider than such a part is believed without a point of it being asked


def beside(low: int, high: int, others: Collection[int], count: int) -> list[int]:
    """Return where to probe next between a good and a bad point, at most `count`; none if enough is known.

    `others` lie between the two and count as neither. They are taken for neighbours of one kind: its two borders are
    halved first; then a few points within it are asked, of which one that is good or bad shows that it is not one.
    """
    ordered = sorted(others)
    wide = max((ordered[-1] - ordered[0]) // _UNASKED, 1)
    borders = [(low, ordered[0]), (ordered[-1], high)]
    return _middles(borders, 1, count) or _middles(list(pairwise(ordered)), wide, count)


def beside_at_worst(gap: int, at_once: int) -> int:
    """Return what a zone among `gap` places adds to the probes: its other border, and what lies within."""
    return probes_at_worst(gap, at_once) + _UNASKED + at_once


def zones(low: int, high: int, end: int, between: Collection[CountsAs]) -> tuple[Zone, ...]:
    """Return the zones that pass, that count as neither by what was seen `between` them, and that fail."""
    different = all(counts_as is CountsAs.DIFFERENT for counts_as in between)
    return (
        Zone(start=0, stop=low + 1, counts_as=CountsAs.GOOD),
        Zone(start=low + 1, stop=high, counts_as=CountsAs.DIFFERENT if different else CountsAs.UNRESOLVED),
        Zone(start=high, stop=end + 1, counts_as=CountsAs.BAD),
    )


def _middles(gaps: Sequence[tuple[int, int]], narrow: int, count: int) -> list[int]:
    """The middle of the widest gap, and so on, as long as one is wider than `narrow`."""
    left, chosen = list(gaps), list[int]()
    while left and len(chosen) < count:
        start, stop = max(left, key=lambda gap: gap[1] - gap[0])
        if stop - start <= narrow:
            break
        left.remove((start, stop))
        chosen.append((start + stop) // 2)
        left += [(start, chosen[-1]), (chosen[-1], stop)]
    return sorted(chosen)


# The exact search.


_LAUNCHED_AGAIN = frozenset({Purpose.PROOF_BAD, Purpose.PROOF_GOOD, Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
# A claim about this very set: that it follows from others is not enough.
_FOR_ITSELF = frozenset({Purpose.DROP_ONE, Purpose.ELSEWHERE, Purpose.AS_MANY, Purpose.ONE_FEWER})


@dataclass(eq=False, kw_only=True)
class Contradicted(Exception):
    """`good` passed though it holds all of `bad`, which failed: flaky if they are equal, else not monotone."""

    good: Subset
    bad: Subset


@dataclass(eq=False, kw_only=True)
class Unjudged(Exception):
    """Nothing that was launched between these two sets counts as good or bad."""

    passing: Subset
    failing: Subset


class ExactSearch:
    """A judge that believes each answer. Raises Contradicted at the first that does not go with the others."""

    sure = 1.0
    rate = None

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """The length of the first set of the chain that fails; the whole chain does, its base does not.

        Raises Unjudged if what is neither good nor bad, all of it as far as was asked, keeps the two apart.
        """
        low, high = self._known(chain)
        silent = [answer.subset for answer in self._probes.observations if answer.counts_as not in (GOOD, BAD)]
        unresolved = {length for subset in silent if (length := chain.length_of(subset)) is not None}
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
        """Return the sets that were seen to fail."""
        return [answer.subset for answer in self._probes.observations if answer.counts_as is BAD]

    def make_sure(self, confidence: float) -> None:
        """Do nothing: each answer holds once it was given."""

    def _known(self, chain: Chain) -> tuple[int, int]:
        """The longest set that must pass and the shortest that must fail, after all that was asked."""
        seen = self._probes.observations
        passed = (chain.longest_inside(one.subset) for one in seen if one.counts_as is GOOD)
        failed = (chain.shortest_around(one.subset) for one in seen if one.counts_as is BAD)
        return max(0, *passed), min(len(chain), *failed)

    def _points(self, low: int, high: int, unresolved: set[int], rounds: int) -> list[int]:
        question = self._probes.question
        inside = [k for k in unresolved if low < k < high]
        if not inside:
            return [low + cut for cut in cuts(high - low, question.at_once, rounds, question.bad_cost())]
        return beside(low, high, inside, question.at_once)

    def _answers_at(
        self, chain: Chain, points: Sequence[int], bounds: tuple[int, int], rounds: int, purpose: Purpose
    ) -> list[CountsAs]:
        low, high = bounds
        largest = max(after - before for before, after in zip((low, *points), (*points, high), strict=True))
        at_once = self._probes.question.at_once
        # One at a time, a cut that spares dear answers may use up all rounds that are left.
        left = max(rounds, depth(largest)) if at_once == 1 else probes_at_worst(largest, at_once)
        subsets = [chain.at(point) for point in points]
        return list(self._fresh(subsets, purpose, chain.order[low:high], left))

    def _before(self, subset: Subset, purpose: Purpose, times: int) -> list[CountsAs]:
        """Return what is known of the set, at most as often as needed."""
        if purpose in _LAUNCHED_AGAIN:
            return []
        answers = self._probes.answers(subset)[-times:]
        judged = GOOD in answers or BAD in answers
        implied = None if judged or purpose in _FOR_ITSELF else self._probes.implied(subset)
        return answers if implied is None else [implied] * times

    def _fresh(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], left: int = 0
    ) -> Iterator[CountsAs]:
        answers = self._probes.ask(subsets, purpose, among, left)
        for subset, counts_as in zip(subsets, answers, strict=True):
            self._check(subset, counts_as)
            yield counts_as

    def _check(self, subset: Subset, counts_as: CountsAs) -> None:
        for seen in self._probes.observations:
            if (counts_as, seen.counts_as) == (GOOD, BAD) and seen.subset <= subset:
                raise Contradicted(good=subset, bad=seen.subset)
            if (counts_as, seen.counts_as) == (BAD, GOOD) and subset <= seen.subset:
                raise Contradicted(good=seen.subset, bad=subset)
