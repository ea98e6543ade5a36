"""Answer: what a search found, how sure that is, and the two configurations that prove it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.core.bisect.asking import Subset


class AnswerKind(StrEnum):
    SINGLE = "single"
    RANGE = "range"
    SET = "set"
    SEVERAL = "several"
    THRESHOLD = "threshold"
    COUNT = "count"
    NONE = "none"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`items`: single (7,); range (start, stop); set and several all members; threshold and count (smallest bad,).

    A threshold is a prefix length. Of an interaction `items` are all needed; of several, each of `groups` is enough.
    `confidence` is 1.0 where each claim was asked for itself, and less where runs are flaky or only a sample was.
    """

    kind: AnswerKind
    items: tuple[int, ...] = ()
    groups: tuple[Subset, ...] = ()  # several only
    confidence: float = 1.0
    p_bad: float | None = None  # flaky only: how often what should fail does
    why: str = ""  # one sentence: what none and undecided rest on, or what an answer could not prove
    open: tuple[int, ...] = ()  # items that may still matter
    passing: Subset | None = None  # None: nothing was seen to pass
    failing: Subset | None = None  # None: nothing was seen to fail in the way sought
