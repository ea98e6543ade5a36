"""Collect the call stacks of all ranks at the end of a run, and merge them into trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Source, Stack
from nsa_harness.core.evidence.frameworks import framework_frames, phase_frame
from nsa_harness.core.evidence.stacks import in_probe, is_library
from nsa_harness.core.report import CallStack, Culprit, Place, Status
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.verdict import Judgement

_MAX_FRAMES = 32  # frames of one stack; the outermost are dropped first
_MAX_STACKS = 16
_AROUND = 1  # lines before and after the innermost line


@dataclass(frozen=True, kw_only=True)
class StackNode:
    """A node in a tree of call stacks. It holds frames that several ranks share."""

    ranks: tuple[int, ...]
    frames: tuple[Place, ...]  # outermost first, without the frames of parent nodes; may be empty
    subtrees: tuple[StackNode, ...]  # one for each line on which the ranks diverge; empty for a leaf
    call_stack: CallStack | None  # the full stack, only for a leaf

    @property
    def diverges_in(self) -> Place | None:
        """The function in which the ranks diverge, or None if they diverge in different functions."""
        first = [subtree.frames[:1] for subtree in self.subtrees]
        inside = {(place.file, place.function) for frames in first for place in frames}
        return first[0][0] if all(first) and len(inside) == 1 else None


def stack_trees(stacks: Sequence[CallStack]) -> tuple[StackNode, ...]:
    """Return the call stacks merged into trees by their common outer frames."""
    trees: dict[object, list[CallStack]] = {}
    for number, stack in enumerate([stack for stack in stacks if stack.frames][:_MAX_STACKS]):
        outermost = stack.frames[-1]
        trees.setdefault((outermost.file, outermost.function) if _is_whole(stack) else number, []).append(stack)
    return tuple(_tree(together, 0) for together in trees.values())


def _is_whole(stack: CallStack) -> bool:
    return not stack.of and len(stack.frames) < _MAX_FRAMES and not is_library(stack.frames[-1].file or "")


def _tree(stacks: Sequence[CallStack], shown_frames: int) -> StackNode:
    """Merge the call stacks into one tree, leaving out the `shown_frames` outermost frames."""
    ranks = tuple(sorted({rank for stack in stacks for rank in stack.ranks}))
    outer = [stack.frames[::-1][shown_frames:] for stack in stacks]
    if len(stacks) == 1:
        return StackNode(ranks=ranks, frames=outer[0], subtrees=(), call_stack=stacks[0])
    equal = takewhile(lambda level: len({_line(frame) for frame in level}) == 1, zip(*outer, strict=False))
    shared_frames = tuple(level[0] for level in equal)
    by_line: dict[object, list[CallStack]] = {}
    for number, (stack, frames) in enumerate(zip(stacks, outer, strict=True)):
        rest = frames[len(shared_frames) :]
        by_line.setdefault(_line(rest[0]) if rest else number, []).append(stack)
    subtrees = tuple(_tree(together, shown_frames + len(shared_frames)) for together in by_line.values())
    return StackNode(ranks=ranks, frames=shared_frames, subtrees=subtrees, call_stack=None)


def _line(place: Place) -> tuple[str | None, int | None, str | None]:
    return place.file, place.line, place.function


def call_stacks(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> tuple[CallStack, ...]:
    """Return the call stacks for the report, culprit first: none for a PASS, for a FAIL its first traceback."""
    if judgement.status is Status.PASS:
        return ()
    exception = judgement.failures[0].exception if judgement.failures else None
    if judgement.status is not Status.HANG and exception is not None and exception.frames:
        return (_call_stack(evidence.sources, (exception.rank,), exception.frames, exception.type, exception.proof),)
    culprits = culprit.ranks if culprit else ()
    classes: dict[tuple[Frame, ...], list[tuple[RankSnapshot, Stack]]] = {}
    for rank in evidence.snapshots[-1].ranks if evidence.snapshots else ():
        if (stack := rank_stack(rank)) and stack.frames:
            classes.setdefault(_own(stack.frames) or stack.frames[:1], []).append((rank, stack))
    # Only a framework shows how ranks differ if all are on the same line, or if others are in a function called there.
    outer = {frame for own in classes for frame in own[len(classes) > 1 :]}
    classes = {
        frames: equal
        for own, ranks in classes.items()
        for frames, equal in (_by_phase(ranks, alone=len(classes) == 1) if own[0] in outer else {own: ranks}).items()
    }
    stacks = [
        _call_stack(
            evidence.sources, tuple(rank.rank for rank, _ in equal), equal[0][1].frames, "", equal[0][0].proof, own
        )
        for own, equal in classes.items()
    ]
    stacks.sort(key=lambda stack: (not set(stack.ranks) & set(culprits), stack.ranks))
    place = culprit.place if culprit else None
    if place is not None and not any(_contains(stack.frames, place) for stack in stacks):
        stacks = [*_stack_of_other_thread(evidence, culprits, place), *stacks]
    return tuple(stacks[:_MAX_STACKS])


def _by_phase(
    equal: list[tuple[RankSnapshot, Stack]], *, alone: bool
) -> dict[tuple[Frame, ...], list[tuple[RankSnapshot, Stack]]]:
    """Return ranks with equal program frames, by these frames and the framework's function in which each rank is."""
    classes: dict[tuple[Frame, ...], list[tuple[RankSnapshot, Stack]]] = {}
    for rank, stack in equal:
        phase = phase_frame(framework_frames(stack.frames))
        own = _own(stack.frames) or stack.frames[:1]
        classes.setdefault((phase, *own) if phase else own, []).append((rank, stack))
    own = _own(equal[0][1].frames) or equal[0][1].frames[:1]
    return {own: equal} if own in classes or (alone and len(classes) < 2) else classes


