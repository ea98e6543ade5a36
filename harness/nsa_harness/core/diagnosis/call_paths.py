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
    """The point at which a stack leaves a call path: in one function, or into another one."""

    alike: tuple[Frame, ...]  # shared frames, outermost first
    reached: Frame | None  # the first frame of the path that it does not share; None: it shares them all
    stands: Frame | None  # where it is instead
    deeper: tuple[Frame, ...]  # frames of the path after `reached`

    @property
    def in_one_function(self) -> bool:
        """Whether both diverge at lines of one function (and of one class, if the stacks name it)."""
        if self.reached is None or self.stands is None or self.reached.file != self.stands.file:
            return False
        one, other = self.reached.function, self.stands.function
        return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def turn(way: Sequence[Frame], stands: Sequence[Frame]) -> PathDivergence:
    """Return where two stacks diverge. Both have only the program's frames, outermost first."""
    pairs = list(zip(way, stands, strict=False))
    at = next((at for at, (one, two) in enumerate(pairs) if (one.file, one.line) != (two.file, two.line)), len(pairs))
    reached, stands_at = pairs[at] if at < len(pairs) else (None, None)
    return PathDivergence(alike=tuple(way[:at]), reached=reached, stands=stands_at, deeper=tuple(way[at + 1 :]))


def turn_between(context: DiagnosisContext, rank: int, other: int) -> PathDivergence:
    """Return where the stack of `other` diverges from that of `rank`."""
    return turn(own_frames(context, rank), own_frames(context, other))


def turned_off_at(context: DiagnosisContext, rank: int, way: Sequence[Frame], *, own: bool = False) -> Place | None:
    """Return the line that decided that the rank took another path, else the line of the path that it did not reach.

    If it has already left a function of the path, what decides is deeper. `own`: the rank took this path before.
    """
    found = turn(way, own_frames(context, rank))
    if found.reached is None:
        return None
    if not found.alike and not found.in_one_function:  # the way of another thread: its own functions tell
        inner = (one for frame in reversed(way) if (one := context.program.deciding_branch(frame, None, same_rank=own)))
        return _place_of(next(inner, None))
    # Something on the way may have been raised and caught; what decides there is the other way out.
    below = (
        one
        for frame in found.deeper
        if (
            one := context.program.handler_that_continues(frame)
            or context.program.deciding_branch(frame, None, same_rank=own)
        )
    )
    if not found.in_one_function:  # two calls in one line, or of one line
        return (_place_of(next(below, None)) if own else None) or place_of(context, rank, found.alike[-1])
    decided = context.program.deciding_branch(found.reached, found.stands, same_rank=own)
    if decided is None or not decided.varies:
        decided = next(below, None) or decided
    # Where nothing decides that the line is reached, that the other one is: each may be what they should not have done.
    # So where what decides is the same on every rank.
    undecided = decided is None or not decided.varies
    instead = context.program.condition_around_only(found.stands, found.reached) if undecided else None
    return _place_of(instead or decided or found.reached)


def _place_of(line: Branch | Frame | None) -> Place | None:
    if line is None:
        return None
    at = line.continues_at if isinstance(line, Branch) else line.line
    return Place(file=line.file, line=at, function=line.function)


def passer(context: DiagnosisContext, waiting: Sequence[int]) -> int | None:
    """Return the one rank that went past what the others wait in: it waits in a collective, and one waits for it."""
    roots = hung_roots(context)
    past = [one.rank for one in roots if one.kind is WaitKind.COLLECTIVE and one.rank not in waiting]
    awaited = {peer for one in roots if one.rank in waiting for peer in one.peers}
    return past[0] if len(past) == 1 and past[0] in awaited else None


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """How the lines of the ranks relate in the function in which their call paths diverge."""

    left: Mapping[int, Loop]  # ranks behind a loop in which another rank still is, with the outermost such loop
    compared: bool  # the source of some pair was available


def relative_positions(context: DiagnosisContext, difference: Difference) -> RelativePositions:
    """Compare the lines of the ranks that differ in a collective, pair by pair."""
    left: dict[int, Loop] = {}
    compared = False
    for rank, other, paths in diverging_pairs(context, difference.everyone):
        if paths.reached and paths.stands and paths.in_one_function:
            compared |= context.program.same_function(paths.reached, paths.stands)
            loops = context.program.loops_left(inside=paths.stands, outside=paths.reached)
            loop = loops[-1] if loops else _loop_of_calls(context, difference, rank, other, paths.stands)
            left |= {rank: loop} if loop else {}
    is_open = len(left) < len(difference.everyone[:_MAX_COMPARED])
    return RelativePositions(left=left if is_open else {}, compared=compared)


def diverging_pairs(context: DiagnosisContext, ranks: Sequence[int]) -> Iterator[tuple[int, int, PathDivergence]]:
    """Yield each ordered pair of ranks, with the lines at which the second rank is elsewhere than the first."""
    for rank, other in permutations(ranks[:_MAX_COMPARED], 2):
        yield rank, other, turn_between(context, rank, other)


def _loop_of_calls(
    context: DiagnosisContext, difference: Difference, rank: int, other: int, below: Frame
) -> Loop | None:
    """Return the loop that `rank` left, in which `other` still makes a call that `rank` made until now.

    The loop is deeper than the line at which the two diverge. The line of a call below Python is unknown. There only
    a backward pass shows that both ranks went through the training.
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
    # The last call that `rank` made there is in the loop that it left, or after the loops within it.
    held = (
        (frame, loop) for frame, loop in loops for one in before[-1:] if any(loop.holds(made) for made in one.chain)
    )
    frame, loop = next(held, loops[0] if loops else (below, None))
    if loop is not None and _is_a_step_ahead(context, mine, theirs, loop, other):
        return None
    if loop is None or loop.exits:
        return loop
    # Nothing ends the loop early. A jump in it may have skipped an iteration.
    return replace(
        loop, exits=tuple(one for one in jumps_before(context, frame) if one.line > loop.line and not one.catches)
    )


def _is_a_step_ahead(context: DiagnosisContext, mine: Event, theirs: Event, loop: Loop, other: int) -> bool:
    """The loop is within a step, and the other rank is in it in a later step: both finished it in their own step."""
    board = context.boards.get(other)
    if board is None or not board.stepped_from or mine.step is None or theirs.step is None:
        return False
    return theirs.step > mine.step and not any(loop.holds(one) for one in board.stepped_from)


def loops_around_any(context: DiagnosisContext, frames: Sequence[Frame]) -> Iterator[Loop]:
    """Yield the loops around these frames, given from the outside in, the innermost first."""
    return (loop for frame in reversed(frames) for loop in context.program.loops_around(frame))


def jumps_before(context: DiagnosisContext, frame: Frame) -> list[Branch]:
    """Return what may start the next iteration of the loop around the line, or leave the loop, before the line."""
    return [one for one in context.program.branches(frame) if one.leaves and not one.ends]


def in_backward(board: StatusFile | None) -> bool:
    return board is not None and board.training is not None and board.training.kind == "backward"
