"""Reduce a set of items for which the program fails to the smallest part that still fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from math import gcd
from typing import Protocol

from nsa_harness.core.search.exact_search import Chain, launch_against, launch_until_judged
from nsa_harness.core.search.question import BAD, GOOD, ProbeCache, ProbeResult, Purpose, Subset


class LiteralJudge:
    """A search strategy that runs the program with every set of items and infers nothing from other sets."""

    confidence = 1.0
    failure_rate = None
    comes_in_bursts = False

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def judge_sets(
        self,
        subsets: Sequence[Subset],
        purpose: Purpose,
        among: Iterable[int],
        times: int = 1,
        against: Subset | None = None,
    ) -> Iterator[ProbeResult]:
        """Run the program with each set until `times` runs are judged, and yield one result per set."""
        for subset in subsets:
            if against is not None:
                launch_against(self._probes, against, [(subset, purpose)] * times, among)
            answers = list(self._probes.launch([subset] * times, purpose, among))
            yield launch_until_judged(self._probes, subset, purpose, among, answers)

    def launch_together(self, requests: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None:
        """Run the sets of several proofs in mixed order, until one has an unexpected result."""
        self._probes.launch_ahead(requests, among, until_surprise=True)


_MAX_OTHER_FAILURES = 24  # `ddmin` stops after this many probes that failed in another way than the sought one


def ddmin(probes: ProbeCache, failing: Subset, times: int) -> FailingSet:
    """Reduce a failing set of items until the program passes if any one of them is left out.

    This is Zeller's delta debugging algorithm. It may need as many test runs as the square of the set's size. The
    program runs `times` times without each member of the result, and once with any other set. In the result, `unjudged`
    are the members whose removal gave no usable result. If too many runs fail in another way, the reduction stops with
    the smallest set so far, and all its members are in `unjudged`. Raises Contradiction if a set passed and failed.
    """
    others = _OtherFailures(probes)
    parts = 2
    while len(failing) > 1 and not others.too_many:
        smaller, parts = _reduce_once(probes, failing, min(parts, len(failing)), others)
        if smaller is None:
            break
        failing = smaller
    unjudged = failing if others.too_many else _unjudged_members(probes, failing, sorted(failing), times)
    return FailingSet(members=failing, unjudged=unjudged)


class _OtherFailures:
    """A counter of the test runs that failed in a different way since the counter was created."""

    def __init__(self, probes: ProbeCache) -> None:
        self._probes, self._before = probes, len(probes.observations)

    @property
    def too_many(self) -> bool:
        since = self._probes.observations[self._before :]
        return sum(answer.counts_as is ProbeResult.DIFFERENT for answer in since) >= _MAX_OTHER_FAILURES


def _reduce_once(probes: ProbeCache, failing: Subset, parts: int, others: _OtherFailures) -> tuple[Subset | None, int]:
    """Return a smaller failing set, or None if there is none, and the number of parts for the next cut."""
    cut = _cut(failing, parts)
    if (part := _first_failing(probes, cut, failing, others)) is not None:
        return part, 2
    if (rest := _first_failing(probes, [failing - part for part in cut], failing, others)) is not None:
        return rest, max(parts - 1, 2)
    return (failing, 2 * parts) if parts < len(failing) else (None, parts)


def _first_failing(probes: ProbeCache, subsets: list[Subset], among: Subset, others: _OtherFailures) -> Subset | None:
    answers = probes.launch_missing(subsets, Purpose.REDUCE, among)
    for subset in subsets:
        if others.too_many:
            break
        if next(answers) is BAD:
            return subset
    return None


def _cut(failing: Subset, parts: int) -> list[Subset]:
    """Cut a set into `parts` parts, each with consecutive members."""
    members = sorted(failing)
    bounds = [len(members) * i // parts for i in range(parts + 1)]
    return [frozenset(members[start:stop]) for start, stop in pairwise(bounds)]


def _unjudged_members(probes: ProbeCache, failing: Subset, candidates: Sequence[int], times: int) -> Subset:
    """Return the candidates without which the failing set did not pass `times` times."""
    if len(failing) == 1:
        return frozenset()
    judge = LiteralJudge(probes)
    missing = {member: times - probes.count(failing - {member}, GOOD) for member in candidates}
    return frozenset(
        member
        for member, launches in missing.items()
        if launches > 0
        and judge_set(judge, failing - {member}, Purpose.DROP_ONE, failing, launches, failing) is not GOOD
    )


_PASSING_LAUNCHES = 3  # launches in all before a set that passed once counts as passing


class SetJudge(Protocol):
    """A search strategy that decides whether the program fails with given sets of items."""

    @property
    def confidence(self) -> float: ...  # the probability that all claims proven so far hold
    @property
    def failure_rate(self) -> float | None: ...  # how often a failing set fails; None: always
    @property
    def comes_in_bursts(self) -> bool: ...  # whether consecutive runs end alike more often than by chance
    # Yields the result of at least `times` launches of each set, in turn with proofs that `against` fails.
    def judge_sets(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1,
        against: Subset | None = None,
    ) -> Iterator[ProbeResult]: ...  # fmt: skip
    # Runs proofs in mixed order. `judge_sets` uses their results.
    def launch_together(self, requests: Sequence[tuple[Subset, Purpose]], among: Iterable[int]) -> None: ...


class Judge(SetJudge, Protocol):
    """A search strategy that can judge sets of items, and find the shortest set in a chain that fails."""

    def first_failing_length(self, chain: Chain, purpose: Purpose) -> int: ...
    def failing_sets(self) -> Iterable[Subset]: ...  # the sets that are known to fail
    def reach_confidence(self, confidence: float) -> None: ...  # until all claims proven so far hold together


@dataclass(frozen=True, kw_only=True)
class FailingSet:
    """A set of items for which the program fails, with what is known about its members.

    The program was also run without each member, or only without some if `sampled`. `unjudged` are the members without
    which the run gave no usable result.
    """

    members: Subset
    sampled: bool = False
    unjudged: Subset = frozenset()


def judge_set(
    judge: SetJudge,
    subset: Subset,
    purpose: Purpose,
    among: Iterable[int] = (),
    times: int = 1,
    against: Subset | None = None,
) -> ProbeResult:
    return next(judge.judge_sets([subset], purpose, among or subset, times, against))


def fails(judge: SetJudge, subset: Subset, purpose: Purpose, among: Iterable[int] = (), times: int = 1) -> bool:
    return judge_set(judge, subset, purpose, among, times) is ProbeResult.BAD


def find_failing_part(judge: Judge, pool: tuple[int, ...]) -> Subset:
    """Return a small subset of `pool` that is enough to make the program fail."""
    span = shortest_failing_span(judge, pool)
    return _reduce_span(judge, span) if len(span) > 1 else frozenset(span)


def shortest_failing_span(judge: Judge, pool: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shortest failing span of consecutive items in `pool`, up to the last needed one."""
    right_end = judge.first_failing_length(Chain(base=frozenset(), order=pool), Purpose.RIGHT_EDGE)
    last = frozenset({pool[right_end - 1]})
    if right_end == 1 or fails(judge, last, Purpose.ALONE, pool[:right_end]):
        return pool[right_end - 1 : right_end]
    left_end = (
        right_end
        - 1
        - judge.first_failing_length(Chain(base=last, order=pool[: right_end - 1][::-1]), Purpose.LEFT_EDGE)
    )
    return pool[left_end:right_end]


