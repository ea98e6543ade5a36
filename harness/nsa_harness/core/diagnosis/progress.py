"""The step that a rank is in: after its optimizer's line the old one, before that line already the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots
from nsa_harness.core.evidence.evidence import Frame, RankEvidence
from nsa_harness.core.evidence.stacks import is_library, training_stack


def step_in_progress(context: DiagnosisContext, rank: RankEvidence) -> int | None:
    """1-based; None without a board. A rank that stands between two steps is in the one whose lines it stands in."""
    board = rank.board
    if board is None:
        return None
    between = board.training is not None and board.training.kind == "step"
    # Where no forward or batch of a step was marked, its number is only known when it is done.
    done = board.steps_s[-1][0] if between and board.steps_s else board.step
    return done + 1 if between and _stands_before(frames_of(context, rank), board.stepped_from) else done


def frames_of(context: DiagnosisContext, rank: RankEvidence) -> Sequence[Frame]:
    """Where it stands, innermost first: as it failed or left, as the last look saw it, as its beat saw it."""
    looked, board = context.looked.get(rank.rank), rank.board
    stack = training_stack(looked.stacks, looked.pid) if looked else None
    known = (
        rank.raised.frames if rank.raised and not hung_roots(context) else (),  # who stands has printed it, and went on
        board.left_from if board else (),
        rank.death_stacks[-1].frames if rank.death_stacks and rank.exit else (),
        stack.frames if stack else (),
        (board.seen,) if board and board.seen else (),
    )
    return next(filter(None, known), ())


def own_frames(context: DiagnosisContext, rank: int) -> list[Frame]:
    """Of the program, from the outside in."""
    known = context.rank(rank)
    frames = frames_of(context, known) if known else ()
    return [one for one in reversed(frames) if not is_library(one.file)]


def _stands_before(stands: Sequence[Frame], stepped: Sequence[Frame]) -> bool:
    """In the outermost function where the two ways part, it has not come to the line that leads to the optimizer."""
    own = [frame for frame in stands if not is_library(frame.file)]
    for there in reversed(stepped):
        here = next((frame for frame in reversed(own) if _same_function(frame, there)), None)
        if here is not None and here.line != there.line:
            return here.line < there.line
    return False


def _same_function(frame: Frame, other: Frame) -> bool:
    """py-spy names a method with its class, the probe without."""
    functions = {one.function.rpartition(".")[2] for one in (frame, other)}
    return len(functions) == 1 and PurePath(frame.file).name == PurePath(other.file).name
