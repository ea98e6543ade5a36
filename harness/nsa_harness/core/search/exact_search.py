"""Search for the length at which a chain of growing sets starts to fail, in a program that is not flaky.

Each result is final. Between the sets that pass and the sets that fail, some sets may have no usable result. The search
then runs the borders of this zone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from nsa_harness.core.search.question import BAD, GOOD, ProbeCache, ProbeResult, Purpose, Subset, Zone, combine_answers


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A sequence of growing sets of items, which starts with `base` and adds one item of `order` at a time.

    The set of length k contains `base` and the first k units of `order`. The search looks for the shortest set that
    fails.
    """

    base: Subset
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def set_at(self, length: int) -> Subset:
        """Return the set of the chain that contains `base` and the first `length` items of `order`."""
        return self.base | frozenset(self.order[:length])

    def longest_inside(self, subset: Subset) -> int:
        """Return the length of the longest set in the chain that is part of `subset`, or -1 if there is none."""
        if not self.base <= subset:
            return -1
        return next((k for k, item in enumerate(self.order) if item not in subset), len(self))

    def shortest_around(self, subset: Subset) -> int:
        """Return the length of the shortest set in the chain that contains `subset`, or len(self) + 1 if none does."""
        return max((self._lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """Return the length of `subset` in the chain, or None if it is not in the chain."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        return {item: length for length, item in enumerate(self.order, start=1)}


_LARGEST_EXACT = 128  # the cost table grows with the square of the gap; for larger gaps its result is scaled


def halvings(gap: int) -> int:
    """Return the number of times that `gap` possible answers must be halved until one is left."""
    return (gap - 1).bit_length()


def worst_case_probes(gap: int, at_once: int) -> int:
    """Return the maximum number of test runs, `at_once` in parallel, to find one of `gap` answers."""
    total = 0
    while gap > 1:
        probes = min(at_once, gap - 1)
        total += probes
        gap = -(-gap // (probes + 1))
    return total


def probe_points(gap: int, at_once: int, rounds: int, bad_cost: float) -> list[int]:
    """Return the lengths of the sets to run next, counted from the longest set known to pass.

    The first failing length is one of `gap`. Several parallel runs are spread evenly. A single run goes where the
    expected cost is lowest, but such that the search still ends within `rounds` rounds. `bad_cost` is the ratio of the
    durations of a failing and a passing run.
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
    """Return the lowest expected cost of finding one of `gap` answers, and the length to run first."""
    if gap == 1:
        return 0.0, 0
    half = 1 << (rounds - 1)
    # The middle comes first, so `min` returns it if several cuts have the same cost.
    candidates = sorted(range(max(1, gap - half), min(half, gap - 1) + 1), key=lambda cut: abs(2 * cut - gap))
    return min(((_cost(gap, cut, rounds, bad_cost), cut) for cut in candidates), key=lambda option: option[0])


def _cost(gap: int, cut: int, rounds: int, bad_cost: float) -> float:
    if_bad = bad_cost + _cheapest(cut, rounds - 1, bad_cost)[0]
    if_good = 1.0 + _cheapest(gap - cut, rounds - 1, bad_cost)[0]
    return (cut * if_bad + (gap - cut) * if_good) / gap


_ZONE_PARTS = 4  # inside a zone, probed points are at most one quarter of its width apart


def points_around_zone(low: int, high: int, others: Collection[int], count: int) -> list[int]:
    """Return up to `count` set lengths to run next, close to the lengths that had no usable result.

    The list is empty if enough is known. `low` passes and `high` fails. `others` are lengths between them without a
    usable result. They are assumed to be consecutive: first both borders are located by halving, then a few lengths
    inside are run, because a pass or a failure there would refute the assumption.
    """
    others_in_order = sorted(others)
    wide = max((others_in_order[-1] - others_in_order[0]) // _ZONE_PARTS, 1)
    borders = [(low, others_in_order[0]), (others_in_order[-1], high)]
    return _halve_widest_gaps(borders, 1, count) or _halve_widest_gaps(list(pairwise(others_in_order)), wide, count)


def worst_case_zone_probes(gap: int, at_once: int) -> int:
    """Return the maximum number of extra test runs needed if some lengths have no usable result."""
    return worst_case_probes(gap, at_once) + _ZONE_PARTS + at_once


def make_zones(low: int, high: int, end: int, between: Collection[ProbeResult]) -> tuple[Zone, ...]:
    """Return three ranges of values: those that pass, those without a usable result, and those that fail.

    `low` is the last length that passes, `high` the first that fails, and `end` the last length. `between` are the
    results inside the middle zone.
    """
    different = all(counts_as is ProbeResult.DIFFERENT for counts_as in between)
    return (
        Zone(start=0, stop=low + 1, counts_as=ProbeResult.GOOD),
        Zone(start=low + 1, stop=high, counts_as=ProbeResult.DIFFERENT if different else ProbeResult.UNRESOLVED),
        Zone(start=high, stop=end + 1, counts_as=ProbeResult.BAD),
    )


def _halve_widest_gaps(gaps: Sequence[tuple[int, int]], narrow: int, count: int) -> list[int]:
    """Return up to `count` points in ascending order, each of which halves the widest remaining gap."""
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
# A proof needs this many failures of the answer and passes of the rest. With fewer, a program with a second, rare
# failure produced wrong answers by chance.
MIN_FAILURES, MIN_PASSES = 3, 2
_MAX_EXCESS_UNJUDGED = 2  # a proof gives up after this many more unjudged launches than it needs judged ones
# These purposes make a claim about one set, so this set itself must be launched. An implied result is not enough.
_NEVER_IMPLIED = frozenset({Purpose.DROP_ONE, Purpose.ELSEWHERE, Purpose.AS_MANY, Purpose.ONE_FEWER})


@dataclass(eq=False, kw_only=True)
class Contradiction(Exception):
    """Raised if the set `good`, which passed, contains the set `bad`, which failed.

    If both are the same set, the program is flaky. Otherwise, switching on more items can turn a failure into a pass.
    """

    good: Subset
    bad: Subset


@dataclass(eq=False, kw_only=True)
class UnjudgedGap(Exception):
    """Raised if no run between the sets `passing` and `failing` had a usable result."""

    passing: Subset
    failing: Subset


def launch_until_judged(
    probes: ProbeCache, subset: Subset, purpose: Purpose, among: Iterable[int], answers: Sequence[ProbeResult]
) -> ProbeResult:
    """Return the result of a proof: launch the set again for each of its `answers` that was neither GOOD nor BAD.

    Returns the last result that could not be judged if too many launches could not. Raises Contradiction if the set
    both passed and failed.
    """
    results = list(answers)
    while True:
        judged = [counts_as for counts_as in results if counts_as in (GOOD, BAD)]
        if len({*judged, *(counts_as for counts_as in probes.answers(subset) if counts_as in (GOOD, BAD))}) > 1:
            raise Contradiction(good=subset, bad=subset)
        if len(judged) >= len(answers):
            return judged[0]
        if len(results) - len(judged) > len(answers) + _MAX_EXCESS_UNJUDGED:
            return next(counts_as for counts_as in reversed(results) if counts_as not in (GOOD, BAD))
        results += probes.launch([subset], purpose, among)


def launch_against(
    probes: ProbeCache, failing: Subset, requests: Iterable[tuple[Subset, Purpose]], among: Iterable[int]
) -> None:
    """Run the sets of `requests`, which should pass, in mixed order with the missing proofs that `failing` fails."""
    proofs = [(failing, Purpose.PROOF_BAD)] * max(MIN_FAILURES - probes.count(failing, BAD), 0)
    probes.launch_ahead([*requests, *proofs], among, until_surprise=True)


class ExactSearch:
    """A search strategy for programs that always end alike, or else raise Contradiction."""

    confidence = 1.0
    failure_rate = None
    comes_in_bursts = False

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def first_failing_length(self, chain: Chain, purpose: Purpose) -> int:
        """Return the length of the chain's shortest failing set. Raises UnjudgedGap if no set is usable."""
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
        self,
        subsets: Sequence[Subset],
        purpose: Purpose,
        among: Iterable[int],
        times: int = 1,
        against: Subset | None = None,
    ) -> Iterator[ProbeResult]:
        """Yield, for each set of items, whether the program passes or fails, based on `times` runs.

        Earlier and implied results count as runs, except for purposes that always run again. `among` has the units that
        may still belong to the answer. The proofs that `against` fails are run in turn with the runs of `subsets`.
        """
        known_answers = [self._known_answers(subset, purpose, times) for subset in subsets]
        lacking = [times - len(answers) for answers in known_answers]
        missing = [subset for subset, lack in zip(subsets, lacking, strict=True) for _ in range(lack)]
        if against is not None:
            launch_against(self._probes, against, [(subset, purpose) for subset in missing], among)
        fresh = self._launch_and_check(missing, purpose, among)
        for subset, answers, lack in zip(subsets, known_answers, lacking, strict=True):
            results = [*answers, *(next(fresh) for _ in range(lack))]
            is_proof = purpose in _ALWAYS_LAUNCHED
            yield (
                launch_until_judged(self._probes, subset, purpose, among, results)
                if is_proof
                else combine_answers(results)
            )

    def launch_together(self, requests: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None:
        """Run the sets of several proofs in mixed order, until one has an unexpected result."""
        self._probes.launch_ahead(requests, among, until_surprise=True)

    def failing_sets(self) -> Iterable[Subset]:
        """Return every set of items for which a run of the program failed."""
        return [answer.subset for answer in self._probes.observations if answer.counts_as is BAD]

    def reach_confidence(self, confidence: float) -> None:
        """Do nothing, because every result of this search is final."""

    def _bounds(self, chain: Chain) -> tuple[int, int]:
        """Return the length of the longest set in the chain known to pass, and of the shortest known to fail."""
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
