"""Call paths: where two stacks diverge, the line at which a rank took another path, and the loops that it left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from nsa_harness.core.collectives.alignment import Difference, index_of
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, own_frames, place_of
from nsa_harness.core.evidence.evidence import Frame, StatusFile
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch, Loop
from nsa_harness.core.verdict.wait import WaitKind

_MAX_COMPARED = 16  # ranks that are compared pair by pair
_RECENT = 64  # events of a rank in which a call counts as one that it made until now


@dataclass(frozen=True, kw_only=True)
class PathDivergence:
    """The point at which the stack of a rank leaves a call path that other ranks, or the rank itself earlier, took."""

    shared: tuple[Frame, ...]  # frames of the path that the stack shares, outermost first
    path_frame: Frame | None  # first frame of the path that the stack lacks; None: the stack has the whole path
    stack_frame: Frame | None  # the frame that the stack has instead
    deeper: tuple[Frame, ...]  # frames of the path after `path_frame`

    @property
    def in_one_function(self) -> bool:
        """Whether the path and the stack diverge at two lines of one function (of one class, if they name it)."""
        if self.path_frame is None or self.stack_frame is None or self.path_frame.file != self.stack_frame.file:
            return False
        path, stack = self.path_frame.function, self.stack_frame.function
        return path == stack or path.endswith(f".{stack}") or stack.endswith(f".{path}")


def compare_paths(path: Sequence[Frame], stack: Sequence[Frame]) -> PathDivergence:
    """Return where `stack` leaves `path`. Both have only the program's frames, outermost first."""
    pairs = list(zip(path, stack, strict=False))
    at = next((at for at, (a, b) in enumerate(pairs) if (a.file, a.line) != (b.file, b.line)), len(pairs))
    path_frame, stack_frame = pairs[at] if at < len(pairs) else (None, None)
    return PathDivergence(
        shared=tuple(path[:at]), path_frame=path_frame, stack_frame=stack_frame, deeper=tuple(path[at + 1 :])
    )


def diverging_frames(context: DiagnosisContext, rank: int, other: int) -> PathDivergence:
    """Return where the stack of `other` diverges from that of `rank`."""
    return compare_paths(own_frames(context, rank), own_frames(context, other))


def branch_that_skipped_call(
    context: DiagnosisContext, rank: int, path: Sequence[Frame], *, own: bool = False
) -> Place | None:
    """Return the line that made the rank leave `path`, else the first line of `path` that it did not reach.

    If the rank already returned from a function of the path, the deciding line is in that function. `own`: the rank
    itself took this path in earlier steps.
    """
    paths = compare_paths(path, own_frames(context, rank))
    if paths.path_frame is None:
        return None
    if not paths.shared and not paths.in_one_function:  # the path of another thread: only its own functions show it
        inner = (
            branch
            for frame in reversed(path)
            if (branch := context.program.deciding_branch(frame, None, same_rank=own))
        )
        return _place_of(next(inner, None))
    # A call on the path may have raised: then the handler that caught the exception decided.
    below = (
        branch
        for frame in paths.deeper
        if (
            branch := context.program.handler_that_continues(frame)
            or context.program.deciding_branch(frame, None, same_rank=own)
        )
    )
    if not paths.in_one_function:  # two calls in one line of the program
        return (_place_of(next(below, None)) if own else None) or place_of(context, rank, paths.shared[-1])
    decided = context.program.deciding_branch(paths.path_frame, paths.stack_frame, same_rank=own)
    if decided is None or not decided.varies:
        decided = next(below, None) or decided
    # If no condition that may differ between ranks guards the path, a condition around the rank's own line may: either
    # call may be the wrong one.
    undecided = decided is None or not decided.varies
    instead = context.program.condition_around_only(paths.stack_frame, paths.path_frame) if undecided else None
    return _place_of(instead or decided or paths.path_frame)


def _place_of(line: Branch | Frame | None) -> Place | None:
    if line is None:
        return None
    at = line.continues_at if isinstance(line, Branch) else line.line
    return Place(file=line.file, line=at, function=line.function)


