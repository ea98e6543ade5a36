"""Spans: places as half-open pairs, since what a search switches on is mostly one run of thousands of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, groupby, pairwise

Spans = tuple[tuple[int, int], ...]  # in order, none empty, no two of them touching: equal sets have equal spans


def spans_of(places: Iterable[int]) -> Spans:
    ordered = sorted(set(places))
    if not ordered:
        return ()
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return ((ordered[0], ordered[-1] + 1),)
    runs = (list(run) for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]))
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


def places_in(spans: Spans) -> frozenset[int]:
    return frozenset(chain.from_iterable(range(start, stop) for start, stop in spans))


def last_place(spans: Spans) -> int | None:
    """None if they hold no place."""
    return spans[-1][1] - 1 if spans else None


def within(spans: Collection[tuple[int, int]], items: int) -> bool:
    """Whether these are spans at all, of places among so many items."""
    edges = list(chain((-1,), chain.from_iterable(spans)))
    return edges[-1] <= items and all(before < after for before, after in pairwise(edges))