def _stack_of_other_thread(evidence: Evidence, culprits: Sequence[int], place: Place) -> list[CallStack]:
    """Return the stack that contains `place` in another thread or child process of a culprit, or [] if none does."""
    for rank in evidence.snapshots[-1].ranks if evidence.snapshots else ():
        for owner, stack in _named_stacks(rank) if rank.rank in culprits else ():
            if _contains(stack.frames, place):
                return [_call_stack(evidence.sources, (rank.rank,), stack.frames, owner, rank.proof)]
    return []


def _named_stacks(rank: RankSnapshot) -> Iterator[tuple[str, Stack]]:
    yield from ((f"thread {stack.thread or stack.tid}", stack) for stack in rank.stacks)
    for pid, stacks in rank.child_stacks.items():
        yield from ((f"process {pid}", stack) for stack in stacks)


def _contains(frames: Sequence[Frame | Place], place: Place) -> bool:
    return any((frame.file, frame.line) == (place.file, place.line) for frame in frames)


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of the user's program, without library frames."""
    own = [frame for frame in frames if not is_library(frame.file) and not frame.file.startswith("<")]
    outer = [*own[1:], None][: len(own)]
    return tuple(
        frame
        for frame, around in zip(own, outer, strict=True)
        if around is None or (frame.file, frame.line) != (around.file, around.line) or not frame.function.endswith(">")
    )


def _call_stack(
    sources: Sequence[Source],
    ranks: tuple[int, ...],
    frames: Sequence[Frame],
    of: str,
    proof: str | None,
    own: tuple[Frame, ...] = (),
) -> CallStack:
    """Return a stack as the report stores it. `own`: the frames to show, or () for all of the program's own."""
    frames = [frame for frame in frames if not in_probe(frame.file)] or frames
    own = own or _own(frames) or tuple(frames[:1])
    innermost_is_library = frames[0] not in own and any(frame in own for frame in frames)
    return CallStack(
        ranks=ranks,
        of=of,
        frames=tuple(Place(file=frame.file, line=frame.line, function=frame.function) for frame in own[:_MAX_FRAMES]),
        innermost=frames[0].function if innermost_is_library else "",
        library=len(frames) - len(own),
        around=_around(sources, own[0]),
        proof=proof,
    )


def _around(sources: Sequence[Source], frame: Frame) -> Place | None:
    excerpt = ProgramSource(tuple(sources)).excerpt(frame)
    if excerpt is None:
        return None
    lines = excerpt.text.splitlines()
    at = frame.line - excerpt.first
    last = at + _AROUND if lines[at + 1 : at + 1 + _AROUND] and lines[at + _AROUND].strip() else at
    text = "\n".join(lines[max(at - _AROUND, 0) : last + 1])
    return Place(file=frame.file, line=excerpt.first + last, function=frame.function, text=text)
