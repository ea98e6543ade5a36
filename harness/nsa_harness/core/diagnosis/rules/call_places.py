"""Find the program line that makes the ranks' collective calls differ."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.collectives.alignment import Difference
from nsa_harness.core.collectives.alignment import DifferenceKind as Kind
from nsa_harness.core.diagnosis.call_paths import (
    RelativePositions,
    branch_that_skipped_call,
    diverging_frames,
    loops_around_any,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import DiagnosisContext, event_place, program_frames
from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch, Loop
from nsa_harness.core.source_code.value_origin import ValueOrigin, origin_of_arguments, origin_of_loop

VALUE_CAUSES = {Kind.SHAPE: Cause.SHAPE_MISMATCH, Kind.DTYPE: Cause.DTYPE_MISMATCH, Kind.ROOT: Cause.ROOT_MISMATCH}


def other_ranks(difference: Difference) -> tuple[int, ...]:
    return tuple(rank for rank in difference.all_ranks if rank not in difference.ranks)


def loop_exit(
    context: DiagnosisContext, difference: Difference, positions: RelativePositions, ranks: Sequence[int]
) -> Place | None:
    """Return the line that ended a loop at the wrong time: an exit, the origin of the item count, or the loop."""
    loop = next((positions.left_loops[rank] for rank in ranks if rank in positions.left_loops), None)
    has_left = loop is not None
    if loop is None and difference.kind is Kind.COUNT:
        loop = next(loops_around_any(context, program_frames(context, ranks[0])), None)
    if loop is None:
        return None
    # An exception that ends the loop counts only if nothing else explains the different numbers of iterations.
    own_origin = (
        origin_of_loop(context.program, Place(file=loop.file, line=loop.line), ()) if loop.exits_by_exception else None
    )
    skips = _skipping_branches(context, difference, loop)
    rank_skip = next((branch for branch in skips if branch.reads_rank), None)
    if rank_skip is not None and not any(jump.reads_rank for jump in loop.exits):
        return rank_skip.place
    line = next(
        (jump.line for jump in (*loop.exits, *loop.skips, *(() if own_origin else loop.exits_by_exception))), None
    )
    others = [rank for rank in difference.all_ranks if rank not in ranks] if has_left and not loop.exits else []
    origin = next((origin for rank in others if (origin := _iteration_count_origin(context, loop, rank))), None)
    if line is None and (origin is not None or skips):
        return origin.place if origin is not None else skips[0].place
    return Place(file=loop.file, line=loop.line if line is None else line, function=loop.function)


def _skipping_branches(context: DiagnosisContext, difference: Difference, loop: Loop) -> list[Branch]:
    """Return the conditions that could differ between ranks and that make an iteration of `loop` skip the call."""
    chain = difference.expected.chain if difference.expected else ()
    at = next((at for at, frame in enumerate(chain) if loop.contains(frame)), None)
    if at is None:
        return []
    program = context.program
    inside = [branch for branch in program.branches(chain[at]) if loop.line < branch.line <= loop.last]
    # A condition on the rank may also be in a function that the loop calls.
    inside += [branch for frame in chain[:at] for branch in program.branches(frame) if branch.reads_rank]
    return [branch for branch in inside if branch.may_differ and not branch.leaves_function]


def _iteration_count_origin(context: DiagnosisContext, outer_loop: Loop, rank: int) -> ValueOrigin | None:
    """Return the line that sets a number of iterations that could differ between ranks, or None if unknown."""
    frames, program = program_frames(context, rank), context.program
    for depth, frame in enumerate(frames):
        for loop in reversed(context.program.loops_around(frame)):
            if (loop.file, loop.function) != (
                outer_loop.file,
                outer_loop.function,
            ) or outer_loop.line <= loop.line <= outer_loop.last:
                line = Place(file=loop.file, line=loop.line)
                origin = origin_of_loop(program, line, tuple(reversed(frames[:depth])))
                if origin is not None:
                    return origin
    return None


def difference_place(context: DiagnosisContext, difference: Difference, ranks: Sequence[int]) -> Place | None:
    """Return the line that makes calls differ: the origin of arguments, a branch, or the call, or None if unknown."""
    if difference.kind in VALUE_CAUSES and (origin := _origin_of_values(context, difference, ranks)):
        return origin
    others = other_ranks(difference)
    if others and ranks:
        caller, skipper = (ranks[0], others[0]) if difference.kind is Kind.EXTRA else (others[0], ranks[0])
        path = _usual_path(context, difference, skipper)
        place = branch_that_skipped_call(
            context, skipper, path or program_frames(context, caller), same_rank=bool(path)
        )
        if place is not None:
            return place
    if difference.kind in (Kind.MISSING, Kind.COUNT) and difference.expected is not None:
        rank = next((rank for rank, event in difference.entered_events if event is difference.expected), None)
        return event_place(context, rank, difference.expected) if rank is not None else difference.expected.place
    event = difference.event(ranks[0])
    return event_place(context, ranks[0], event) if event else None


def _usual_path(context: DiagnosisContext, difference: Difference, rank: int) -> tuple[Frame, ...]:
    """Return the path, outermost first, of the missing call in earlier steps, or () if the other ranks share it."""
    expected = difference.expected
    caller = next((rank for rank, event in difference.entered_events if event is expected), None)
    paths = diverging_frames(context, caller, rank) if caller is not None and difference.kind is Kind.MISSING else None
    if expected is None or paths is None or not paths.shared or paths.in_one_function:
        return ()
    chains = [
        event.chain
        for event in context.timelines[rank].events
        if (event.op, event.place) == (expected.op, expected.place)
    ]
    if expected.chain and expected.chain not in chains:
        return tuple(reversed(next(filter(None, reversed(chains)), ())))
    return context.program.path_to_call(program_frames(context, rank), [frame.function for frame in paths.deeper])


def _origin_of_values(context: DiagnosisContext, difference: Difference, ranks: Sequence[int]) -> Place | None:
    """Return the line that makes the arguments of a call differ between ranks, or None if unknown."""
    event = difference.event(ranks[0]) if ranks else None
    if event is None or not event.from_python or event.place is None:
        return None
    frames = tuple(reversed(program_frames(context, ranks[0])))
    line = (event.place.file, event.place.line)
    position = next((at for at, frame in enumerate(frames) if (frame.file, frame.line) == line), None)
    chain = event.chain or (() if position is None else frames[position:]) or (event.place,)
    origin = origin_of_arguments(context.program, chain)
    if origin is None or (not origin.differs_by_rank and context.program.same_function(origin.place, chain[0])):
        return None
    return origin.place
