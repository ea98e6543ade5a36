"""Concluded: what was found among units, as an answer in items."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nsa_harness.core.bisect.minimal import Culprit, Teller
from nsa_harness.core.bisect.oracle import BAD, GOOD, Asked
from nsa_harness.core.bisect.question import Answer, AnswerKind, Subset


def so_far(asked: Asked, why: str, open_units: Subset = frozenset()) -> Answer:
    """Undecided: the smallest set that failed, the largest part of it that passed, and what lies between."""
    failing = min((seen.subset for seen in asked.observations if seen.counts_as is BAD), key=_order, default=None)
    passed = [seen.subset for seen in asked.observations if seen.counts_as is GOOD]
    inside = [subset for subset in passed if failing is None or subset < failing]
    passing = max(inside, key=len, default=None)
    between = (frozenset(asked.everything) if failing is None else failing) - (passing or frozenset())
    return Answer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why=why,
        open=tuple(sorted(asked.items(open_units or between))),
        passing=None if passing is None else asked.items(passing),
        failing=None if failing is None else asked.items(failing),
    )


def nothing(asked: Asked, times: int, confidence: float, rate: float) -> Answer:
    """The bad end was never bad."""
    why = f"the bad end was good {times} of {times} times: nothing to bisect, unless it fails in less than {rate:.0%}"
    passing = asked.items(asked.everything)
    return Answer(kind=AnswerKind.NONE, confidence=confidence, why=why, passing=passing)


def of_threshold(asked: Asked, judge: Teller, length: int) -> Answer:
    return Answer(
        kind=AnswerKind.THRESHOLD,
        items=(length,),
        confidence=judge.sure,
        p_bad=judge.rate,
        passing=asked.items(range(length - 1)),
        failing=asked.items(range(length)),
    )


def of_number(asked: Asked, judge: Teller, count: int, confidence: float) -> Answer:
    """Any so many. The two configurations are the first so many, and one fewer."""
    return Answer(
        kind=AnswerKind.COUNT,
        items=(count,),
        confidence=judge.sure * confidence,
        p_bad=judge.rate,
        why="not all sets of the size were asked, but a sample",
        passing=asked.items(range(1, count)),
        failing=asked.items(range(count)),
    )


def of_culprits(
    asked: Asked, judge: Teller, found: Sequence[Culprit], rest_passes: bool, sample_confidence: float
) -> Answer:
    """One or several culprits, each proven to fail alone. If the rest was not seen to pass there may be more."""
    groups = tuple(asked.items(culprit.members) for culprit in found)
    confidence = judge.sure * (sample_confidence if any(culprit.sampled for culprit in found) else 1.0)
    kind, items = _shape(groups)
    return Answer(
        kind=kind,
        items=items,
        groups=groups if len(groups) > 1 else (),
        confidence=confidence if rest_passes else confidence / 2,
        p_bad=judge.rate,
        why=_caveat(found, rest_passes),
        passing=_passing(asked, found, rest_passes),
        failing=groups[0],
    )


def _caveat(found: Sequence[Culprit], rest_passes: bool) -> str:
    if not rest_passes:
        return "everything but the answer was not seen to pass, so there may be more"
    if any(culprit.sampled for culprit in found):
        return "not each member was left out by itself, but both ends and a sample"
    return ""


def _passing(asked: Asked, found: Sequence[Culprit], rest_passes: bool) -> Subset:
    """Everything but the answer; where that does not pass, the answer without one member."""
    guilty = frozenset[int]().union(*(culprit.members for culprit in found))
    if rest_passes:
        return asked.items(frozenset(asked.everything) - guilty)
    return asked.items(sorted(found[0].members)[1:])


def _shape(groups: Sequence[Subset]) -> tuple[AnswerKind, tuple[int, ...]]:
    if len(groups) > 1:
        return AnswerKind.SEVERAL, tuple(sorted(frozenset[int]().union(*groups)))
    items = tuple(sorted(groups[0]))
    if len(items) == 1:
        return AnswerKind.SINGLE, items
    if items[-1] - items[0] + 1 == len(items):
        return AnswerKind.RANGE, (items[0], items[-1] + 1)
    return AnswerKind.SET, items


def _order(subset: Collection[int]) -> tuple[int, list[int]]:
    return len(subset), sorted(subset)
