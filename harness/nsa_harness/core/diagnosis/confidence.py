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

    FACT = "an observation of nsa-harness itself, or a process that is stopped or has exited"
    RAISED = "the rank's own exception"
    KERNEL = "kernel data about a process: its system call, pipe, connection or end"
    HOLDER = "the thread that holds the lock"
    RECORD = "the records of the ranks concerned"
    REPAIRED = "call sequences that one edit makes equal, and the rank that broke its own pattern"
    CLOSED = "a wait that no thread or process can end"
    SAMPLES = "enough samples, all of the same lines"
    ENDED = "how a process ended, and its last message"
    SOURCE = "the source code of the program"
    STACKS = "stacks alone"
    PRINTED = "a text in a log"
    EFFECT = "an effect of the cause"
    PART = "incomplete evidence, which another cause would also fit"
    OPEN = "one of several readings, or a wait that may still end"
    ABSENCE = "a missing rank, without a record of what it did"
    CLOCK = "a time limit that was exceeded"
    NOTHING = "nothing that a rule recognises"


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
