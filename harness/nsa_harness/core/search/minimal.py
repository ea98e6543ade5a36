"""Reduce a failing set to a smallest part that fails: one item, a range, an interaction, or any N items."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Protocol

from nsa_harness.core.search.exact_search import Chain
from nsa_harness.core.search.question import BAD, GOOD, ProbeCache, ProbeResult, Purpose, Subset, combine_answers


class LiteralJudge:
    """A judge of sets that launches every set, and concludes nothing from other sets."""

    confidence = 1.0
    failure_rate = None

    def __init__(self, probes: ProbeCache) -> None:
        self._probes = probes

    def judge_sets(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[ProbeResult]:
        for subset in subsets:
            yield combine_answers(list(self._probes.launch([subset] * times, purpose, among)))


_MAX_OTHER_FAILURES = (
    24  # a reduction stops after this many probes that fail in another way: that failure is not the subject
)


def ddmin(probes: ProbeCache, failing: Subset) -> FailingSet:
    """Reduce a failing set until it passes without any one member; `unjudged`: members whose removal showed nothing.

    This is Zeller's delta debugging. At worst it takes the square of the size in probes; no set is launched twice. If
    too many probes fail in another way, it stops with the smallest set so far, and all members count as unjudged.
    """
    others = _OtherFailures(probes)
    parts = 2
    while len(failing) > 1 and not others.too_many:
        smaller, parts = _reduce_once(probes, failing, min(parts, len(failing)), others)
        if smaller is None:
            break
        failing = smaller
    return FailingSet(members=failing, unjudged=failing if others.too_many else _unjudged_members(probes, failing))


class _OtherFailures:
    """The probes after its creation that failed in another way."""

    def __init__(self, probes: ProbeCache) -> None:
        self._probes, self._before = probes, len(probes.observations)

    @property
    def too_many(self) -> bool:
        since = self._probes.observations[self._before :]
        return sum(answer.counts_as is ProbeResult.DIFFERENT for answer in since) >= _MAX_OTHER_FAILURES


def _reduce_once(probes: ProbeCache, failing: Subset, parts: int, others: _OtherFailures) -> tuple[Subset | None, int]:
    """Return the failing set to go on with and the number of parts to cut it into; None if no smaller set fails."""
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
    """Cut a set into parts of neighbours: items that interact are often neighbours."""
    members = sorted(failing)
    bounds = [len(members) * i // parts for i in range(parts + 1)]
    return [frozenset(members[start:stop]) for start, stop in pairwise(bounds)]


def _unjudged_members(probes: ProbeCache, members: Subset) -> Subset:
    without = [members - {member} for member in sorted(members)]
    answers = probes.launch_missing(without, Purpose.DROP_ONE, members)
    return frozenset(member for member, answer in zip(sorted(members), answers, strict=True) if answer is not GOOD)


_PASSING_LAUNCHES = 3  # launches in all before a set that passed once counts as passing


class SetJudge(Protocol):
    """A judge that decides what sets count as: from one launch, or after repeated launches."""

    @property
    def confidence(self) -> float: ...  # the probability that all claims proven so far hold
    @property
    def failure_rate(self) -> float | None: ...  # how often a failing set fails; None: always
    def judge_sets(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[ProbeResult]: ...  # from at least `times` launches of each set


class Judge(SetJudge, Protocol):
    """A judge that also finds the first set of a chain that fails."""

    def first_failing_length(self, chain: Chain, purpose: Purpose) -> int: ...
    def failing_sets(self) -> Iterable[Subset]: ...  # the sets that are known to fail
    def reach_confidence(self, confidence: float) -> None: ...  # until all claims proven so far hold together


@dataclass(frozen=True, kw_only=True)
class FailingSet:
    """Units that fail together. `sampled`: only some were dropped; `unjudged`: those whose removal showed nothing."""

    members: Subset
    sampled: bool = False
    unjudged: Subset = frozenset()


def judge_set(
    judge: SetJudge, subset: Subset, purpose: Purpose, among: Iterable[int] = (), times: int = 1
) -> ProbeResult:
    return next(judge.judge_sets([subset], purpose, among or subset, times))


def fails(judge: SetJudge, subset: Subset, purpose: Purpose, among: Iterable[int] = (), times: int = 1) -> bool:
    return judge_set(judge, subset, purpose, among, times) is ProbeResult.BAD


def find_failing_part(judge: Judge, pool: tuple[int, ...]) -> Subset:
    """Return a part of a failing pool that fails: its shortest failing prefix, without the items that are not needed.

    A single item is tried first, then both ends alone: it is costly to reduce a wide range item by item.
    """
    span = shortest_failing_span(judge, pool)
    return _reduce_span(judge, span) if len(span) > 1 else frozenset(span)


def shortest_failing_span(judge: Judge, pool: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shortest run of neighbours in a failing pool that contains the last needed item and still fails."""
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
    """Return a part of the span that fails and contains both its ends, which are needed."""
    ends = frozenset({span[0], span[-1]})
    if fails(judge, ends, Purpose.ENDS_ONLY, span):
        return ends
    quarter = len(span) // 4 or 1
    outer = frozenset(span[:quarter] + span[-quarter:])
    if fails(judge, outer, Purpose.WITHOUT_MIDDLE, span):
        return reduce_to_needed(judge, outer, ends)
    return frozenset(span)


