"""Find minimal edits that make the call sequences of two ranks equal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from nsa_harness.core.collectives.timeline import Token, differing_field

_MAX_COMPARED = 256  # events after the first difference that are compared
_MAX_LEAD = 12  # number of events by which one sequence may be ahead of the other
_EDIT_COST = 5
# Cost of pairing two calls of one operation from different lines, as in the two branches of an `if`. It is lower than
# the cost of an edit, but a pattern in which the lines are shifted costs more.
_OTHER_LINE_COST = 3
# Cost of pairing two lines that one rank passes one after the other. Ranks rarely make such a pair on purpose: an
# earlier call that only one rank made has shifted their calls. It costs less than leaving out both calls.
_SHIFTED_LINE_COST = 8

Site = tuple[object, ...]  # where the program makes a call, see `Event.site`


class Edit(StrEnum):
    """The kind of change that makes one sequence of calls more similar to another."""

    INSERT = "insert"  # the left sequence lacks an event of the right one
    DELETE = "delete"  # the left sequence has an event that the right one lacks
    SWAP = "swap"  # two neighbouring events are in the opposite order
    REPLACE = "replace"  # the left sequence has a different call, or the same call with a different argument


@dataclass(frozen=True, kw_only=True)
class Repair:
    """An edit that makes two sequences of calls more similar, with the position at which it applies."""

    edit: Edit
    left: int  # index in the left sequence
    right: int  # index in the right sequence
    confirming_events: int  # number of events after the edit that are then equal in both sequences


_Cost = tuple[int, int]  # (cost of all edits, minus the number of equal events)


@lru_cache(maxsize=1024)  # most ranks of a large job have equal sequences
def repairs(
    left: tuple[Token, ...], right: tuple[Token, ...], consecutive: frozenset[frozenset[Site]] = frozenset()
) -> tuple[Repair, ...]:
    """Return the first edit needed to turn the calls `left` into `right`, or several edits if they are equally good.

    The edit belongs to the cheapest sequence of edits. The missing end of a shorter sequence costs nothing, because
    that rank may only be late. Edits that later events confirm take precedence. The result is empty if the sequences
    are compatible.

    `consecutive` contains pairs of call lines that one rank can pass one after the other. Any other two lines may
    be the branches of one condition.
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
    left, right = left[begin : begin + _MAX_COMPARED], right[begin : begin + _MAX_COMPARED]
    cost = _costs(left, right, consecutive)
    i = j = 0
    while i < len(left) and j < len(right):
        if _pairs(left[i], right[j]):
            i, j = i + 1, j + 1
            continue
        cheapest = _cheapest(left, right, i, j, cost, consecutive)
        if all(edit for edit, _ in cheapest):
            return tuple(
                Repair(edit=edit, left=begin + i, right=begin + j, confirming_events=-cost[to][1])
                for edit, to in cheapest
                if edit
            )
        i, j = i + 1, j + 1
    return ()


def _costs(
    left: Sequence[Token], right: Sequence[Token], consecutive: Collection[frozenset[Site]]
) -> dict[tuple[int, int], _Cost]:
    """Map each pair (i, j), at most `_MAX_LEAD` apart, to the cost of making `left[i:]` and `right[j:]` compatible."""
    cost: dict[tuple[int, int], _Cost] = {}
    for i in range(len(left), -1, -1):
        for j in range(min(len(right), i + _MAX_LEAD), max(0, i - _MAX_LEAD) - 1, -1):
            if i == len(left) or j == len(right):
                cost[i, j] = (0, 0)
            elif _pairs(left[i], right[j]):
                after = cost[i + 1, j + 1]
                cost[i, j] = (after[0], after[1] - 1)
            else:
                cost[i, j] = min(
                    _after(price, cost[to])
                    for _, price, to in _next_edits(left, right, i, j, consecutive)
                    if to in cost
                )
    return cost


def _after(price: int, cost: _Cost) -> _Cost:
    return price + cost[0], cost[1]


def _cheapest(
    left: Sequence[Token],
    right: Sequence[Token],
    i: int,
    j: int,
    cost: dict[tuple[int, int], _Cost],
    consecutive: Collection[frozenset[Site]],
) -> list[tuple[Edit | None, tuple[int, int]]]:
    """Return the cheapest edits at position (i, j), confirmed ones if any, each with the position that follows it."""
    edits = _next_edits(left, right, i, j, consecutive)
    options = [(edit, to, _after(price, cost[to])) for edit, price, to in edits if to in cost]
    candidates = [option for option in options if option[2][1]] or options
    lowest = min(price for _, _, (price, _) in candidates)
    return [(edit, to) for edit, to, (price, _) in candidates if price == lowest]


def _next_edits(
    left: Sequence[Token], right: Sequence[Token], i: int, j: int, consecutive: Collection[frozenset[Site]]
) -> list[tuple[Edit | None, int, tuple[int, int]]]:
    """Return each possible edit at position (i, j), with its cost and the position that follows it."""
    same_op = left[i].from_python and right[j].from_python and left[i].op == right[j].op
    can_pair = same_op and _have_equal_fields(left[i], right[j])
    pair: tuple[Edit | None, int] = (None, _OTHER_LINE_COST) if can_pair else (Edit.REPLACE, _EDIT_COST)
    if can_pair and frozenset((left[i].site, right[j].site)) in consecutive:
        pair = (Edit.REPLACE, _SHIFTED_LINE_COST)
    options: list[tuple[Edit | None, int, tuple[int, int]]] = [
        (Edit.INSERT, _EDIT_COST, (i, j + 1)),
        (Edit.DELETE, _EDIT_COST, (i + 1, j)),
        (*pair, (i + 1, j + 1)),
    ]
    have_next = i + 1 < len(left) and j + 1 < len(right)
    if have_next and _pairs(left[i], right[j + 1]) and _pairs(left[i + 1], right[j]):
        options.append((Edit.SWAP, _EDIT_COST, (i + 2, j + 2)))
    return options


def _pairs(left: Token, right: Token) -> bool:
    """Return whether the tokens of two calls stand for the same call with compatible arguments."""
    return left.site == right.site and _have_equal_fields(left, right)


def _have_equal_fields(left: Token, right: Token) -> bool:
    return differing_field(left, right) is None
