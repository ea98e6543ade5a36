"""Worst case: how many probes a search takes at most, by part, before any is launched."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.bisect.asked import units
from harness.core.bisect.noisy import tries
from harness.core.bisect.question import Question, QuestionKind
from harness.core.bisect.split import depth, probes_at_worst

_SHAPES = 4  # alone, ends only, without middle, elsewhere


@dataclass(frozen=True, kw_only=True)
class Part:
    """`only_if` is empty for what every search may take, else the case that takes this much more each time."""

    name: str
    probes: int
    only_if: str = ""


def worst_case(question: Question) -> tuple[Part, ...]:
    """For answers that hold: runs that turn out flaky or contradict each other take more."""
    return _ordered(question) if question.kind is QuestionKind.ORDERED else _set(question)


def at_most(parts: tuple[Part, ...]) -> int:
    """Without the parts that only some searches come to."""
    return sum(part.probes for part in parts if not part.only_if)


def _ordered(question: Question) -> tuple[Part, ...]:
    gallop = depth(question.items) + 1 if question.unbounded else 0
    return (
        Part(name="controls", probes=1 if gallop else 2),
        *([Part(name="gallop", probes=gallop)] if gallop else []),
        Part(name="edge", probes=probes_at_worst(question.items, question.at_once)),
        Part(name="proof", probes=question.repeat + max(question.repeat, tries(0.5, question.confidence) - 1)),
        Part(name="controls again", probes=2),
    )


def _set(question: Question) -> tuple[Part, ...]:
    total = len(units(question))
    right = probes_at_worst(total, question.at_once)
    left = probes_at_worst(max(total - 1, 1), question.at_once)
    sample = tries(0.5, question.confidence)
    # Each member of few is dropped more than once, of many a sample and both ends.
    needed = max((members * -(-sample // members) for members in range(2, min(sample + 2, total) + 1)), default=0)
    proof = 2 * question.repeat + needed
    return (
        Part(name="controls", probes=2),
        Part(name="right edge", probes=right),
        Part(name="left edge", probes=left),
        Part(name="shape", probes=_SHAPES),
        Part(name="proof", probes=proof),
        Part(name="controls again", probes=2),
        Part(name="sizes", probes=2 * sample, only_if="only the number may count"),
        Part(name="next culprit", probes=right + left + _SHAPES + proof, only_if="there are several"),
        Part(name="next member", probes=right + 1 + needed, only_if="more than two interact"),
    )
