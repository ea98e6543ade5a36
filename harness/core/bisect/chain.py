"""Chain: sets that grow by one item at a time, from one that passes to one that fails."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.bisect.asking import Subset


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
        lengths = {item: length for length, item in enumerate(self.order, start=1)}
        return max((lengths.get(item, len(self) + 1) for item in subset - self.base), default=0)

    def length_of(self, subset: Subset) -> int | None:
        """None if it is no set of the chain."""
        length = self.longest_inside(subset)
        return length if length == self.shortest_around(subset) else None
