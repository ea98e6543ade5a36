"""The way that leads to a call, and the line at which a rank that did not make the call turned off from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, place_of
from nsa_harness.core.diagnosis.progress import own_frames
from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch
from nsa_harness.core.verdict.wait import WaitKind


@dataclass(frozen=True, kw_only=True)
class PathDivergence:
    """Where a rank left the way: in one function, or into another one."""

    alike: tuple[Frame, ...]  # shared lines, from the outside in
    reached: Frame | None  # the first line of the way that it does not stand in; None where it stands in them all
    stands: Frame | None  # where it stands instead
    deeper: tuple[Frame, ...]  # of the way, behind `reached`

    @property
    def in_one_function(self) -> bool:
        """The ways part at lines of it; of the same class too, where that is told."""
        if self.reached is None or self.stands is None or self.reached.file != self.stands.file:
            return False
        one, other = self.reached.function, self.stands.function
        return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def turn(way: Sequence[Frame], stands: Sequence[Frame]) -> PathDivergence:
    """Both from the outside in, of the program's own frames."""
    pairs = list(zip(way, stands, strict=False))
    at = next((at for at, (one, two) in enumerate(pairs) if (one.file, one.line) != (two.file, two.line)), len(pairs))
    reached, stands_at = pairs[at] if at < len(pairs) else (None, None)
    return PathDivergence(alike=tuple(way[:at]), reached=reached, stands=stands_at, deeper=tuple(way[at + 1 :]))


def turn_between(context: DiagnosisContext, rank: int, other: int) -> PathDivergence:
    """Where the second one stands elsewhere than the first."""
    return turn(own_frames(context, rank), own_frames(context, other))


def turned_off_at(context: DiagnosisContext, rank: int, way: Sequence[Frame], *, own: bool = False) -> Place | None:
    """What decided that the rank went another way, else the line of the way that it did not take.

    Where it went through the same function before and is out of it, what decides there is deeper. `own`: the rank went
    this way before.
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
    at = line.goes_on if isinstance(line, Branch) else line.line
    return Place(file=line.file, line=at, function=line.function)


def passer(context: DiagnosisContext, waiting: Sequence[int]) -> int | None:
    """The one rank that went past what the others wait in: it stands in a collective, and one of them waits for it."""
    roots = hung_roots(context)
    past = [one.rank for one in roots if one.kind is WaitKind.COLLECTIVE and one.rank not in waiting]
    awaited = {peer for one in roots if one.rank in waiting for peer in one.peers}
    return past[0] if len(past) == 1 and past[0] in awaited else None
