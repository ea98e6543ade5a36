"""The call stacks of the ranks at the end, in the program's own lines; equal stacks once, similar ones as a tree."""

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

_MAX_FRAMES = 32  # of one stack; the outermost are dropped first
_MAX_STACKS = 16
_AROUND = 1  # lines before and after the innermost line


@dataclass(frozen=True, kw_only=True)
class StackNode:
    """Ranks with the same outer frames: the frames that they share, outermost first, and their subtrees."""

    ranks: tuple[int, ...]
    frames: tuple[Place, ...]  # without those of the nodes above; empty: the ranks are in the frame above
    subtrees: tuple[StackNode, ...]  # subtrees where the ranks diverge; empty: the stack ends here
    ends: CallStack | None  # the stack that ends here; None: the ranks diverge

    @property
    def diverges_in(self) -> Place | None:
        """The function, if all subtrees begin in the same function."""
        first = [subtree.frames[:1] for subtree in self.subtrees]
        inside = {(place.file, place.function) for frames in first for place in frames}
        return first[0][0] if all(first) and len(inside) == 1 else None


def stack_trees(stacks: Sequence[CallStack]) -> tuple[StackNode, ...]:
    """Return the stacks merged from the outermost frame on; a stack without a common function is a tree of its own."""
    trees: dict[object, list[CallStack]] = {}
    for number, stack in enumerate([stack for stack in stacks if stack.frames][:_MAX_STACKS]):
        outermost = stack.frames[-1]
        trees.setdefault((outermost.file, outermost.function) if _is_whole(stack) else number, []).append(stack)
    return tuple(_tree(together, 0) for together in trees.values())


def _is_whole(stack: CallStack) -> bool:
    """Whether the stack is complete, of the training thread, and begins in the program."""
    return not stack.of and len(stack.frames) < _MAX_FRAMES and not is_library(stack.frames[-1].file or "")


def _tree(stacks: Sequence[CallStack], shown: int) -> StackNode:
    """Return the tree of stacks whose outermost `shown` frames are already in the nodes above."""
    ranks = tuple(sorted({rank for stack in stacks for rank in stack.ranks}))
    outer = [stack.frames[::-1][shown:] for stack in stacks]
    if len(stacks) == 1:
        return StackNode(ranks=ranks, frames=outer[0], subtrees=(), ends=stacks[0])
    equal = takewhile(lambda level: len({_line(frame) for frame in level}) == 1, zip(*outer, strict=False))
    shared = tuple(level[0] for level in equal)
    by_line: dict[object, list[CallStack]] = {}
    for number, (stack, frames) in enumerate(zip(stacks, outer, strict=True)):
        rest = frames[len(shared) :]
        by_line.setdefault(_line(rest[0]) if rest else number, []).append(stack)
    subtrees = tuple(_tree(together, shown + len(shared)) for together in by_line.values())
    return StackNode(ranks=ranks, frames=shared, subtrees=subtrees, ends=None)


def _line(place: Place) -> tuple[str | None, int | None, str | None]:
    return place.file, place.line, place.function


def call_stacks(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> tuple[CallStack, ...]:
    """Return the stacks, the culprit's first. A FAIL has the traceback of the first failure; a PASS has none."""
    if judgement.status is Status.PASS:
        return ()
    raised = judgement.failures[0].raised if judgement.failures else None
    if judgement.status is not Status.HANG and raised is not None and raised.frames:
        return (_call_stack(evidence.sources, (raised.rank,), raised.frames, raised.type, raised.proof),)
    blamed = culprit.ranks if culprit else ()
    stood = [
        (seen, stack)
        for look in evidence.snapshots[-1:]
        for seen in look.ranks
        if (stack := rank_stack(seen)) and stack.frames
    ]
    classes: dict[tuple[Frame, ...], list[tuple[RankSnapshot, Stack]]] = {}
    for seen, stack in stood:
        classes.setdefault(_own(stack.frames) or stack.frames[:1], []).append((seen, stack))
    stacks = [
        _call_stack(evidence.sources, tuple(seen.rank for seen, _ in equal), equal[0][1].frames, "", equal[0][0].proof)
        for equal in classes.values()
    ]
    stacks.sort(key=lambda stack: (not set(stack.ranks) & set(blamed), stack.ranks))
    place = culprit.place if culprit else None
    if place is not None and not any(_holds(stack.frames, place) for stack in stacks):
        stacks = [*_aside(evidence, blamed, place), *stacks]
    return tuple(stacks[:_MAX_STACKS])


def _aside(evidence: Evidence, blamed: Sequence[int], place: Place) -> list[CallStack]:
    """Return the stack of the culprit's other thread or child process that is at `place`, if there is one."""
    snapshots = (seen for look in evidence.snapshots[-1:] for seen in look.ranks if seen.rank in blamed)
    standing = ((seen, *stack) for seen in snapshots for stack in _others(seen) if _holds(stack[1].frames, place))
    first = next(standing, None)
    if first is None:
        return []
    seen, name, stack = first
    return [_call_stack(evidence.sources, (seen.rank,), stack.frames, name, seen.proof)]


def _others(seen: RankSnapshot) -> Iterator[tuple[str, Stack]]:
    yield from ((f"thread {stack.thread or stack.tid}", stack) for stack in seen.stacks)
    for pid, stacks in seen.child_stacks.items():
        yield from ((f"process {pid}", stack) for stack in stacks)


def _holds(frames: Sequence[Frame | Place], place: Place) -> bool:
    return any((frame.file, frame.line) == (place.file, place.line) for frame in frames)


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the program's frames. A comprehension on the line of its caller counts as part of the caller."""
    own = [frame for frame in frames if not is_library(frame.file) and not frame.file.startswith("<")]
    outer = [*own[1:], None][: len(own)]
    return tuple(
        frame
        for frame, around in zip(own, outer, strict=True)
        if around is None or (frame.file, frame.line) != (around.file, around.line) or not frame.function.endswith(">")
    )


def _call_stack(
    sources: Sequence[Source], ranks: tuple[int, ...], frames: Sequence[Frame], of: str, proof: str | None
) -> CallStack:
    frames = [frame for frame in frames if not in_probe(frame.file)] or frames
    own = _own(frames) or tuple(frames[:1])
    inside = next((number for number, frame in enumerate(frames) if frame in own), 0)
    return CallStack(
        ranks=ranks,
        of=of,
        frames=tuple(Place(file=frame.file, line=frame.line, function=frame.function) for frame in own[:_MAX_FRAMES]),
        innermost=frames[0].function if inside else "",
        library=len(frames) - len(own),
        around=_around(sources, own[0]),
        proof=proof,
    )


def _around(sources: Sequence[Source], frame: Frame) -> Place | None:
    """Return the line with its neighbours, or None. The last line is not blank, because line numbers count from it."""
    kept = ProgramSource(tuple(sources)).excerpt(frame)
    if kept is None:
        return None
    lines = kept.text.splitlines()
    at = frame.line - kept.first
    last = at + _AROUND if lines[at + 1 : at + 1 + _AROUND] and lines[at + _AROUND].strip() else at
    text = "\n".join(lines[max(at - _AROUND, 0) : last + 1])
    return Place(file=frame.file, line=kept.first + last, function=frame.function, text=text)
