"""Confidence: the kinds of evidence on which a rule can be based, and how sure each kind makes a cause.

A rule names the kind of its evidence. The row of the cause lists the kinds that prove it. Only this module turns both
into a number.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

CERTAIN = 0.9  # lowest confidence at which the evidence allows no other reading


class EvidenceKind(StrEnum):
    """A kind of evidence on which a rule is based, the strongest first."""

    FACT = "what the harness did or counted itself, or a process that is stopped or left"
    RAISED = "the rank's own exception"
    KERNEL = "what the kernel says of a process: its call, its pipe, its connection, its end"
    HOLDER = "the thread that holds the lock"
    RECORD = "the records of the ranks it speaks of"
    REPAIRED = "timelines that one edit repairs, and who left them"
    CLOSED = "a wait that nobody is left to end"
    SAMPLES = "samples enough, all of them alike"
    ENDED = "how a process ended, and what it said last"
    SOURCE = "the text of the program"
    STACKS = "stacks alone"
    PRINTED = "a text in a log"
    EFFECT = "what it led to"
    PART = "a part of it, to which something else would fit as well"
    OPEN = "one of several readings, or a wait that somebody may end"
    ABSENCE = "who was missing, and nothing of what it did"
    CLOCK = "that it took too long"
    NOTHING = "nothing that a rule knows"


_WORTH = {
    EvidenceKind.FACT: 1.0,
    **dict.fromkeys(
        (EvidenceKind.RAISED, EvidenceKind.KERNEL, EvidenceKind.HOLDER, EvidenceKind.RECORD, EvidenceKind.REPAIRED),
        0.95,
    ),
    **dict.fromkeys((EvidenceKind.CLOSED, EvidenceKind.SAMPLES, EvidenceKind.ENDED), CERTAIN),
    **dict.fromkeys((EvidenceKind.SOURCE, EvidenceKind.STACKS, EvidenceKind.PRINTED, EvidenceKind.EFFECT), 0.85),
    EvidenceKind.PART: 0.8,
    EvidenceKind.OPEN: 0.75,
    EvidenceKind.ABSENCE: 0.6,
    EvidenceKind.CLOCK: 0.5,
    EvidenceKind.NOTHING: 0.3,
}
WORTHS = tuple(sorted(set(_WORTH.values())))  # all possible confidences
LIKELY = _WORTH[EvidenceKind.EFFECT]  # highest confidence of a cause that is not proven


def confidence(seen: EvidenceKind, certain_by: Collection[EvidenceKind], *, left_open: bool = False) -> float:
    """Return how sure a cause is: certain only if its row accepts this evidence as proof and no caveat is open."""
    worth = _WORTH[seen]
    proven = seen in certain_by and not left_open
    return worth if proven else min(worth, LIKELY)
