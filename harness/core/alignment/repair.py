"""The smallest edits that make two ways of going on compatible, and whether anything confirms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.alignment.timeline import Event, field_apart

_HORIZON = 256  # events behind the first difference that are laid side by side
_BAND = 12  # by how many events one side may be ahead
_EDIT = 5
_OTHER_LINE = 3  # the same operation from another line pairs all the same: a branch on each side, until the lines shift


class Edit(StrEnum):
    INSERT = "insert"  # the left one lacks what the right one did
    DELETE = "delete"  # the left one did what the right one lacks
    SWAP = "swap"
    REPLACE = "replace"  # another call, or the same one with another field


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One edit in front of `left` and `right`, the indices at which the two differ."""

    edit: Edit
    left: int
    right: int
    confirmed: int  # events behind it that both sides share then


_Cost = tuple[int, int]  # of all edits; minus the events shared


def repairs(left: Sequence[Event], right: Sequence[Event]) -> tuple[Repair, ...]:
    """The first edits of the cheapest ways; several where they cannot be told apart, none where nothing is wrong.

    A side that ends has not come further, which costs nothing. What something confirms goes before what nothing does.
    """
    left, right = left[:_HORIZON], right[:_HORIZON]
    cost = _costs(left, right)
    i = j = 0
    while i < len(left) and j < len(right):
        if _pairs(left[i], right[j]):
            i, j = i + 1, j + 1
            continue
        found = [
            Repair(edit=edit, left=i, right=j, confirmed=-cost[to][1]) if edit else None
            for edit, to in _cheapest(left, right, i, j, cost)
        ]
        if None not in found:
            return tuple(one for one in found if one is not None)
        i, j = i + 1, j + 1
    return ()


def _costs(left: Sequence[Event], right: Sequence[Event]) -> dict[tuple[int, int], _Cost]:
    """Of making what follows (i, j) compatible, within the band; what is not in it is too far apart."""
    cost: dict[tuple[int, int], _Cost] = {}
    for i in range(len(left), -1, -1):
        for j in range(min(len(right), i + _BAND), max(0, i - _BAND) - 1, -1):
            if i == len(left) or j == len(right):
                cost[i, j] = (0, 0)
            elif _pairs(left[i], right[j]):
                after = cost[i + 1, j + 1]
                cost[i, j] = (after[0], after[1] - 1)
            else:
                cost[i, j] = min(_after(price, cost[to]) for _, price, to in _ways(left, right, i, j) if to in cost)
    return cost


def _after(price: int, cost: _Cost) -> _Cost:
    return price + cost[0], cost[1]


def _cheapest(
    left: Sequence[Event], right: Sequence[Event], i: int, j: int, cost: dict[tuple[int, int], _Cost]
) -> list[tuple[Edit | None, tuple[int, int]]]:
    ways = [(edit, to, _after(price, cost[to])) for edit, price, to in _ways(left, right, i, j) if to in cost]
    confirmed = [one for one in ways if one[2][1]] or ways
    least = min(price for _, _, (price, _) in confirmed)
    return [(edit, to) for edit, to, (price, _) in confirmed if price == least]


def _ways(
    left: Sequence[Event], right: Sequence[Event], i: int, j: int
) -> list[tuple[Edit | None, int, tuple[int, int]]]:
    """(edit, price, where it leads); no edit is one operation from two lines, which pairs."""
    harmless = left[i].called and right[j].called and left[i].op == right[j].op and _alike(left[i], right[j])
    ways: list[tuple[Edit | None, int, tuple[int, int]]] = [
        (Edit.INSERT, _EDIT, (i, j + 1)),
        (Edit.DELETE, _EDIT, (i + 1, j)),
        (None, _OTHER_LINE, (i + 1, j + 1)) if harmless else (Edit.REPLACE, _EDIT, (i + 1, j + 1)),
    ]
    crossed = i + 1 < len(left) and j + 1 < len(right)
    if crossed and _pairs(left[i], right[j + 1]) and _pairs(left[i + 1], right[j]):
        ways.append((Edit.SWAP, _EDIT, (i + 2, j + 2)))
    return ways


def _pairs(one: Event, other: Event) -> bool:
    return one.site == other.site and _alike(one, other)


def _alike(one: Event, other: Event) -> bool:
    return field_apart(one, other) is None
