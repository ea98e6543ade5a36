"""The smallest edits that make two ways of going on compatible, and whether anything confirms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from nsa_harness.core.collectives.timeline import Token, field_apart

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


@lru_cache(maxsize=1024)  # in a large world most ranks did the same
def repairs(left: tuple[Token, ...], right: tuple[Token, ...]) -> tuple[Repair, ...]:
    """The first edits of the cheapest ways; several where they cannot be told apart, none where nothing is wrong.

    A side that ends has not come further, which costs nothing. What something confirms goes before what nothing does.
    """
    begin = next((at for at, (one, other) in enumerate(zip(left, right, strict=False)) if not _pairs(one, other)), None)
    if begin is None:
        return ()
    left, right = left[begin : begin + _HORIZON], right[begin : begin + _HORIZON]
    cost = _costs(left, right)
    i = j = 0
    while i < len(left) and j < len(right):
        if _pairs(left[i], right[j]):
            i, j = i + 1, j + 1
            continue
        found = _cheapest(left, right, i, j, cost)
        if all(edit for edit, _ in found):
            return tuple(
                Repair(edit=edit, left=begin + i, right=begin + j, confirmed=-cost[to][1]) for edit, to in found if edit
            )
        i, j = i + 1, j + 1
    return ()


def _costs(left: Sequence[Token], right: Sequence[Token]) -> dict[tuple[int, int], _Cost]:
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
    left: Sequence[Token], right: Sequence[Token], i: int, j: int, cost: dict[tuple[int, int], _Cost]
) -> list[tuple[Edit | None, tuple[int, int]]]:
    ways = [(edit, to, _after(price, cost[to])) for edit, price, to in _ways(left, right, i, j) if to in cost]
    confirmed = [one for one in ways if one[2][1]] or ways
    least = min(price for _, _, (price, _) in confirmed)
    return [(edit, to) for edit, to, (price, _) in confirmed if price == least]


def _ways(
    left: Sequence[Token], right: Sequence[Token], i: int, j: int
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


def _pairs(one: Token, other: Token) -> bool:
    return one.site == other.site and _alike(one, other)


def _alike(one: Token, other: Token) -> bool:
    return field_apart(one, other) is None