def reduce_to_needed(judge: Judge, failing: Subset, needed_members: Subset) -> Subset:
    """Return a smallest part of a failing set that fails. Each pass finds one more member that is needed."""
    while needed_members != failing and not fails(judge, needed_members, Purpose.REDUCE, failing):
        order = tuple(sorted(failing - needed_members))
        edge = judge.first_failing_length(Chain(base=needed_members, order=order), Purpose.REDUCE)
        failing = needed_members | frozenset(order[:edge])
        needed_members |= {order[edge - 1]}
    return needed_members


def drop_unneeded(judge: Judge, members: Subset, sample: int) -> FailingSet:
    """Drop each member in turn, and continue with any part that still fails, until every member is needed.

    If there are many members, only both ends and a `sample` between them are dropped. If there are few, each is dropped
    more than once: a flaky run that passes by chance makes a member look needed.
    """
    while len(members) > 1:
        candidates = _drop_candidates(members, sample)
        unneeded, needed_members, unjudged = first_unneeded(judge, members, candidates, -(-sample // len(candidates)))
        if unneeded is None:
            return FailingSet(members=members, sampled=len(candidates) < len(members), unjudged=unjudged)
        members = reduce_to_needed(judge, members - {unneeded}, needed_members)
    return FailingSet(members=members)


def first_unneeded(
    judge: SetJudge, members: Subset, candidates: Sequence[int], times: int
) -> tuple[int | None, Subset, Subset]:
    """Return the first member without which the set still fails, the needed members, and the undecided ones."""
    without = [members - {member} for member in candidates]
    needed_members, unjudged = set[int](), set[int]()
    answers = judge.judge_sets(without, Purpose.DROP_ONE, members, times)
    for member, counts_as in zip(candidates, answers, strict=True):
        if counts_as is ProbeResult.BAD:
            return member, frozenset(needed_members), frozenset()
        (needed_members if counts_as is ProbeResult.GOOD else unjudged).add(member)
    return None, frozenset(needed_members), frozenset(unjudged)


def _drop_candidates(members: Subset, sample: int) -> list[int]:
    """Return the members to drop, from the middle on: the search has already shown that both ends are needed."""
    first, *between, last = sorted(members)
    step = max(len(between) / sample, 1.0)
    return [*(between[int(step * i + step / 2)] for i in range(min(sample, len(between)))), first, last]


def only_count_matters(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> bool:
    """Whether only the number of items matters, not which items they are.

    It is tested only if `members` are the first items: if only the number matters, a search by prefixes ends there.
    """
    return members == frozenset(among[: len(members)]) and _every_set_of_size_fails(judge, members, among, sample)


def other_sets_fail_too(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> bool:
    """Whether only the number of items matters, for a minimal set of several items anywhere.

    One other set of the size is launched first; only if it fails too are more sets launched.
    """
    other = next(iter(_other_sets(members, among, 1)), None)
    if len(members) == 1 or other is None or not fails(judge, other, Purpose.ELSEWHERE, among):
        return False
    return _every_set_of_size_fails(judge, members, among, sample)


def _every_set_of_size_fails(judge: Judge, members: Subset, among: tuple[int, ...], sample: int) -> bool:
    """Whether other sets of that size all fail, and all sets with one item fewer pass."""
    others = _other_sets(members, among, sample)
    smaller = _spread_sets(among, len(members) - 1, sample) if len(members) > 1 else []
    return (
        bool(others)
        and _fails_in_repeats(judge, others[0], Purpose.ELSEWHERE, among)
        and all(_fails_in_repeats(judge, other, Purpose.AS_MANY, among) for other in others[1:])
        and all(answer is ProbeResult.GOOD for answer in judge.judge_sets(smaller, Purpose.ONE_FEWER, among))
    )


def _other_sets(members: Subset, among: tuple[int, ...], sample: int) -> list[Subset]:
    """Return other sets of that size, unless the members are all there are."""
    if len(members) == len(among):
        return []
    return [other for other in _spread_sets(among, len(members), sample + 1) if other != members][:sample]


def _fails_in_repeats(judge: Judge, subset: Subset, purpose: Purpose, among: tuple[int, ...]) -> bool:
    """Whether a set fails. A set that passes is launched again, because a flaky run may pass by chance."""
    return fails(judge, subset, purpose, among) or fails(judge, subset, purpose, among, times=_PASSING_LAUNCHES)


def _spread_sets(among: tuple[int, ...], count: int, sample: int) -> list[Subset]:
    """Return different sets of one size, spread so that they share neither a few items nor a range."""
    total = len(among)
    stride = next(step for step in range(round(total * 0.618) or 1, 2 * total) if gcd(step, total) == 1)
    permuted = [among[(1 + i * stride) % total] for i in range(total)]
    offsets = [(start * max(total // sample, 1)) % total for start in range(total)]
    sets = [frozenset((permuted + permuted)[start : start + count]) for start in offsets]
    return list(dict.fromkeys(sets))[:sample]


# Ranges: only neighbouring items can be switched on together.


def drop_unneeded_ends(judge: Judge, members: Subset, sample: int) -> FailingSet:
    """Shrink a failing range until its first and its last item are needed. Items between them cannot be tested."""
    while len(members) > 1:
        ends = (min(members), max(members))
        unneeded, _, unjudged = first_unneeded(judge, members, ends, -(-sample // len(ends)))
        if unneeded is None:
            return FailingSet(members=members, unjudged=unjudged)
        members = frozenset(shortest_failing_span(judge, tuple(sorted(members - {unneeded}))))
    return FailingSet(members=members)


def ranges_without(total: int, culprits: Collection[Subset]) -> tuple[Subset, ...]:
    """Return the largest ranges that contain none of `found`, the last one first. If all pass, nothing else fails.

    No range of `found` lies inside another, so their starts and their stops are in the same order.
    """
    culprits_in_order = sorted(culprits, key=min)
    starts = [0, *(min(members) + 1 for members in culprits_in_order)]
    stops = [*(max(members) for members in culprits_in_order), total]
    spans = [frozenset(range(start, stop)) for start, stop in zip(starts, stops, strict=True) if start < stop]
    return tuple(reversed(spans))


def only_length_matters(judge: Judge, members: Subset, total: int, sample: int) -> bool:
    """Whether only the length of a range matters: all other ranges of the length fail, all shorter ones pass.

    It is tested only if `members` are the first items: if only the length matters, a search by prefixes ends there.
    """
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
    """Whether `only_the_length` launched every range of the length, and every range that is one shorter."""
    return total - count + 1 <= sample + 1 and (count == 1 or total - count + 2 <= sample)


def shrink_range(probes: ProbeCache, failing: Subset) -> FailingSet:
    """Shrink a failing range from either end, and launch each range; `unjudged`: ends whose removal showed nothing."""
    step = len(failing) // 2
    while step:
        shorter = _shorter_failing(probes, failing, step)
        failing, step = (failing, step // 2) if shorter is None else (shorter, min(step, len(shorter) - 1))
    ends = sorted({min(failing), max(failing)}) if len(failing) > 1 else []
    without = probes.launch_missing([failing - {end} for end in ends], Purpose.DROP_ONE, failing)
    unjudged_ends = (end for end, answer in zip(ends, without, strict=True) if answer is not GOOD)
    return FailingSet(members=failing, unjudged=frozenset(unjudged_ends))


def _shorter_failing(probes: ProbeCache, failing: Subset, step: int) -> Subset | None:
    members = sorted(failing)
    shorter = [frozenset(members[step:]), frozenset(members[:-step])]
    answers = probes.launch_missing(shorter, Purpose.REDUCE, failing)
    return next((subset for subset, answer in zip(shorter, answers, strict=True) if answer is ProbeResult.BAD), None)


def _windows(total: int, count: int, most: int) -> list[Subset]:
    """Return at most `most` ranges of `count` items, evenly spread from the first to the last."""
    last = total - count
    starts = dict.fromkeys(last * i // max(most - 1, 1) for i in range(most))
    return [frozenset(range(start, start + count)) for start in starts]
