"""Chain: sets that grow by one item at a time from a good one to a bad one, and where on it to ask next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from nsa_harness.core.bisect.question import Subset


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Its k-th set is `base` and the first k of `order`. A search finds the first one that fails."""

    base: Subset
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def at(self, length: int) -> Subset:
        return self.base | frozenset(self.order[:length])

    def longest_inside(self, subset: Subset) -> int:
        """The longest set of the chain that lies in `subset`; -1 if not even the base does."""
        if not self.base <= subset:
            return -1
        return next((k for k, item in enumerate(self.order) if item not in subset), len(self))

    def shortest_around(self, subset: Subset) -> int:
        """The shortest set of the chain that `subset` lies in; one more than there are if none does."""
        return max((self._lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """None if it is no set of the chain."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """The first length that holds each item."""
        return {item: length for length, item in enumerate(self.order, start=1)}


_LARGEST_EXACT = 128  # the table grows with the square of the gap; above this its proportions are close enough


def depth(gap: int) -> int:
    """How often `gap` places must be halved until one is left."""
    return (gap - 1).bit_length()


def probes_at_worst(gap: int, at_once: int) -> int:
    """All probes of a search among `gap` places, `at_once` of them in each round."""
    total = 0
    while gap > 1:
        probes = min(at_once, gap - 1)
        total += probes
        gap = -(-gap // (probes + 1))
    return total


def cuts(gap: int, at_once: int, rounds: int, bad_cost: float) -> list[int]:
    """Where to ask among `gap` places, as distances from the good end: several in equal steps, one by its cost.

    `rounds` is how many may still be needed at worst; a dearer bad answer never adds to them.
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
    """Expected cost and first cut, in times of a good probe, within the number of rounds.

    A bad answer leaves the places up to the cut, a good one those behind it; each place is as likely as any.
    """
    if gap == 1:
        return 0.0, 0
    half = 1 << (rounds - 1)
    # The middle comes first: min keeps it among cuts of equal cost.
    allowed = sorted(range(max(1, gap - half), min(half, gap - 1) + 1), key=lambda cut: abs(2 * cut - gap))
    return min(((_cost(gap, cut, rounds, bad_cost), cut) for cut in allowed), key=lambda option: option[0])


def _cost(gap: int, cut: int, rounds: int, bad_cost: float) -> float:
    if_bad = bad_cost + _cheapest(cut, rounds - 1, bad_cost)[0]
    if_good = 1.0 + _cheapest(gap - cut, rounds - 1, bad_cost)[0]
    return (cut * if_bad + (gap - cut) * if_good) / gap
