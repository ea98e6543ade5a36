"""Call stacks: where the ranks stood at the end, in the program's own lines; equal ones are told once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Source, Stack
from nsa_harness.core.evidence.sources import excerpt
from nsa_harness.core.evidence.stacks import in_probe, is_library
from nsa_harness.core.report import CallStack, Culprit, Place, Status
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.verdict import Judgement

_MAX_FRAMES = 32  # of one stack; outermost ones go first
_MAX_STACKS = 16
_AROUND = 1  # lines before and after the innermost one


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
    kept = excerpt(sources, frame.file, frame.line)
    if kept is None:
        return None
    lines = kept.text.splitlines()
    at = frame.line - kept.first
    last = at + _AROUND if lines[at + 1 : at + 1 + _AROUND] and lines[at + _AROUND].strip() else at
    text = "\n".join(lines[max(at - _AROUND, 0) : last + 1])
    return Place(file=frame.file, line=kept.first + last, function=frame.function, text=text)
