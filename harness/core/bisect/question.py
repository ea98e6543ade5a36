"""Question: what is searched, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class QuestionKind(StrEnum):
    """`SET`: any subset may be asked (layers, branches, names, deltas). `ORDERED`: a value, so only prefixes are."""

    SET = "set"
    ORDERED = "ordered"


def _alike() -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """`items` are numbered from 0: all off is the good end, all on the bad one.

    An ORDERED question asks prefixes only: of length k for the k-th larger value, of length 0 for the good end.
    `together` are groups of items that go on and off as one.
    """

    kind: QuestionKind
    items: int
    together: tuple[frozenset[int], ...] = ()
    # Time of a bad probe in times of a good one; read after both controls, so that their times can decide it.
    bad_cost: Callable[[], float] = _alike
    at_once: int = 1
    confidence: float = 0.95
    repeat: int = 1  # how often the final proof is run
    unbounded: bool = False  # ORDERED only: the bad end is not known to be bad, so gallop up to it
    max_probes: int | None = None  # None: no limit but the search's own
    false_bad: float = 0.01  # chance that a run that should pass counts as bad

    def __post_init__(self) -> None:
        assert self.items >= 1
        assert self.at_once >= 1
        assert self.repeat >= 1
        assert 0.5 <= self.confidence < 1
        assert 0 < self.false_bad < 0.5
        assert not (self.unbounded if self.kind is QuestionKind.SET else self.together)
