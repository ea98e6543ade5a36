"""What a verdict means for the reader, in a sentence or two."""

from __future__ import annotations

from harness.core.diagnosed.causes import row_of
from harness.core.report import HangKind, Outcome, Status


def meaning(outcome: Outcome) -> str:
    """What the verdict says, and what it does not say, in the same words everywhere."""
    verdict = outcome.verdict
    if verdict.kind is not None:
        return _MEANING_OF_KIND[verdict.kind]
    if verdict.status in (Status.FAIL, Status.ERROR):
        return row_of(verdict.cause).verdict_means or _MEANING[verdict.status]
    return _MEANING[verdict.status]


_MEANING_OF_KIND = {
    HangKind.DEADLOCK: "Proven to move no more: what it waits for cannot come. More time would not help.",
    HangKind.LIVELOCK: "Proven to move no more: it burns CPU and finishes nothing. More time would not help.",
    HangKind.STARVED: "Proven to move no more: it waits for data that does not come.",
    HangKind.STOPPED: "Proven to move no more: a signal stopped it, and nothing has continued it.",
}
_MEANING = {
    Status.HANG: "Proven to move no more.",
    Status.FAIL: "The program ended wrongly.",
    Status.PASS: "Every rank ended by itself with 0, and no expected number was missed.",
    Status.SKIP: "This machine cannot run it. That says nothing about the program.",
    Status.ERROR: "The harness could not judge. That is neither a PASS nor a FAIL of the program.",
}
