"""Asking: what crosses between the search and whoever launches: a round of subsets out, what each counts as back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class CountsAs(StrEnum):
    """`DIFFERENT` failed, but not in the way sought; `UNRESOLVED` could not be judged. Neither is good or bad."""

    GOOD = "good"
    BAD = "bad"
    DIFFERENT = "different"
    UNRESOLVED = "unresolved"


Subset = frozenset[int]  # the items that are switched on


class Purpose(StrEnum):
    """Why a round is asked, in the order in which a search comes to it."""

    CONTROL_GOOD = "control_good"
    CONTROL_BAD = "control_bad"
    GALLOP = "gallop"
    RIGHT_EDGE = "right_edge"
    ALONE = "alone"
    LEFT_EDGE = "left_edge"
    ENDS_ONLY = "ends_only"
    WITHOUT_MIDDLE = "without_middle"
    ELSEWHERE = "elsewhere"  # another set of the same size: does only the number count?
    REDUCE = "reduce"  # to a smallest set, item by item
    REPEAT = "repeat"  # the same question again: is the run flaky?
    DROP_ONE = "drop_one"  # the answer without one member: is each needed?
    AS_MANY = "as_many"  # further sets of the size found: does each of them fail?
    ONE_FEWER = "one_fewer"  # sets one smaller: does each of them pass?
    PROOF_BAD = "proof_bad"  # the answer alone
    PROOF_GOOD = "proof_good"  # everything but the answer
    RECHECK_GOOD = "recheck_good"
    RECHECK_BAD = "recheck_bad"


CONTROLS = frozenset({Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD})
# What is asked once an answer stands; everything else finds it.
PROOFS = frozenset(
    {
        Purpose.DROP_ONE,
        Purpose.AS_MANY,
        Purpose.ONE_FEWER,
        Purpose.PROOF_BAD,
        Purpose.PROOF_GOOD,
        Purpose.RECHECK_GOOD,
        Purpose.RECHECK_BAD,
    }
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Subsets asked at the same time, at most as many as the question allows at once.

    A subset that was asked before, in an earlier round or in this one, is meant to be launched again: who keeps
    launches from a search that was killed answers its n-th asking with the n-th launch kept. `open` is the half-open
    range of items still open before the answers, `left` the worst case of probes still to come in this search.
    """

    subsets: tuple[Subset, ...]
    purpose: Purpose
    open: tuple[int, int]
    left: int


Probe = Callable[[Round], Sequence[CountsAs]]  # one answer for each subset, in their order


@dataclass(frozen=True, kw_only=True)
class Observation:
    subset: Subset
    counts_as: CountsAs


class OutOfBudget(Exception):
    """Raised by a probe that may launch no more: the search ends and tells what is known. Its text says why."""
