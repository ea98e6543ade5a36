"""Compare the call stacks of ranks to find where they diverge, and because of which condition or loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.call_patterns import index_of
from nsa_harness.core.collectives.timeline import Event
from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, place_of, program_frames
from nsa_harness.core.evidence.evidence import Frame, StatusFile
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch, Loop
from nsa_harness.core.verdict.wait import WaitKind

_MAX_COMPARED = 16  # at most this many ranks are compared with each other
_RECENT = 64  # number of a rank's last events that are searched for an earlier call of the same line


@dataclass(frozen=True, kw_only=True)
class PathDivergence:
    """The point at which a call stack diverges from an expected call path."""

    shared: tuple[Frame, ...]  # frames that the path and the stack have in common, outermost first
    path_frame: Frame | None  # first frame of the path that is not in the stack; None: all are
    stack_frame: Frame | None  # frame of the stack at this position
    deeper: tuple[Frame, ...]  # frames of the path after `path_frame`

    @property
    def in_one_function(self) -> bool:
        """Whether the call path and the stack diverge inside the same function."""
        if self.path_frame is None or self.stack_frame is None or self.path_frame.file != self.stack_frame.file:
            return False
        path, stack = self.path_frame.function, self.stack_frame.function
        return path == stack or path.endswith(f".{stack}") or stack.endswith(f".{path}")


def compare_paths(path: Sequence[Frame], stack: Sequence[Frame]) -> PathDivergence:
    """Return where the stack `stack` diverges from the call path `path`. Both have program frames, outermost first."""
    pairs = list(zip(path, stack, strict=False))
    at = next((at for at, (a, b) in enumerate(pairs) if (a.file, a.line) != (b.file, b.line)), len(pairs))
    path_frame, stack_frame = pairs[at] if at < len(pairs) else (None, None)
    return PathDivergence(
        shared=tuple(path[:at]), path_frame=path_frame, stack_frame=stack_frame, deeper=tuple(path[at + 1 :])
    )


def diverging_frames(context: DiagnosisContext, rank: int, other: int) -> PathDivergence:
    """Return the point at which the stack of rank `other` diverges from the stack of `rank`."""
    return compare_paths(program_frames(context, rank), program_frames(context, other))


def branch_that_skipped_call(
    context: DiagnosisContext, rank: int, path: Sequence[Frame], *, same_rank: bool = False
) -> Place | None:
    """Return the branch that made `rank` skip the call at the end of `path`, or None if unknown.

    `path` has the frames that lead to the call, outermost first. If the source shows no such branch, the result is the
    first line of `path` that the rank did not reach. `same_rank`: the rank itself took this path in earlier steps, so a
    condition on the rank number cannot be the reason.
    """
    paths = compare_paths(path, program_frames(context, rank))
    if paths.path_frame is None:
        return None
    if not paths.shared and not paths.in_one_function:  # another thread took the path: search only the path's functions
        branches = (
            branch
            for frame in reversed(path)
            if (branch := context.program.deciding_branch(frame, None, same_rank=same_rank))
        )
        return _place_of(next(branches, None))
    # If a call on the path raised an exception, the handler that caught it made the rank skip the call.
    deeper_branches = (
        branch
        for frame in paths.deeper
        if (
            branch := context.program.handler_that_continues(frame)
            or context.program.deciding_branch(frame, None, same_rank=same_rank)
        )
    )
    if not paths.in_one_function:  # the program makes both calls on one line
        return (_place_of(next(deeper_branches, None)) if same_rank else None) or place_of(
            context, rank, paths.shared[-1]
        )
    deciding = context.program.deciding_branch(paths.path_frame, paths.stack_frame, same_rank=same_rank)
    if deciding is None or not deciding.may_differ:
        deciding = next(deeper_branches, None) or deciding
    # Either call may be the wrong one. If no condition that may differ between ranks guards the path, look for such a
    # condition around the rank's own line.
    is_undecided = deciding is None or not deciding.may_differ
    other_condition = (
        context.program.condition_around_only(paths.stack_frame, paths.path_frame) if is_undecided else None
    )
    return _place_of(other_condition or deciding or paths.path_frame)


def _place_of(line: Branch | Frame | None) -> Place | None:
    if line is None:
        return None
    at = line.continues_at if isinstance(line, Branch) else line.line
    return Place(file=line.file, line=at, function=line.function)


def rank_that_skipped_wait(context: DiagnosisContext, waiting: Sequence[int]) -> int | None:
    """Return the rank that skipped the call in which the `waiting` ranks hang, or None if unknown."""
    roots = hung_roots(context)
    outside_ranks = [root.rank for root in roots if root.kind is WaitKind.COLLECTIVE and root.rank not in waiting]
    awaited_ranks = {peer for root in roots if root.rank in waiting for peer in root.peers}
    return outside_ranks[0] if len(outside_ranks) == 1 and outside_ranks[0] in awaited_ranks else None


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """The loops that some ranks have left while other ranks are still inside them."""

    left_loops: Mapping[
        int, Loop
    ]  # the loop that each rank has left while another rank is still in it; the outermost, if several
    has_source: bool  # the source code of at least one diverging function is stored


def relative_positions(context: DiagnosisContext, difference: Difference) -> RelativePositions:
    """Return the loops that some ranks have left while other ranks are still inside them."""
    left_loops: dict[int, Loop] = {}
    has_source = False
    for rank, other, paths in diverging_pairs(context, difference.all_ranks):
        if paths.path_frame and paths.stack_frame and paths.in_one_function:
            has_source |= context.program.same_function(paths.path_frame, paths.stack_frame)
            loops = context.program.loops_left(inside=paths.stack_frame, outside=paths.path_frame)
            loop = loops[-1] if loops else _loop_of_calls(context, difference, rank, other, paths.stack_frame)
            left_loops |= {rank: loop} if loop else {}
    is_open = len(left_loops) < len(difference.all_ranks[:_MAX_COMPARED])
    return RelativePositions(left_loops=left_loops if is_open else {}, has_source=has_source)


def diverging_pairs(context: DiagnosisContext, ranks: Sequence[int]) -> Iterator[tuple[int, int, PathDivergence]]:
    """Yield each ordered pair of the first 16 ranks, and the point at which their stacks diverge."""
    for rank, other in permutations(ranks[:_MAX_COMPARED], 2):
        yield rank, other, diverging_frames(context, rank, other)


def _loop_of_calls(
    context: DiagnosisContext, difference: Difference, rank: int, other: int, stack_frame: Frame
) -> Loop | None:
    """Return the loop that `rank` has left although `other` is still in it, or None if there is none."""
    own_event, other_event = difference.event(rank), difference.event(other)
    if own_event is None or other_event is None or own_event.site == other_event.site:
        return None
    if not other_event.from_python and not in_backward(context.status_files.get(other)):
        return None
    timeline = context.timelines[rank].of_group(difference.group)
    earlier_events = timeline[: index_of(timeline, own_event)][-_RECENT:]
    if all(event.site != other_event.site for event in earlier_events):
        return None
    frames = program_frames(context, other)
    inside = frames[frames.index(stack_frame) + 1 :]
    loops = [(frame, loop) for frame in inside for loop in context.program.loops_around(frame)]
    # Of nested loops, `rank` left the innermost one that contains its last call.
    around_last_call = (
        (frame, loop)
        for frame, loop in loops
        for event in earlier_events[-1:]
        if any(loop.contains(caller) for caller in event.chain)
    )
    frame, loop = next(around_last_call, loops[0] if loops else (stack_frame, None))
    if loop is not None and _is_a_step_ahead(context, own_event, other_event, loop, other):
        return None
    if loop is None or loop.exits:
        return loop
    # No statement leaves the loop early, but a `continue` may have skipped the rest of an iteration.
    return replace(
        loop,
        exits=tuple(jump for jump in jumps_before(context, frame) if jump.line > loop.line and not jump.is_handler),
    )


def _is_a_step_ahead(context: DiagnosisContext, own_event: Event, other_event: Event, loop: Loop, other: int) -> bool:
    """Return whether `other` is already in a later training step, which means that both ranks completed `loop`."""
    status_file = context.status_files.get(other)
    if status_file is None or not status_file.optimizer_chain or own_event.step is None or other_event.step is None:
        return False
    return other_event.step > own_event.step and not any(loop.contains(frame) for frame in status_file.optimizer_chain)


def loops_around_any(context: DiagnosisContext, frames: Sequence[Frame]) -> Iterator[Loop]:
    """Yield the loops that contain one of the `frames`, innermost loop first."""
    return (loop for frame in reversed(frames) for loop in context.program.loops_around(frame))


def jumps_before(context: DiagnosisContext, frame: Frame) -> list[Branch]:
    """Return the branches before the frame's line that end its loop or start the next iteration."""
    return [branch for branch in context.program.branches(frame) if branch.leaves_block and not branch.leaves_function]


def in_backward(status_file: StatusFile | None) -> bool:
    """Return whether the rank's latest recorded training event is a backward pass."""
    return (
        status_file is not None
        and status_file.latest_training_event is not None
        and status_file.latest_training_event.kind == "backward"
    )
