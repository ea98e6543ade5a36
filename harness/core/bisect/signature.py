"""The failure that is sought, and whether another run shows the same one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nsa_harness.core.bisect.question import CountsAs
from nsa_harness.core.report import Outcome, Place, Status

SAME = "same"
ANY = "any"
HANG = "hang"
FAIL = "fail"
_BAD = (Status.HANG, Status.FAIL)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which failures count: `--outcome`."""

    how: str = SAME  # same: as the bad control's; hang; fail; any
    pattern: str | None = None  # fail: what its summary or its output must hold

    def admits(self, outcome: Outcome, output: str) -> bool:
        """Whether this failure can be the sought one at all."""
        status = outcome.verdict.status
        if self.how == HANG:
            return status is Status.HANG
        if self.how == FAIL:
            text = f"{outcome.verdict.summary}\n{output}"
            return status is Status.FAIL and (self.pattern is None or re.search(self.pattern, text) is not None)
        return status in _BAD


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What makes two failures the same: the verdict, its cause, and the culprit's line."""

    verdict: str
    cause: str | None
    place: str | None  # "model.py:40"

    def __str__(self) -> str:
        return " · ".join(filter(None, (self.verdict, self.cause, self.place)))


def parse_outcome(text: str) -> Wanted:
    """What `--outcome` asks for: same, hang, fail, fail:REGEX or any. Raises ValueError."""
    how, _, pattern = text.partition(":")
    if how not in (SAME, ANY, HANG, FAIL) or (pattern and how != FAIL):
        raise ValueError(f"expected same, hang, fail, fail:REGEX or any, got {text!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return Wanted(how=how, pattern=pattern or None)


def signature_of(outcome: Outcome) -> Signature:
    place = outcome.culprit.place if outcome.culprit else None
    return Signature(verdict=outcome.verdict.status.value, cause=outcome.verdict.cause, place=line_word(place))


def line_word(place: Place | None) -> str | None:
    """ "model.py:40": the same for a file of a worktree and of the user's checkout."""
    if place is None or place.file is None:
        return None
    name = place.file.rpartition("/")[2]
    return name if place.line is None else f"{name}:{place.line}"


def counts_as(outcome: Outcome, wanted: Wanted, signature: Signature | None, output: str = "") -> CountsAs:
    """How a probe counts. `signature` is None until the first failure that is wanted has shown what it looks like."""
    if outcome.verdict.status is Status.PASS:
        return CountsAs.GOOD
    if outcome.verdict.status not in _BAD:
        return CountsAs.UNRESOLVED
    if not wanted.admits(outcome, output):
        return CountsAs.DIFFERENT
    if wanted.how != SAME or signature is None or same(signature_of(outcome), signature):
        return CountsAs.BAD
    return CountsAs.DIFFERENT


def same(one: Signature, other: Signature) -> bool:
    """One verdict, and one line; where a line is unknown, one cause."""
    if one.verdict != other.verdict:
        return False
    if one.place is not None and other.place is not None:
        return one.place == other.place
    return one.cause == other.cause
