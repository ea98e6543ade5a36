"""The search for programs that always end the same way: which set of a chain to launch next.

Each result is final. Between the sets that pass and the sets that fail, some sets may have no usable result. The search
then probes the borders of this zone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from nsa_harness.core.search.question import BAD, GOOD, ProbeCache, ProbeResult, Purpose, Subset, Zone, combine_answers


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Sets that grow unit by unit: the set of length k contains `base` and the first k units of `order`.

    The search looks for the shortest set of the chain that fails.
    """

    base: Subset
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def set_at(self, length: int) -> Subset:
        """Return the set of this length."""
        return self.base | frozenset(self.order[:length])

    def longest_inside(self, subset: Subset) -> int:
        """Return the length of the longest set of the chain that is part of `subset`, or -1 if there is none."""
        if not self.base <= subset:
            return -1
        return next((k for k, item in enumerate(self.order) if item not in subset), len(self))

    def shortest_around(self, subset: Subset) -> int:
        """Return the length of the shortest set of the chain that contains `subset`, or len(self) + 1 if none does."""
        return max((self._lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """Return the length of `subset` if it is a set of the chain, or None if it is not."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """For each unit of `order`, the number of units up to and including it."""
        return {item: length for length, item in enumerate(self.order, start=1)}


_LARGEST_EXACT = 128  # the cost table grows with the square of the gap; for larger gaps its result is scaled


def halvings(gap: int) -> int:
    """Return how often a gap of `gap` candidates must be halved until one candidate is left."""
    return (gap - 1).bit_length()


def worst_case_probes(gap: int, at_once: int) -> int:
    """Return the largest number of probes that a search among `gap` candidates needs.

    `at_once`: the number of probes in each round.
    """
    total = 0
    while gap > 1:
        probes = min(at_once, gap - 1)
        total += probes
        gap = -(-gap // (probes + 1))
    return total


def probe_points(gap: int, at_once: int, rounds: int, bad_cost: float) -> list[int]:
    """Return where to probe in a gap of `gap` candidates, as distances from the good end.

    Several parallel probes are spread evenly. A single probe goes where the expected cost is lowest, but only so far
    from the middle that the search still ends within `rounds` rounds. `bad_cost`: the cost of a failing probe, as a
    multiple of the cost of a passing one.
    """
    probes = min(at_once, gap - 1)
    if probes > 1:
        return [gap * i // (probes + 1) for i in range(1, probes + 1)]
    return [_cheapest_cut(gap, max(rounds, halvings(gap)), round(max(bad_cost, 0.1), 1))]


def _cheapest_cut(gap: int, rounds: int, bad_cost: float) -> int:
    half = 1 << (rounds - 1)
    exact = min(gap, _LARGEST_EXACT)
    cut = _cheapest(exact, halvings(exact) if exact < gap else rounds, bad_cost)[1]
    return min(max(cut * gap // exact, gap - half, 1), half, gap - 1)


@lru_cache(maxsize=100_000)
def _cheapest(gap: int, rounds: int, bad_cost: float) -> tuple[float, int]:
    """Return the lowest expected cost of a search among `gap` candidates within `rounds`, and where it probes first.

    The unit of the cost is one passing probe. If the probe fails, the candidates up to it remain, otherwise those after
    it. All candidates are equally likely.
    """
    if gap == 1:
        return 0.0, 0
    half = 1 << (rounds - 1)
    # The middle comes first, so `min` returns it if several cuts have the same cost.
    candidates = sorted(range(max(1, gap - half), min(half, gap - 1) + 1), key=lambda cut: abs(2 * cut - gap))
    return min(((_cost(gap, cut, rounds, bad_cost), cut) for cut in candidates), key=lambda option: option[0])


def _cost(gap: int, cut: int, rounds: int, bad_cost: float) -> float:
    """Return the expected cost of a search among `gap` candidates that probes first at `cut`."""
    if_bad = bad_cost + _cheapest(cut, rounds - 1, bad_cost)[0]
    if_good = 1.0 + _cheapest(gap - cut, rounds - 1, bad_cost)[0]
    return (cut * if_bad + (gap - cut) * if_good) / gap


_ZONE_PARTS = 4  # inside a zone, probed points are at most one quarter of its width apart


def points_around_zone(low: int, high: int, others: Collection[int], count: int) -> list[int]:
    """Return at most `count` points to probe next around a zone of unjudged points; none if enough is known.

    `low` is a point that passes and `high` one that fails. `others` are points between them that could not be judged or
    failed in another way; they are assumed to form one zone. First both borders of the zone are located by halving.
    Then a few points inside it are probed, because a pass or a failure there would refute the assumption.
    """
    others_in_order = sorted(others)
    wide = max((others_in_order[-1] - others_in_order[0]) // _ZONE_PARTS, 1)
    borders = [(low, others_in_order[0]), (others_in_order[-1], high)]
    return _halve_widest_gaps(borders, 1, count) or _halve_widest_gaps(list(pairwise(others_in_order)), wide, count)


def worst_case_zone_probes(gap: int, at_once: int) -> int:
    """Return how many probes a zone of unjudged points adds at most: for its second border, and inside the zone."""
    return worst_case_probes(gap, at_once) + _ZONE_PARTS + at_once


def make_zones(low: int, high: int, end: int, between: Collection[ProbeResult]) -> tuple[Zone, ...]:
    """Return three zones in order: the values that pass, those without a usable result, and those that fail.

    `low` is the last length that passes, `high` the first that fails, and `end` the length of the bad end. `between`:
    the results inside the middle zone.
    """
    different = all(counts_as is ProbeResult.DIFFERENT for counts_as in between)
    return (
        Zone(start=0, stop=low + 1, counts_as=ProbeResult.GOOD),
        Zone(start=low + 1, stop=high, counts_as=ProbeResult.DIFFERENT if different else ProbeResult.UNRESOLVED),
        Zone(start=high, stop=end + 1, counts_as=ProbeResult.BAD),
    )


def _halve_widest_gaps(gaps: Sequence[tuple[int, int]], narrow: int, count: int) -> list[int]:
    """Return at most `count` points in ascending order.

    Each point halves the widest gap that is wider than `narrow`.
    """
    remaining, points = list(gaps), list[int]()
    while remaining and len(points) < count:
        start, stop = max(remaining, key=lambda gap: gap[1] - gap[0])
        if stop - start <= narrow:
            break
        remaining.remove((start, stop))
        points.append((start + stop) // 2)
        remaining += [(start, points[-1]), (points[-1], stop)]
    return sorted(points)


_ALWAYS_LAUNCHED = frozenset({Purpose.PROOF_BAD, Purpose.PROOF_GOOD, Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD})
# These purposes make a claim about one set, so this set itself must be launched. An implied result is not enough.
_NEVER_IMPLIED = frozenset({Purpose.DROP_ONE, Purpose.ELSEWHERE, Purpose.AS_MANY, Purpose.ONE_FEWER})


@dataclass(eq=False, kw_only=True)
class Contradiction(Exception):
    """Raised if the set `good` passed although it contains the set `bad`, which failed.

    If both are the same set, the program is flaky. Otherwise more items can turn a failure into a pass.
    """

    good: Subset
    bad: Subset


@dataclass(eq=False, kw_only=True)
class UnjudgedGap(Exception):
    """Raised if no launched set between `passing` and `failing` passed or failed in the way that is sought."""

    passing: Subset
    failing: Subset


class ExactSearch:
    """A judge that takes each result as final. Its methods raise Contradiction if a result contradicts another one."""

    confidence = 1.0
    failure_rate = None

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def first_failing_length(self, chain: Chain, purpose: Purpose) -> int:
        """Return the length of the first set of the chain that fails. The base passes, and the whole chain fails.

        Each round launches one set, or several in parallel, and so narrows the gap. Raises UnjudgedGap if no set in the
        gap that is worth launching has a usable result.
        """
        low, high = self._bounds(chain)
        neither = [answer.subset for answer in self._probes.observations if answer.counts_as not in (GOOD, BAD)]
        unjudged_lengths = {length for subset in neither if (length := chain.length_of(subset)) is not None}
        rounds = halvings(high - low)
        while high - low > 1:
            points = self._next_points(low, high, unjudged_lengths, rounds)
            if not points:
                raise UnjudgedGap(passing=chain.set_at(low), failing=chain.set_at(high))
            rounds = max(rounds - 1, 0)
            answers = self._answers_at(chain, points, (low, high), rounds, purpose)
            for point, counts_as in zip(points, answers, strict=True):
                low = max(low, point) if counts_as is GOOD else low
                high = min(high, point) if counts_as is BAD else high
                unjudged_lengths |= set() if counts_as in (GOOD, BAD) else {point}
        return high

    def judge_sets(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[ProbeResult]:
        """Yield one result for each set, from `times` launches of it.

        Earlier and implied results count as launches, except for purposes that always launch again. `among`: the units
        that may still belong to the answer.
        """
        known_answers = [self._known_answers(subset, purpose, times) for subset in subsets]
        lacking = [times - len(answers) for answers in known_answers]
        missing = [subset for subset, lack in zip(subsets, lacking, strict=True) for _ in range(lack)]
        fresh = self._launch_and_check(missing, purpose, among)
        for answers, lack in zip(known_answers, lacking, strict=True):
            yield combine_answers([*answers, *(next(fresh) for _ in range(lack))])

    def failing_sets(self) -> Iterable[Subset]:
        """Return every launched set that failed in the way that is sought."""
        return [answer.subset for answer in self._probes.observations if answer.counts_as is BAD]

    def reach_confidence(self, confidence: float) -> None:
        """Do nothing, because each result is final."""

    def _bounds(self, chain: Chain) -> tuple[int, int]:
        """Return the longest length that must pass and the shortest that must fail, from all results so far."""
        answers = self._probes.observations
        passing_lengths = (chain.longest_inside(answer.subset) for answer in answers if answer.counts_as is GOOD)
        failing_lengths = (chain.shortest_around(answer.subset) for answer in answers if answer.counts_as is BAD)
        return max(0, *passing_lengths), min(len(chain), *failing_lengths)

    def _next_points(self, low: int, high: int, unjudged_lengths: set[int], rounds: int) -> list[int]:
        question = self._probes.question
        inside = [k for k in unjudged_lengths if low < k < high]
        if not inside:
            return [low + cut for cut in probe_points(high - low, question.at_once, rounds, question.bad_cost())]
        return points_around_zone(low, high, inside, question.at_once)

    def _answers_at(
        self, chain: Chain, points: Sequence[int], bounds: tuple[int, int], rounds: int, purpose: Purpose
    ) -> list[ProbeResult]:
        low, high = bounds
        largest = max(after - before for before, after in zip((low, *points), (*points, high), strict=True))
        at_once = self._probes.question.at_once
        # With one probe per round, a cut that avoids costly failures may need all the remaining rounds.
        probes_left = max(rounds, halvings(largest)) if at_once == 1 else worst_case_probes(largest, at_once)
        subsets = [chain.set_at(point) for point in points]
        return list(self._launch_and_check(subsets, purpose, chain.order[low:high], probes_left))

    def _known_answers(self, subset: Subset, purpose: Purpose, times: int) -> list[ProbeResult]:
        """Return at most `times` known results of the set; none if this purpose always launches again."""
        if purpose in _ALWAYS_LAUNCHED:
            return []
        answers = self._probes.answers(subset)[-times:]
        is_judged = GOOD in answers or BAD in answers
        implied_result = None if is_judged or purpose in _NEVER_IMPLIED else self._probes.implied_result(subset)
        return answers if implied_result is None else [implied_result] * times

    def _launch_and_check(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], probes_left: int = 0
    ) -> Iterator[ProbeResult]:
        answers = self._probes.launch(subsets, purpose, among, probes_left)
        for subset, counts_as in zip(subsets, answers, strict=True):
            self._check_against_earlier(subset, counts_as)
            yield counts_as

    def _check_against_earlier(self, subset: Subset, counts_as: ProbeResult) -> None:
        for observation in self._probes.observations:
            if (counts_as, observation.counts_as) == (GOOD, BAD) and observation.subset <= subset:
                raise Contradiction(good=subset, bad=observation.subset)
            if (counts_as, observation.counts_as) == (BAD, GOOD) and subset <= observation.subset:
                raise Contradiction(good=observation.subset, bad=subset)
