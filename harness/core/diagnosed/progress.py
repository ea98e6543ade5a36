"""The step that a rank is in: after its optimizer's line the old one, before that line already the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from harness.core.diagnosed.case import Case, hung_roots
from harness.core.observed.evidence import Board, Frame, RankEvidence
from harness.core.observed.stacks import is_library, training_stack


def step_in_progress(case: Case, rank: RankEvidence) -> int | None:
    """1-based; None without a board. A rank that stands between two steps is in the one whose lines it stands in."""
    board = rank.board
    if board is None:
        return None
    between = board.training is not None and board.training.kind == "step"
    # Where no forward or batch of a step was marked, its number is only known when it is done.
    done = board.steps_s[-1][0] if between and board.steps_s else board.step
    return done + 1 if between and _stands_before(_frames(case, rank), board.stepped_from) else done


def _frames(case: Case, rank: RankEvidence) -> Sequence[Frame]:
    """Where it stands, innermost first: as it failed or left, as the last look saw it, as its beat saw it."""
    if rank.raised is not None and not hung_roots(case):  # a rank that stands has printed it, and went on
        return rank.raised.frames
    if rank.board is not None and rank.board.left_from:
        return rank.board.left_from
    looked = case.evidence.snapshots[-1].ranks if case.evidence.snapshots else ()
    seen = next((one for one in looked if one.rank == rank.rank), None)
    stack = training_stack(seen.stacks, seen.pid) if seen else None
    if stack is not None:
        return stack.frames
    board: Board | None = rank.board
    return (board.seen,) if board and board.seen else ()


def _stands_before(stands: Sequence[Frame], stepped: Sequence[Frame]) -> bool:
    """In the outermost function where the two ways part, it has not come to the line that leads to the optimizer."""
    own = [frame for frame in stands if not is_library(frame.file)]
    for there in reversed(stepped):
        here = next((frame for frame in reversed(own) if _same_function(frame, there)), None)
        if here is not None and here.line != there.line:
            return here.line < there.line
    return False


def _same_function(frame: Frame, other: Frame) -> bool:
    return frame.function == other.function and PurePath(frame.file).name == PurePath(other.file).name