def _reduce_span(judge: Judge, span: tuple[int, ...]) -> Subset:
    """Return a part of `span` that contains its first and last item and for which the program still fails."""
    ends = frozenset({span[0], span[-1]})
    # To save runs, the two end units are tried before a wide span is reduced unit by unit.
    if fails(judge, ends, Purpose.ENDS_ONLY, span):
        return ends
    quarter = len(span) // 4 or 1
    outer = frozenset(span[:quarter] + span[-quarter:])
    if fails(judge, outer, Purpose.WITHOUT_MIDDLE, span):
        return reduce_to_needed(judge, outer, ends)
    return frozenset(span)


def reduce_to_needed(judge: Judge, failing: Subset, needed_members: Subset) -> Subset:
    """Return a minimal part of `failing` that still fails. `needed_members` are known to be needed."""
    while needed_members != failing and not fails(judge, needed_members, Purpose.REDUCE, failing):
        order = tuple(sorted(failing - needed_members))
        edge = judge.first_failing_length(Chain(base=needed_members, order=order), Purpose.REDUCE)
        failing = needed_members | frozenset(order[:edge])
        needed_members |= {order[edge - 1]}
    return needed_members


def drop_unneeded(judge: Judge, members: Subset, sample: int, at_least: int) -> FailingSet:
    """Remove items until the program passes if any one of them is left out. `sample` limits the members to test.

    If there are many members, only both ends and a `sample`
    between them are tested. If there are few, each is tested several times, because a flaky run that passes by chance
    makes a member look needed. `at_least` is the minimum number of runs for each tested member.
    """
    while len(members) > 1:
        candidates = _drop_candidates(members, sample)
        unneeded_member, needed_members, unjudged_members = first_unneeded(
            judge, members, candidates, max(-(-sample // len(candidates)), at_least)
        )
        if unneeded_member is None:
            return FailingSet(members=members, sampled=len(candidates) < len(members), unjudged=unjudged_members)
        members = reduce_to_needed(judge, members - {unneeded_member}, needed_members)
    return FailingSet(members=members)


def first_unneeded(
    judge: SetJudge, members: Subset, candidates: Sequence[int], times: int
) -> tuple[int | None, Subset, Subset]:
    """Return an unneeded member or None, the members found to be needed, and those that could not be judged."""
    without = [members - {member} for member in candidates]
    needed_members, unjudged_members = set[int](), set[int]()
    answers = judge.judge_sets(without, Purpose.DROP_ONE, members, times, against=members)
    for member, counts_as in zip(candidates, answers, strict=True):
        if counts_as is ProbeResult.BAD:
            return member, frozenset(needed_members), frozenset()
        (needed_members if counts_as is ProbeResult.GOOD else unjudged_members).add(member)
    return None, frozenset(needed_members), frozenset(unjudged_members)


def _drop_candidates(members: Subset, sample: int) -> list[int]:
    """Return the members to leave out in test runs: up to `sample` from the middle, then both ends."""
    first, *between, last = sorted(members)
    step = max(len(between) / sample, 1.0)
    # The ends come last because the search has already shown that they are needed.
    return [*(between[int(step * i + step / 2)] for i in range(min(sample, len(between)))), first, last]


def only_count_matters(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> bool:
    """Return whether the program fails with every set of items in `among` that is as large as `members`.

    If `members` are not the first units in `among`, the answer is False without a run: a search that adds units one by
    one ends at the first units if only the number matters. `sample` is the number of other sets to run.
    """
    return members == frozenset(among[: len(members)]) and _judge_size(judge, members, among, sample) is BAD


def judge_other_sets(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> ProbeResult:
    """Return BAD if the program also fails with other sets that have as many items as `members`, and GOOD if not.

    One other set is run first, and another one while no result is usable. Only if it fails too, more sets are run. The
    result is UNRESOLVED if too few of them could be judged.
    """
    if len(members) == 1 or judge_one_other_set(judge, members, among, sample) is not BAD:
        return GOOD
    return _judge_size(judge, members, among, sample)


def judge_one_other_set(judge: SetJudge, members: Subset, among: tuple[int, ...], sample: int) -> ProbeResult:
    """Return the first usable result of at most `sample` other sets of this size, or UNRESOLVED if there is none."""
    others = _other_sets(members, among, sample)
    answers = (judge_set(judge, other, Purpose.ELSEWHERE, among) for other in others)
    return next((counts_as for counts_as in answers if counts_as in (GOOD, BAD)), ProbeResult.UNRESOLVED)


def _judge_size(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> ProbeResult:
    """Return BAD if other sets as large as `members` all fail, and sets with one item fewer all pass; otherwise GOOD.

    Sets without a usable result are left out, and more sets are run instead. The result is UNRESOLVED if too few sets
    could be judged.
    """
    others, smaller = (_other_sets(members, among, sample), _smaller_sets(members, among, sample))
    spare_others, spare_smaller = (_other_sets(members, among, 2 * sample), _smaller_sets(members, among, 2 * sample))
    if not others:
        return GOOD
    failing = (
        _judge_in_repeats(judge, other, Purpose.ELSEWHERE if other == others[0] else Purpose.AS_MANY, among, members)
        for other in dict.fromkeys([*others, *spare_others])
    )
    spare_smaller = [subset for subset in spare_smaller if subset not in smaller]
    passing = chain(
        judge.judge_sets(smaller, Purpose.ONE_FEWER, among), judge.judge_sets(spare_smaller, Purpose.ONE_FEWER, among)
    )
    counts_as = _find_exception(failing, BAD, len(others)) or _find_exception(passing, GOOD, len(smaller))
    return BAD if counts_as is None else GOOD if counts_as in (GOOD, BAD) else ProbeResult.UNRESOLVED


def _find_exception(answers: Iterator[ProbeResult], expected_result: ProbeResult, needed: int) -> ProbeResult | None:
    """Return the first answer opposite to the expected one, None after `needed` as expected, or UNRESOLVED."""
    judged = islice((counts_as for counts_as in answers if counts_as in (GOOD, BAD)), needed)
    count = 0
    for counts_as in judged:
        if counts_as is not expected_result:
            return counts_as
        count += 1
    return None if count == needed else ProbeResult.UNRESOLVED


def _other_sets(members: Subset, among: tuple[int, ...], sample: int) -> list[Subset]:
    """Return up to `sample` other sets of items in `among` that are as large as `members`."""
    if len(members) == len(among):
        return []
    return [other for other in _spread_sets(among, len(members), sample + 1) if other != members][:sample]


def _smaller_sets(members: Subset, among: tuple[int, ...], sample: int) -> list[Subset]:
    """Return at most `sample` sets with one unit fewer than `members`; none if that leaves no unit."""
    return _spread_sets(among, len(members) - 1, sample) if len(members) > 1 else []


def _judge_in_repeats(
    judge: Judge, subset: Subset, purpose: Purpose, among: tuple[int, ...], failing: Subset
) -> ProbeResult:
    """Return the result of a set. A pass is checked in turns with `failing`, because it may be chance."""
    counts_as = judge_set(judge, subset, purpose, among)
    if counts_as is not GOOD:
        return counts_as
    return judge_set(judge, subset, purpose, among, times=_PASSING_LAUNCHES, against=failing)


def _spread_sets(among: tuple[int, ...], count: int, sample: int) -> list[Subset]:
    """Return up to `sample` different sets of `count` items in `among` that overlap only a little."""
    total = len(among)
    stride = next(step for step in range(round(total * 0.618) or 1, 2 * total) if gcd(step, total) == 1)
    spread_units = [among[(1 + i * stride) % total] for i in range(total)]
    offsets = [(start * max(total // sample, 1)) % total for start in range(total)]
    sets = [frozenset((spread_units + spread_units)[start : start + count]) for start in offsets]
    return list(dict.fromkeys(sets))[:sample]


# Ranges: only consecutive units can be switched on together.


def drop_unneeded_ends(judge: Judge, members: Subset, sample: int, at_least: int) -> FailingSet:
    """Shrink a range of items until the program passes if either end is left out."""
    while len(members) > 1:
        ends = (min(members), max(members))
        unneeded_end, _, unjudged_ends = first_unneeded(judge, members, ends, max(-(-sample // len(ends)), at_least))
        if unneeded_end is None:
            return FailingSet(members=members, unjudged=unjudged_ends)
        members = frozenset(shortest_failing_span(judge, tuple(sorted(members - {unneeded_end}))))
    return FailingSet(members=members)


def ranges_without(total: int, culprits: Collection[Subset]) -> tuple[Subset, ...]:
    """Return the maximal ranges, last first, that contain no failing range. If all pass, there is no other culprit."""
    culprits_in_order = sorted(culprits, key=min)
    starts = [0, *(min(members) + 1 for members in culprits_in_order)]
    stops = [*(max(members) for members in culprits_in_order), total]
    spans = [frozenset(range(start, stop)) for start, stop in zip(starts, stops, strict=True) if start < stop]
    return tuple(reversed(spans))


def only_length_matters(judge: Judge, members: Subset, total: int, sample: int) -> bool:
    """Return whether the program fails with every range as long as `members` and passes with shorter ones."""
    count = len(members)
    if min(members) > 0 or count == total:
        return False
    farthest, *others = _windows(total, count, sample + 1)[:0:-1]
    shorter = _windows(total, count - 1, sample) if count > 1 else []
    everything = range(total)
    return (
        fails(judge, farthest, Purpose.ELSEWHERE, everything)
        and all(answer is BAD for answer in judge.judge_sets(others, Purpose.AS_MANY, everything))
        and all(answer is GOOD for answer in judge.judge_sets(shorter, Purpose.ONE_FEWER, everything))
    )


def tests_every_window(total: int, count: int, sample: int) -> bool:
    """Return whether `only_length_matters` would run every range of `count` items instead of a sample."""
    return total - count + 1 <= sample + 1 and (count == 1 or total - count + 2 <= sample)


def shrink_range(probes: ProbeCache, failing: Subset, times: int) -> FailingSet:
    """Shrink a range of items until the program passes if either end is left out."""
    step = len(failing) // 2
    while step:
        shorter = _shorter_failing(probes, failing, step)
        failing, step = (failing, step // 2) if shorter is None else (shorter, min(step, len(shorter) - 1))
    unjudged_ends = _unjudged_members(probes, failing, (min(failing), max(failing)), times)
    return FailingSet(members=failing, unjudged=unjudged_ends)


def _shorter_failing(probes: ProbeCache, failing: Subset, step: int) -> Subset | None:
    members = sorted(failing)
    shorter = [frozenset(members[step:]), frozenset(members[:-step])]
    answers = probes.launch_missing(shorter, Purpose.REDUCE, failing)
    return next((subset for subset, answer in zip(shorter, answers, strict=True) if answer is ProbeResult.BAD), None)


def _windows(total: int, count: int, most: int) -> list[Subset]:
    """Return up to `most` ranges of `count` items, spread evenly over `total` items."""
    last = total - count
    starts = dict.fromkeys(last * i // max(most - 1, 1) for i in range(most))
    return [frozenset(range(start, start + count)) for start in starts]
