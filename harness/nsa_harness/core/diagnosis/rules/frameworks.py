"""A note about ranks that hang inside a framework, of which the program's own lines only show the call, such as
`trainer.fit()`.
"""

from __future__ import annotations

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, place_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.evidence import Frame, StatusFile
from nsa_harness.core.evidence.stacks import framework_frames, package_of, phase_frame, user_frame
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.motion import rank_stack


def _inside_framework(context: DiagnosisContext) -> tuple[dict[int, tuple[Frame, ...]], Frame] | None:
    """Return the framework's frames of each rank in a hang, and the program's line that called the framework, or None.

    All ranks must be inside the framework, called from the same line, and in different functions of it.
    """
    if not hung_roots(context):
        return None
    stacks = {rank: rank_stack(snapshot) for rank, snapshot in context.last_snapshot.items()}
    frames = {rank: framework_frames(stack.frames) if stack else () for rank, stack in stacks.items()}
    lines = {user_frame(stack.frames) for stack in stacks.values() if stack}
    phases = {phase_frame(inside) for inside in frames.values() if inside}
    if len(lines) != 1 or not all(frames.values()) or len({phase.function for phase in phases if phase}) < 2:
        return None
    line = lines.pop()
    return (frames, line) if line else None


@rule_if(_inside_framework)
def framework_phase(context: DiagnosisContext, frames: dict[int, tuple[Frame, ...]], line: Frame) -> Explanation:
    """Report the function of a framework that each rank is in, and the program's function that it called last."""
    positions: list[tuple[int, Facts]] = []
    last: list[tuple[int, Facts]] = []
    for rank, inside in frames.items():
        phase = phase_frame(inside) or inside[-1]
        positions.append((rank, {"function": phase.function, "line": place_of(context, None, phase)}))
        callback = _last_callback(context.status_file(rank), line)
        last += [(rank, {"function": callback.function or "", "line": callback})] if callback else []
    return Explanation(
        cause=Cause.FRAMEWORK_PHASE,
        evidence=EvidenceKind.STACKS,
        facts={
            "framework": package_of(next(iter(frames.values()))[0].file),
            "called_at": place_of(context, None, line),
            "positions": ranks_by_facts(positions),
            "last_callbacks": ranks_by_facts(last),
        },
        ranks=tuple(frames),
        place=place_of(context, None, line),
    )


def _last_callback(status_file: StatusFile | None, line: Frame) -> Place | None:
    """Return the program's last recorded line that the framework called, or None.

    It is the line of the latest collective that the program called below `line`, or else the line that called the
    latest module.
    """
    if status_file is None:
        return None
    caller = line.line, line.function.rpartition(".")[2]
    below = (
        call.place
        for call in reversed(status_file.calls)
        if call.place and any((frame.line, frame.function.rpartition(".")[2]) == caller for frame in call.chain[1:])
    )
    modules = [
        status_file.modules[number].place
        for step in status_file.forwards[-1:]
        for number in step.calls
        if number < len(status_file.modules)
    ]
    called = (place for place in reversed(modules) if place is not None)
    return next(below, None) or next(called, None)
