"""Zones: neighbours between what passes and what fails that count as neither, and where their borders lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from nsa_harness.core.bisect.chain import probes_at_worst
from nsa_harness.core.bisect.question import CountsAs, Zone

_UNASKED = 4  # of a zone no stretch wider than such a part is believed without a point of it being asked


def beside(low: int, high: int, others: Collection[int], count: int) -> list[int]:
    """Where to ask next between a good and a bad point, at most so many at once; none where that is enough.

    `others` lie between the two and count as neither. They are taken for neighbours of one kind: its two borders are
    halved first; then a few points within it are asked, of which one that is good or bad shows that it is not one.
    """
    ordered = sorted(others)
    wide = max((ordered[-1] - ordered[0]) // _UNASKED, 1)
    borders = [(low, ordered[0]), (ordered[-1], high)]
    return _middles(borders, 1, count) or _middles(list(pairwise(ordered)), wide, count)


def beside_at_worst(gap: int, at_once: int) -> int:
    """What a zone among so many places adds to the probes of a search: its other border, and what lies within."""
    return probes_at_worst(gap, at_once) + _UNASKED + at_once


def zones(low: int, high: int, end: int, between: Collection[CountsAs]) -> tuple[Zone, ...]:
    """What passes, what counts as neither, as was seen `between` the two, and what fails."""
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
