"""Contiguous: the smallest failing ranges, where only items side by side can be switched on together."""

from __future__ import annotations

from collections.abc import Collection

from nsa_harness.core.search.minimal import FailingSet, Judge, fails, first_spare, stretch
from nsa_harness.core.search.probe_cache import BAD, GOOD, ProbeCache
from nsa_harness.core.search.question import CountsAs, Purpose, Subset


def shortest(judge: Judge, members: Subset, sample: int) -> FailingSet:
    """Neither its first nor its last can go; of what lies between, no range can tell."""
    while len(members) > 1:
        ends = (min(members), max(members))
        spare, _, unjudged = first_spare(judge, members, ends, -(-sample // len(ends)))
        if spare is None:
            return FailingSet(members=members, unjudged=unjudged)
        members = frozenset(stretch(judge, tuple(sorted(members - {spare}))))
    return FailingSet(members=members)


def rests(total: int, found: Collection[Subset]) -> tuple[Subset, ...]:
    """The largest ranges that hold none of those found, the last one first. If all of them pass nothing else fails.

    No range found lies in another, so in their order both their ends grow.
    """
    ordered = sorted(found, key=min)
    starts = [0, *(min(one) + 1 for one in ordered)]
    stops = [*(max(one) for one in ordered), total]
    spans = [frozenset(range(start, stop)) for start, stop in zip(starts, stops, strict=True) if start < stop]
    return tuple(reversed(spans))


def only_the_length(judge: Judge, members: Subset, total: int, sample: int) -> bool:
    """Whether any so many in a row fail, wherever: other ranges of the length all do, those one shorter all pass.

    Only asked of the first so many: whatever they are, a search by prefixes ends there if only the length counts.
    """
    count = len(members)
    if min(members) > 0 or count == total:
        return False
    farthest, *others = _windows(total, count, sample + 1)[:0:-1]
    shorter = _windows(total, count - 1, sample) if count > 1 else []
    everything = range(total)
    return (
        fails(judge, farthest, Purpose.ELSEWHERE, everything)
        and all(answer is BAD for answer in judge.each(others, Purpose.AS_MANY, everything))
        and all(answer is GOOD for answer in judge.each(shorter, Purpose.ONE_FEWER, everything))
    )


def all_windows_asked(total: int, count: int, sample: int) -> bool:
    """Whether `only_the_length` has left no range of the length out, and none that is one shorter."""
    return total - count + 1 <= sample + 1 and (count == 1 or total - count + 2 <= sample)


def shrunk(oracle: ProbeCache, failing: Subset) -> FailingSet:
    """Shrunk from either end, each range asked for itself; `unjudged` where its ends could not be judged away."""
    step = len(failing) // 2
    while step:
        shorter = _first_failing(oracle, failing, step)
        failing, step = (failing, step // 2) if shorter is None else (shorter, min(step, len(shorter) - 1))
    ends = sorted({min(failing), max(failing)}) if len(failing) > 1 else []
    without = oracle.once([failing - {end} for end in ends], Purpose.DROP_ONE, failing)
    unjudged = (end for end, answer in zip(ends, without, strict=True) if answer is not GOOD)
    return FailingSet(members=failing, unjudged=frozenset(unjudged))


def _first_failing(oracle: ProbeCache, failing: Subset, step: int) -> Subset | None:
    ordered = sorted(failing)
    shorter = [frozenset(ordered[step:]), frozenset(ordered[:-step])]
    answers = oracle.once(shorter, Purpose.REDUCE, failing)
    return next((subset for subset, answer in zip(shorter, answers, strict=True) if answer is CountsAs.BAD), None)


def _windows(total: int, count: int, most: int) -> list[Subset]:
    """Ranges of one length from the first to the last, evenly spread, at most so many."""
    last = total - count
    starts = dict.fromkeys(last * i // max(most - 1, 1) for i in range(most))
    return [frozenset(range(start, start + count)) for start in starts]
