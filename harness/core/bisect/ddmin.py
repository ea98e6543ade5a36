"""Ddmin: a smallest failing set where more items may turn bad into good, after Zeller's delta debugging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from harness.core.bisect.asked import BAD, GOOD, Asked, together
from harness.core.bisect.asking import CountsAs, Purpose, Subset
from harness.core.bisect.minimal import Culprit


class Literal:
    """A teller that draws no conclusion and asks always."""

    sure = 1.0
    rate = None

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def each(
        self, subsets: Sequence[Subset], purpose: Purpose, among: Iterable[int], times: int = 1
    ) -> Iterator[CountsAs]:
        for subset in subsets:
            yield together(list(self._asked.ask([subset] * times, purpose, among)))


def ddmin(asked: Asked, failing: Subset) -> Culprit:
    """Without any one of its members it no longer fails, each asked for itself; `unjudged` where that said nothing.

    At worst the square of the size in probes; what was asked before is not asked again.
    """
    parts = 2
    while len(failing) > 1:
        smaller, parts = _step(asked, failing, min(parts, len(failing)))
        if smaller is None:
            break
        failing = smaller
    return Culprit(members=failing, unjudged=_unjudged(asked, failing))


def _step(asked: Asked, failing: Subset, parts: int) -> tuple[Subset | None, int]:
    """A smaller failing set or the same one, and into how many parts to cut it next; None when nothing is left."""
    cut = _cut(failing, parts)
    if (part := _first_failing(asked, cut, failing)) is not None:
        return part, 2
    if (rest := _first_failing(asked, [failing - part for part in cut], failing)) is not None:
        return rest, max(parts - 1, 2)
    return (failing, 2 * parts) if parts < len(failing) else (None, parts)


def _first_failing(asked: Asked, subsets: list[Subset], among: Subset) -> Subset | None:
    answers = asked.once(subsets, Purpose.REDUCE, among)
    return next((subset for subset, told in zip(subsets, answers, strict=True) if told is BAD), None)


def _cut(failing: Subset, parts: int) -> list[Subset]:
    """Neighbours stay together: what interacts often stands side by side."""
    ordered = sorted(failing)
    bounds = [len(ordered) * i // parts for i in range(parts + 1)]
    return [frozenset(ordered[start:stop]) for start, stop in pairwise(bounds)]


def _unjudged(asked: Asked, members: Subset) -> Subset:
    without = [members - {member} for member in sorted(members)]
    answers = asked.once(without, Purpose.DROP_ONE, members)
    return frozenset(member for member, told in zip(sorted(members), answers, strict=True) if told is not GOOD)
