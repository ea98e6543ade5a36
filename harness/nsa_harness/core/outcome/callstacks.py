"""Call stacks: where the ranks stood at the end, in the program's own lines; equal ones are told once, and what several
have in common once more as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Source, Stack
from nsa_harness.core.evidence.stacks import in_probe, is_library
from nsa_harness.core.report import CallStack, Culprit, Place, Status
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.verdict import Judgement

_MAX_FRAMES = 32  # of one stack; outermost ones go first
_MAX_STACKS = 16
_AROUND = 1  # lines before and after the innermost one


@dataclass(frozen=True, kw_only=True)
class StackNode:
    """Ranks that were called the same way: the frames they share, outermost first, and how they go on from there."""

    ranks: tuple[int, ...]
    frames: tuple[Place, ...]  # what is told further out is not told again; empty: these ranks stand in that
    ways: tuple[StackNode, ...]  # where they part; empty: it ends here
    ends: CallStack | None  # the stack that ends here; None: they part

    @property
    def parts_in(self) -> Place | None:
        """The function, where all that part here stand at lines of the same one."""
        first = [way.frames[:1] for way in self.ways]
        inside = {(place.file, place.function) for frames in first for place in frames}
        return first[0][0] if all(first) and len(inside) == 1 else None


def stack_trees(stacks: Sequence[CallStack]) -> tuple[StackNode, ...]:
    """Stacks merged from the outermost frame on; those that have no function in common with another are trees alone."""
    trees: dict[object, list[CallStack]] = {}
    for number, stack in enumerate([one for one in stacks if one.frames][:_MAX_STACKS]):
        outermost = stack.frames[-1]
        trees.setdefault((outermost.file, outermost.function) if _is_whole(stack) else number, []).append(stack)
    return tuple(_grown(together, 0) for together in trees.values())


def _is_whole(stack: CallStack) -> bool:
    """The thread that trains, from its outermost frame on: nothing is cut, and it is in the program at all."""
    return not stack.of and len(stack.frames) < _MAX_FRAMES and not is_library(stack.frames[-1].file or "")


def _grown(stacks: Sequence[CallStack], told: int) -> StackNode:
    """`told`: so many frames of each are told further out."""
    ranks = tuple(sorted({rank for stack in stacks for rank in stack.ranks}))
    outer = [stack.frames[::-1][told:] for stack in stacks]
    if len(stacks) == 1:
        return StackNode(ranks=ranks, frames=outer[0], ways=(), ends=stacks[0])
    alike = takewhile(lambda level: len({_line(one) for one in level}) == 1, zip(*outer, strict=False))
    shared = tuple(level[0] for level in alike)
    going_on: dict[object, list[CallStack]] = {}
    for number, (stack, frames) in enumerate(zip(stacks, outer, strict=True)):
        rest = frames[len(shared) :]
        going_on.setdefault(_line(rest[0]) if rest else number, []).append(stack)
    ways = tuple(_grown(together, told + len(shared)) for together in going_on.values())
    return StackNode(ranks=ranks, frames=shared, ways=ways, ends=None)


def _line(place: Place) -> tuple[str | None, int | None, str | None]:
    return place.file, place.line, place.function


def call_stacks(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> tuple[CallStack, ...]:
    """The culprit's first. Of a FAIL the traceback of what failed first; of a PASS none."""
    if judgement.status is Status.PASS:
        return ()
    raised = judgement.failures[0].raised if judgement.failures else None
    if judgement.status is not Status.HANG and raised is not None and raised.frames:
        return (_told(evidence.sources, (raised.rank,), raised.frames, raised.type, raised.proof),)
    blamed = culprit.ranks if culprit else ()
    stood = [
        (one, stack)
        for look in evidence.snapshots[-1:]
        for one in look.ranks
        if (stack := rank_stack(one)) and stack.frames
    ]
    classes: dict[tuple[Frame, ...], list[tuple[RankSnapshot, Stack]]] = {}
    for one, stack in stood:
        classes.setdefault(_own(stack.frames) or stack.frames[:1], []).append((one, stack))
    told = [
        _told(evidence.sources, tuple(one.rank for one, _ in alike), alike[0][1].frames, "", alike[0][0].proof)
        for alike in classes.values()
    ]
    told.sort(key=lambda stack: (not set(stack.ranks) & set(blamed), stack.ranks))
    place = culprit.place if culprit else None
    if place is not None and not any(_holds(stack.frames, place) for stack in told):
        told = [*_aside(evidence, blamed, place), *told]
    return tuple(told[:_MAX_STACKS])


def _aside(evidence: Evidence, blamed: Sequence[int], place: Place) -> list[CallStack]:
    """Where it is not the thread that trains that is to blame: the thread or child of its ranks that stands there."""
    looked = (one for look in evidence.snapshots[-1:] for one in look.ranks if one.rank in blamed)
    standing = ((one, *named) for one in looked for named in _others(one) if _holds(named[1].frames, place))
    first = next(standing, None)
    if first is None:
        return []
    one, name, stack = first
    return [_told(evidence.sources, (one.rank,), stack.frames, name, one.proof)]


def _others(one: RankSnapshot) -> Iterator[tuple[str, Stack]]:
    yield from ((f"thread {stack.thread or stack.tid}", stack) for stack in one.stacks)
    for pid, stacks in one.child_stacks.items():
        yield from ((f"process {pid}", stack) for stack in stacks)


def _holds(frames: Sequence[Frame | Place], place: Place) -> bool:
    return any((frame.file, frame.line) == (place.file, place.line) for frame in frames)


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Those of the program; a comprehension is no step of its own behind the line that holds it."""
    own = [frame for frame in frames if not is_library(frame.file) and not frame.file.startswith("<")]
    outer = [*own[1:], None][: len(own)]
    return tuple(
        one
        for one, around in zip(own, outer, strict=True)
        if around is None or (one.file, one.line) != (around.file, around.line) or not one.function.endswith(">")
    )


def _told(
    sources: Sequence[Source], ranks: tuple[int, ...], frames: Sequence[Frame], of: str, proof: str | None
) -> CallStack:
    frames = [one for one in frames if not in_probe(one.file)] or frames
    own = _own(frames) or tuple(frames[:1])
    inside = next((number for number, frame in enumerate(frames) if frame in own), 0)
    return CallStack(
        ranks=ranks,
        of=of,
        frames=tuple(Place(file=one.file, line=one.line, function=one.function) for one in own[:_MAX_FRAMES]),
        innermost=frames[0].function if inside else "",
        library=len(frames) - len(own),
        around=_around(sources, own[0]),
        proof=proof,
    )


def _around(sources: Sequence[Source], frame: Frame) -> Place | None:
    """No line at the end is blank: whoever shows them counts from there."""
    kept = ProgramSource(tuple(sources)).excerpt(frame)
    if kept is None:
        return None
    lines = kept.text.splitlines()
    at = frame.line - kept.first
    last = at + _AROUND if lines[at + 1 : at + 1 + _AROUND] and lines[at + _AROUND].strip() else at
    text = "\n".join(lines[max(at - _AROUND, 0) : last + 1])
    return Place(file=frame.file, line=kept.first + last, function=frame.function, text=text)
