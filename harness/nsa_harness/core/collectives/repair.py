"""Find the smallest edits that make two sequences of calls compatible, and whether later calls confirm them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from nsa_harness.core.collectives.timeline import Token, differing_field

_HORIZON = 256  # events after the first difference that are compared
_BAND = 12  # events by which one side may be ahead
_EDIT = 5
_OTHER_LINE = 3  # cost of pairing one operation from two lines: a branch on each side, until the lines shift


class Edit(StrEnum):
    INSERT = "insert"  # the left side lacks an event of the right side
    DELETE = "delete"  # the left side has an event that the right side lacks
    SWAP = "swap"
    REPLACE = "replace"  # another call, or the same call with another field


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One edit for turning a sequence of calls into another, at indices `left` and `right` of the two sequences."""

    edit: Edit
    left: int
    right: int
    confirming_events: int  # events after the edit that are then equal on both sides


_Cost = tuple[int, int]  # cost of all edits; minus the number of shared events


@lru_cache(maxsize=1024)  # in a large world most ranks did the same
def repairs(left: tuple[Token, ...], right: tuple[Token, ...]) -> tuple[Repair, ...]:
    """Return the first edit that turns `left` into `right` at the lowest total cost, or several edits of equal cost.

    Missing calls at the end of the shorter sequence cost nothing, because that rank may only be late. Edits after which
    later calls match take precedence. The result is empty if the sequences are compatible.
    """
    begin = next(
        (
            at
            for at, (left_token, right_token) in enumerate(zip(left, right, strict=False))
            if not _pairs(left_token, right_token)
        ),
        None,
    )
    if begin is None:
        return ()
    left, right = left[begin : begin + _HORIZON], right[begin : begin + _HORIZON]
    cost = _costs(left, right)
    i = j = 0
    while i < len(left) and j < len(right):
        if _pairs(left[i], right[j]):
            i, j = i + 1, j + 1
            continue
        cheapest = _cheapest(left, right, i, j, cost)
        if all(edit for edit, _ in cheapest):
            return tuple(
                Repair(edit=edit, left=begin + i, right=begin + j, confirming_events=-cost[to][1])
                for edit, to in cheapest
                if edit
            )
        i, j = i + 1, j + 1
    return ()


def _costs(left: Sequence[Token], right: Sequence[Token]) -> dict[tuple[int, int], _Cost]:
    """Return the lowest cost of making `left[i:]` and `right[j:]` compatible, by (i, j).

    Only pairs whose indices differ by at most _BAND are included.
    """
    cost: dict[tuple[int, int], _Cost] = {}
    for i in range(len(left), -1, -1):
        for j in range(min(len(right), i + _BAND), max(0, i - _BAND) - 1, -1):
            if i == len(left) or j == len(right):
                cost[i, j] = (0, 0)
            elif _pairs(left[i], right[j]):
                after = cost[i + 1, j + 1]
                cost[i, j] = (after[0], after[1] - 1)
            else:
                cost[i, j] = min(
                    _after(price, cost[to]) for _, price, to in _next_edits(left, right, i, j) if to in cost
                )
    return cost


def _after(price: int, cost: _Cost) -> _Cost:
    return price + cost[0], cost[1]


def _cheapest(
    left: Sequence[Token], right: Sequence[Token], i: int, j: int, cost: dict[tuple[int, int], _Cost]
) -> list[tuple[Edit | None, tuple[int, int]]]:
    options = [(edit, to, _after(price, cost[to])) for edit, price, to in _next_edits(left, right, i, j) if to in cost]
    confirmed = [option for option in options if option[2][1]] or options
    least = min(price for _, _, (price, _) in confirmed)
    return [(edit, to) for edit, to, (price, _) in confirmed if price == least]


def _next_edits(
    left: Sequence[Token], right: Sequence[Token], i: int, j: int
) -> list[tuple[Edit | None, int, tuple[int, int]]]:
    """Return (edit, cost, next pair of indices) for each possible edit at `left[i]` and `right[j]`.

    The edit is None if the two calls are the same operation from different source lines, which needs no edit.
    """
    harmless = left[i].from_python and right[j].from_python and left[i].op == right[j].op and _alike(left[i], right[j])
    options: list[tuple[Edit | None, int, tuple[int, int]]] = [
        (Edit.INSERT, _EDIT, (i, j + 1)),
        (Edit.DELETE, _EDIT, (i + 1, j)),
        (None, _OTHER_LINE, (i + 1, j + 1)) if harmless else (Edit.REPLACE, _EDIT, (i + 1, j + 1)),
    ]
    crossed = i + 1 < len(left) and j + 1 < len(right)
    if crossed and _pairs(left[i], right[j + 1]) and _pairs(left[i + 1], right[j]):
        options.append((Edit.SWAP, _EDIT, (i + 2, j + 2)))
    return options


def _pairs(one: Token, other: Token) -> bool:
    return one.site == other.site and _alike(one, other)


def _alike(one: Token, other: Token) -> bool:
    return differing_field(one, other) is None
