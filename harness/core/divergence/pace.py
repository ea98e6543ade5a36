"""Steps compared by how much training they hold: a batch that was given up, or another number of batches a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nsa_harness.core.divergence.divergence import minority
from nsa_harness.core.divergence.ledger import Skipped
from nsa_harness.core.evidence.evidence import Board

_STEPS = 3  # finished ones of each rank, from which on one of them can be called usual
_TRAINS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """`rank` began in `step` more than it finished, and came to its end a batch before the others."""

    rank: int
    step: int
    marks: int  # of training in that step
    usual: int  # in its other steps
    others: tuple[int, ...]  # the ranks that still train


@dataclass(frozen=True, kw_only=True)
class OtherPace:
    """In every step `ranks` go through more, or fewer, batches than the rest, and the ranks came apart by it."""

    ranks: tuple[int, ...]
    marks: tuple[tuple[int, int], ...]  # (rank, of training in its usual step)


def given_up(boards: Mapping[int, Board]) -> GivenUp | None:
    """The first step in which a rank that is a batch short began again; None where its steps do not show one."""
    usual = _usual(boards)
    found = (one for rank in _short(boards) if usual for one in _begun_twice(rank, boards, usual))
    return min(found, key=lambda one: (one.step, one.rank), default=None)


def other_pace(boards: Mapping[int, Board]) -> OtherPace | None:
    """None too where all steps of a rank have a pace of their own: then nothing is usual."""
    usual = _usual(boards)
    steady = all(set(board.marked.values()) == {usual[rank]} for rank, board in boards.items()) if usual else False
    if not steady or len(set(usual.values())) < 2 or not _short(boards):
        return None
    return OtherPace(ranks=minority(usual), marks=tuple(sorted(usual.items())))


def repeated(boards: Mapping[int, Board], skipped: Skipped) -> bool:
    """One rank made a call once more than all others, who are in the next step, without an optimizer step between."""
    if len(skipped.callers) != 1:
        return False
    (rank,) = skipped.callers
    counts = dict(skipped.counts)
    once_more = {counts[rank] - 1} == {count for other, count in counts.items() if other != rank}
    ahead = all(boards[other].step > skipped.step for other in counts if other != rank)
    return once_more and counts[rank] > 1 and ahead and boards[rank].step <= skipped.step


def _usual(boards: Mapping[int, Board]) -> dict[int, int]:
    """Marks of training in most steps of each rank; empty where some rank's are not known."""
    if len(boards) < 2 or any(len(board.marked) < _STEPS for board in boards.values()):
        return {}
    return {rank: Counter(board.marked.values()).most_common(1)[0][0] for rank, board in boards.items()}


def _short(boards: Mapping[int, Board]) -> tuple[int, ...]:
    """Ranks that are through with training, with fewer steps than another one has begun."""
    begun = {rank: _begun(board) for rank, board in boards.items()}
    return tuple(
        rank
        for rank, board in sorted(boards.items())
        if begun[rank] < max(begun.values()) and board.training is not None and board.training.kind not in _TRAINS
    )


def _begun(board: Board) -> int:
    done = board.steps_s[-1][0] if board.steps_s else 0
    training = board.training
    return max(done, training.step) if training is not None and training.kind in _TRAINS else done


def _begun_twice(rank: int, boards: Mapping[int, Board], usual: Mapping[int, int]) -> Iterator[GivenUp]:
    """A whole further step's worth is an evaluation, and no batch that was given up on the way."""
    others = tuple(sorted(set(boards) - {rank}))
    for step, marks in sorted(boards[rank].marked.items()):
        alone = all(boards[other].marked.get(step) == usual[other] for other in others)
        if alone and usual[rank] < marks < 2 * usual[rank]:
            yield GivenUp(rank=rank, step=step, marks=marks, usual=usual[rank], others=others)
