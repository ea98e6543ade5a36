"""The exact search: where on a chain of growing sets to launch next, when each answer is final.

Between the sets that pass and the sets that fail, neighbours may count as neither. The search then probes the borders
of this zone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from nsa_harness.core.search.question import BAD, GOOD, CountsAs, ProbeCache, Purpose, Subset, Zone, together


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Sets that grow item by item: the k-th is `base` with the first k of `order`. One of them is the first to fail."""

    base: Subset
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def at(self, length: int) -> Subset:
        return self.base | frozenset(self.order[:length])

    def longest_inside(self, subset: Subset) -> int:
        """Return the length of the longest set of the chain inside `subset`; -1 if even the base is not."""
        if not self.base <= subset:
            return -1
        return next((k for k, item in enumerate(self.order) if item not in subset), len(self))

    def shortest_around(self, subset: Subset) -> int:
        """Return the length of the shortest set of the chain that contains `subset`; len(self) + 1 if none does."""
        return max((self._lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """Return the length of the set in the chain, or None if it is not one of its sets."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """For each item, the first length whose set contains it."""
        return {item: length for length, item in enumerate(self.order, start=1)}


_LARGEST_EXACT = 128  # the cost table grows with the square of the gap; larger gaps use its proportions


def depth(gap: int) -> int:
    """Return how often `gap` places must be halved until one is left."""
    return (gap - 1).bit_length()


def probes_at_worst(gap: int, at_once: int) -> int:
    """Return the most probes that a search among `gap` places takes, `at_once` of them in each round."""
    total = 0
    while gap > 1:
        probes = min(at_once, gap - 1)
        total += probes
        gap = -(-gap // (probes + 1))
    return total


def cuts(gap: int, at_once: int, rounds: int, bad_cost: float) -> list[int]:
    """Return where to probe among `gap` places, as distances from the good end.

    Several probes at once are spread evenly; a single probe goes where the expected cost is lowest. `rounds` is the
    number of rounds that may still be needed: a costly bad answer never adds to it.
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
    """Return the least expected cost of a search among `gap` places within `rounds`, and its first cut.

    The cost is counted in good probes. A bad answer leaves the places up to the cut, a good answer those after it; all
    places are equally likely.
    """
    if gap == 1:
        return 0.0, 0
    half = 1 << (rounds - 1)
    # The middle comes first: min keeps it among cuts of equal cost.
    allowed = sorted(range(max(1, gap - half), min(half, gap - 1) + 1), key=lambda cut: abs(2 * cut - gap))
    return min(((_cost(gap, cut, rounds, bad_cost), cut) for cut in allowed), key=lambda option: option[0])


def _cost(gap: int, cut: int, rounds: int, bad_cost: float) -> float:
    """Return the expected cost of that search if its first probe is at `cut`: a good probe costs 1."""
    if_bad = bad_cost + _cheapest(cut, rounds - 1, bad_cost)[0]
    if_good = 1.0 + _cheapest(gap - cut, rounds - 1, bad_cost)[0]
    return (cut * if_bad + (gap - cut) * if_good) / gap


_ZONE_PARTS = 4  # no stretch of a zone wider than this part of it is left without a probed point


def points_around_zone(low: int, high: int, others: Collection[int], count: int) -> list[int]:
    """Return at most `count` points to probe next between a good and a bad point, or none if enough is known.

    `others` are points between the two that counted as neither, and are assumed to form one zone. First both borders of
    the zone are narrowed by halves, then a few points inside it are probed: a good or bad one would refute the zone.
    """
    ordered = sorted(others)
    wide = max((ordered[-1] - ordered[0]) // _ZONE_PARTS, 1)
    borders = [(low, ordered[0]), (ordered[-1], high)]
    return _middles(borders, 1, count) or _middles(list(pairwise(ordered)), wide, count)


def zone_probes_at_worst(gap: int, at_once: int) -> int:
    """Return the probes that a zone among `gap` places adds at worst: for its other border, and inside it."""
    return probes_at_worst(gap, at_once) + _ZONE_PARTS + at_once


def zones(low: int, high: int, end: int, between: Collection[CountsAs]) -> tuple[Zone, ...]:
    """Return the zone that passes, the zone that counts as neither, and the zone that fails.

    `between` are the answers inside the middle zone; `end` is the length of the bad end.
    """
    different = all(counts_as is CountsAs.DIFFERENT for counts_as in between)
    return (
        Zone(start=0, stop=low + 1, counts_as=CountsAs.GOOD),
        Zone(start=low + 1, stop=high, counts_as=CountsAs.DIFFERENT if different else CountsAs.UNRESOLVED),
        Zone(start=high, stop=end + 1, counts_as=CountsAs.BAD),
    )


def _middles(gaps: Sequence[tuple[int, int]], narrow: int, count: int) -> list[int]:
    """Return at most `count` points: each halves the widest gap left, while that is wider than `narrow`."""
    left, chosen = list(gaps), list[int]()
    while left and len(chosen) < count:
        start, stop = max(left, key=lambda gap: gap[1] - gap[0])
        if stop - start <= narrow:
            break
        left.remove((start, stop))
        chosen.append((start + stop) // 2)
        left += [(start, chosen[-1]), (chosen[-1], stop)]
    return sorted(chosen)


_LAUNCHED_AGAIN = frozenset({Purpose.PROOF_BAD, Purpose.PROOF_GOOD, Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
# A claim about this exact set must be launched: an answer implied by other sets is not enough.
_FOR_ITSELF = frozenset({Purpose.DROP_ONE, Purpose.ELSEWHERE, Purpose.AS_MANY, Purpose.ONE_FEWER})


@dataclass(eq=False, kw_only=True)
class Contradicted(Exception):
    """`good` passed although it contains `bad`, which failed. Equal sets mean flaky runs, others no monotone order."""

    good: Subset
    bad: Subset


@dataclass(eq=False, kw_only=True)
class Unjudged(Exception):
    """No set that was launched between these two counts as good or bad."""

    passing: Subset
    failing: Subset


class ExactSearch:
    """A judge that takes each answer as final. Raises Contradicted at the first answer that contradicts another."""

    sure = 1.0
    rate = None

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def edge(self, chain: Chain, purpose: Purpose) -> int:
        """Return the length of the first set of the chain that fails: its base passes, and the whole chain fails.

        Each round probes one length or, in parallel, several, and narrows the gap. Raises Unjudged if every probe that
        is still worth launching in the gap counted as neither good nor bad.
        """
        low, high = self._bounds(chain)
        neither = [answer.subset for answer in self._probes.observations if answer.counts_as not in (GOOD, BAD)]
        unresolved = {length for subset in neither if (length := chain.length_of(subset)) is not None}
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
        """Yield one answer for each set, from `times` launches of it.

        Known and implied answers count as launches, except for purposes that launch every set again.
        """
        known = [self._known_answers(subset, purpose, times) for subset in subsets]
        lacking = [times - len(answers) for answers in known]
        missing = [subset for subset, lack in zip(subsets, lacking, strict=True) for _ in range(lack)]
        fresh = self._fresh(missing, purpose, among)
        for answers, lack in zip(known, lacking, strict=True):
            yield together([*answers, *(next(fresh) for _ in range(lack))])

    def failed(self) -> Iterable[Subset]:
        """Return the sets that were seen to fail."""
        return [answer.subset for answer in self._probes.observations if answer.counts_as is BAD]

    def make_sure(self, confidence: float) -> None:
        """Do nothing: each answer is final."""

    def _bounds(self, chain: Chain) -> tuple[int, int]:
        """Return the longest length that must pass and the shortest that must fail, from all answers so far."""
        answers = self._probes.observations
        passed = (chain.longest_inside(answer.subset) for answer in answers if answer.counts_as is GOOD)
        failed = (chain.shortest_around(answer.subset) for answer in answers if answer.counts_as is BAD)
        return max(0, *passed), min(len(chain), *failed)

    def _points(self, low: int, high: int, unresolved: set[int], rounds: int) -> list[int]:
        question = self._probes.question
        inside = [k for k in unresolved if low < k < high]
        if not inside:
            return [low + cut for cut in cuts(high - low, question.at_once, rounds, question.bad_cost())]
        return points_around_zone(low, high, inside, question.at_once)

    def _answers_at(
        self, chain: Chain, points: Sequence[int], bounds: tuple[int, int], rounds: int, purpose: Purpose
    ) -> list[CountsAs]:
        low, high = bounds
        largest = max(after - before for before, after in zip((low, *points), (*points, high), strict=True))
        at_once = self._probes.question.at_once
        # With one probe at a time, a cut that avoids costly answers may need all the rounds that are left.
        left = max(rounds, depth(largest)) if at_once == 1 else probes_at_worst(largest, at_once)
        subsets = [chain.at(point) for point in points]
        return list(self._fresh(subsets, purpose, chain.order[low:high], left))

    def _known_answers(self, subset: Subset, purpose: Purpose, times: int) -> list[CountsAs]:
        """Return the answers known for the set, at most `times` of them."""
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