def rank_that_skipped_wait(context: DiagnosisContext, waiting: Sequence[int]) -> int | None:
    """Return the only rank in a collective outside `waiting`, if a waiting rank waits for it: it skipped their call."""
    roots = hung_roots(context)
    past = [root.rank for root in roots if root.kind is WaitKind.COLLECTIVE and root.rank not in waiting]
    awaited = {peer for root in roots if root.rank in waiting for peer in root.peers}
    return past[0] if len(past) == 1 and past[0] in awaited else None


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """How the lines of the ranks relate in the function in which their call paths diverge."""

    left: Mapping[int, Loop]  # ranks past a loop in which another rank still is, with the outermost such loop
    compared: bool  # whether the source was available for some pair


def relative_positions(context: DiagnosisContext, difference: Difference) -> RelativePositions:
    """Compare the lines of the ranks that differ in a collective, pair by pair."""
    left: dict[int, Loop] = {}
    compared = False
    for rank, other, paths in diverging_pairs(context, difference.everyone):
        if paths.path_frame and paths.stack_frame and paths.in_one_function:
            compared |= context.program.same_function(paths.path_frame, paths.stack_frame)
            loops = context.program.loops_left(inside=paths.stack_frame, outside=paths.path_frame)
            loop = loops[-1] if loops else _loop_of_calls(context, difference, rank, other, paths.stack_frame)
            left |= {rank: loop} if loop else {}
    is_open = len(left) < len(difference.everyone[:_MAX_COMPARED])
    return RelativePositions(left=left if is_open else {}, compared=compared)


def diverging_pairs(context: DiagnosisContext, ranks: Sequence[int]) -> Iterator[tuple[int, int, PathDivergence]]:
    """Yield each ordered pair of ranks, with the point at which the second rank's stack leaves that of the first."""
    for rank, other in permutations(ranks[:_MAX_COMPARED], 2):
        yield rank, other, diverging_frames(context, rank, other)


def _loop_of_calls(
    context: DiagnosisContext, difference: Difference, rank: int, other: int, below: Frame
) -> Loop | None:
    """Return the loop that `rank` left and in which `other` still makes a call that `rank` made until recently.

    The loop is in a function below the line at which the two ranks diverge. The line of a call that was made below
    Python is unknown: then `other` must be in a backward pass, which is part of every training step.
    """
    mine, theirs = difference.event(rank), difference.event(other)
    if mine is None or theirs is None or mine.site == theirs.site:
        return None
    if not theirs.called and not in_backward(context.boards.get(other)):
        return None
    line = context.timelines[rank].of_group(difference.group)
    before = line[: index_of(line, mine)][-_RECENT:]
    if all(event.site != theirs.site for event in before):
        return None
    frames = own_frames(context, other)
    inside = frames[frames.index(below) + 1 :]
    loops = [(frame, loop) for frame in inside for loop in context.program.loops_around(frame)]
    # `rank` left the loop that contains its last call; that call may also come after inner loops.
    held = (
        (frame, loop) for frame, loop in loops for event in before[-1:] if any(loop.holds(made) for made in event.chain)
    )
    frame, loop = next(held, loops[0] if loops else (below, None))
    if loop is not None and _is_a_step_ahead(context, mine, theirs, loop, other):
        return None
    if loop is None or loop.exits:
        return loop
    # No statement ends the loop early, but a `continue` in it may have skipped the iteration.
    return replace(
        loop, exits=tuple(jump for jump in jumps_before(context, frame) if jump.line > loop.line and not jump.catches)
    )


def _is_a_step_ahead(context: DiagnosisContext, mine: Event, theirs: Event, loop: Loop, other: int) -> bool:
    """Return whether `other` is in a later step and the loop is within one step: then both ranks finished the loop."""
    board = context.boards.get(other)
    if board is None or not board.optimizer_chain or mine.step is None or theirs.step is None:
        return False
    return theirs.step > mine.step and not any(loop.holds(frame) for frame in board.optimizer_chain)


def loops_around_any(context: DiagnosisContext, frames: Sequence[Frame]) -> Iterator[Loop]:
    """Yield the loops around these frames, innermost first. The frames are given outermost first."""
    return (loop for frame in reversed(frames) for loop in context.program.loops_around(frame))


def jumps_before(context: DiagnosisContext, frame: Frame) -> list[Branch]:
    """Return the branches before the line that may leave the loop around it or start its next iteration."""
    return [branch for branch in context.program.branches(frame) if branch.leaves and not branch.ends]


def in_backward(board: StatusFile | None) -> bool:
    return (
        board is not None and board.latest_training_event is not None and board.latest_training_event.kind == "backward"
    )
