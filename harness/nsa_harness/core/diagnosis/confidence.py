"""The confidence in a cause, which depends on the kind of evidence for it.

A rule states the kind of its evidence, and the row of the cause lists the kinds that prove this cause. Only this module
turns the two into a number.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

CERTAIN = 0.9  # lowest confidence of a proven cause: the evidence allows no other explanation


class EvidenceKind(StrEnum):
    """The kind of evidence behind an explanation, from strongest to weakest."""

    FACT = "something that nsa-harness did or counted itself, or a process that is stopped or still running"
    RAISED = "the rank's own exception"
    KERNEL = "the kernel's information about a process: its system call, pipe, connection or exit"
    HOLDER = "the thread that holds the lock"
    RECORD = "the records of the ranks concerned"
    REPAIRED = "timelines that one edit makes equal, and that show which rank deviated"
    CLOSED = "a wait that no thread or process can end"
    SAMPLES = "enough samples that all show the same"
    ENDED = "a process's exit and its last messages"
    SOURCE = "the source code of the program"
    STACKS = "only stacks"
    PRINTED = "a message in a log"
    EFFECT = "the consequences of the cause"
    PART = "evidence that another cause would also explain"
    OPEN = "one of several explanations, or a wait that may still end"
    ABSENCE = "a rank that is missing, without any record of what it did"
    CLOCK = "only that the run took too long"
    NOTHING = "nothing that a rule recognizes"


_CONFIDENCE = {
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
CONFIDENCE_VALUES = tuple(sorted(set(_CONFIDENCE.values())))  # every confidence that a finding can have
LIKELY = _CONFIDENCE[EvidenceKind.EFFECT]  # highest confidence of a cause that is not proven


def confidence(kind: EvidenceKind, certain_by: Collection[EvidenceKind], *, left_open: bool = False) -> float:
    """Return the confidence, from 0 to 1, in a cause that is supported by evidence of this kind.

    Each kind has a fixed confidence. It is limited to `LIKELY` if `kind` is not in `certain_by`, the kinds that prove
    the cause, or if a caveat is open (`left_open`).
    """
    value = _CONFIDENCE[kind]
    proven = kind in certain_by and not left_open
    return value if proven else min(value, LIKELY)
