"""The rule about runs that make progress and are too slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, place_of
from nsa_harness.core.diagnosis.explanation import Explanation
from nsa_harness.core.diagnosis.profile import PROFILE_FILE, HotLine, Pace, RankProfile, busiest, pace, profiles
from nsa_harness.core.evidence.evidence import Ending, Frame
from nsa_harness.core.evidence.stacks import is_library, training_stack
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.verdict.motion import BUSY_SHARE
from nsa_harness.core.verdict.wait_graph import wait_graph_between

_ENOUGH_SAMPLES = 30  # with fewer samples, a slow run is not proven to be working
_SAME_WORK_SHARE = 0.6  # two ranks do the same work if they spend more than this share of their time in the same code
_SLOW_STEP_FACTOR = 5  # a step that takes up to this many times the median step still counts as a normal step
_LOOKS = 3  # snapshots that show in which loop a rank stays
_ENDLESS_STEP_FACTOR = 50  # a step that takes more than this many times the median step may be an endless loop


def slow(context: DiagnosisContext) -> Explanation | None:
    """Explain a run that reached its deadline although no rank failed."""
    if context.evidence.ending is not Ending.DEADLINE or context.first_failure is not None:
        return None
    rank_profiles = profiles(context.evidence)
    profile = busiest(rank_profiles)
    is_working = profile is not None and 2 * profile.working >= profile.samples
    if not is_working and (explanation := _explain_delay(context)) is not None:
        return explanation
    place = place_of(context, profile.rank, _code_regions(context, profile)[0].frame) if profile else None
    is_same_work = _is_same_work(context, rank_profiles)
    current_pace = pace(context.evidence)
    may_be_endless = (
        current_pace is not None
        and current_pace.step_s is not None
        and current_pace.running_s > _ENDLESS_STEP_FACTOR * max(current_pace.step_s, 0.1)
    )
    loop = _own_while_loop(context, profile.rank) if may_be_endless and profile else None
    return Explanation(
        cause=Cause.SLOW,
        evidence=_evidence_of_pace(profile, current_pace) if profile and place and is_working else EvidenceKind.CLOCK,
        facts={
            "variant": "working",
            "deadline_s": context.evidence.limits.deadline_s,
            "pace": _pace_facts(current_pace),
            "hot_parts": _hot_region_facts(context, profile) if profile else (),
            "ranks_alike": is_same_work,
            "seldom_at_work": {"samples": profile.working, "of": profile.samples}
            if profile and not is_working
            else None,
            "step_may_never_end": may_be_endless,
            "spends_time_on": "while loop" if loop else _spends_time_on(context, profile),
        },
        ranks=() if profile is None or is_same_work else (profile.rank,),
        place=Place(file=loop.file, line=loop.line, function=loop.function) if loop else place,
        proof=(PROFILE_FILE,) if profile else ("watch.jsonl",),
    )


def _own_while_loop(context: DiagnosisContext, rank: int) -> Frame | None:
    """Return the first line of the innermost `while` loop in which all last stacks of a rank are and no other rank is.

    None if there is no such loop, or no other rank to compare with.
    """
    looks = [one for snapshot in context.evidence.snapshots[-_LOOKS:] for one in snapshot.ranks]
    stacks = [(one.rank, training_stack(one.stacks, one.pid)) for one in looks]
    own = [[*reversed(stack.frames)] for number, stack in stacks if stack is not None and number == rank]
    others = [frame for number, stack in stacks if stack is not None and number != rank for frame in stack.frames]
    common: list[tuple[Frame, ...]] = (
        list(takewhile(_is_one_function, zip(*own, strict=False))) if others and len(own) > 1 else []
    )
    for frames in reversed(common):
        for loop in context.program.loops_around(frames[0]) if not is_library(frames[0].file) else ():
            inside = [frame.file == loop.file and loop.line <= frame.line <= loop.last for frame in (*frames, *others)]
            is_while = (context.program.statement(loop.place) or "").startswith("while")
            if is_while and all(inside[: len(frames)]) and not any(inside[len(frames) :]):
                return replace(frames[0], line=loop.line)
    return None


def _is_one_function(frames: tuple[Frame, ...]) -> bool:
    return len({(frame.file, frame.function) for frame in frames}) == 1


def _spends_time_on(context: DiagnosisContext, profile: RankProfile | None) -> str:
    """Return the activity that takes most of a slow rank's time: "input", "compute", "sleep" or "wait"."""
    if profile is not None and profile.fetching and 2 * profile.fetching >= profile.working:
        return "input"
    if profile is None or profile.cpu_share is None or profile.cpu_share >= BUSY_SHARE:
        return "compute"
    hottest = _code_regions(context, profile)[0].frame
    source = context.program.statement(Place(file=hottest.file, line=hottest.line)) or ""
    return "sleep" if "sleep(" in source else "wait"


def _evidence_of_pace(profile: RankProfile, current_pace: Pace | None) -> EvidenceKind:
    """Return the evidence for a slow run: SAMPLES if there are enough and steps still finish, otherwise OPEN."""
    finishes_steps = (
        current_pace is not None
        and current_pace.step_s is not None
        and current_pace.running_s <= _SLOW_STEP_FACTOR * max(current_pace.step_s, 0.1)
    )
    return EvidenceKind.SAMPLES if finishes_steps and profile.samples >= _ENOUGH_SAMPLES else EvidenceKind.OPEN


def _explain_delay(context: DiagnosisContext) -> Explanation | None:
    """Explain a slow run whose last snapshots show that most ranks wait for one rank that is blocked itself."""
    snapshots = context.evidence.snapshots[-2:]
    graph = wait_graph_between(snapshots[0], snapshots[-1], (), context.evidence.backend) if snapshots else None
    if graph is None or graph.has_progress or not 0 < len(graph.roots) < len(graph.waits):
        return None
    root = graph.roots[0]
    return Explanation(
        cause=Cause.SLOW,
        evidence=EvidenceKind.CLOCK,
        facts={
            "variant": "held up",
            "deadline_s": context.evidence.limits.deadline_s,
            "pace": _pace_facts(pace(context.evidence)),
            "blocked_in": root.blocked_in,
        },
        ranks=tuple(sorted(wait.rank for wait in graph.roots)),
        place=place_of(context, root.rank, (root.child.deepest.user_frame if root.child else None) or root.user_frame),
        proof=(PROFILE_FILE,),
    )


def _pace_facts(current_pace: Pace | None) -> Facts | None:
    if current_pace is None:
        return None
    return {
        "steps_done": current_pace.steps_done,
        "step_s": current_pace.step_s,
        "left_s": current_pace.left_s,
        "steps_planned": current_pace.steps_planned,
    }


@dataclass(frozen=True, kw_only=True)
class _CodeRegion:
    """A loop, or the code of a function outside its loops, for which stack samples are counted."""

    frame: Frame  # the line of the region with most samples
    loop_line: int | None  # line of the `for` or `while`; None: code outside loops, or no source code
    sample_count: int


def _code_regions(context: DiagnosisContext, profile: RankProfile) -> list[_CodeRegion]:
    """Return the regions of the program's code that the samples show, those with the most samples first."""
    lines_by_region: dict[tuple[str, str, int | None], list[HotLine]] = {}
    for line in profile.lines:
        loop = context.program.loop_line(line.frame)
        lines_by_region.setdefault((line.frame.file, line.frame.function, loop), []).append(line)
    regions = (
        _CodeRegion(frame=lines[0].frame, loop_line=loop, sample_count=sum(line.sample_count for line in lines))
        for (_, _, loop), lines in lines_by_region.items()
    )
    return sorted(regions, key=lambda part: -part.sample_count)


def _is_same_work(context: DiagnosisContext, rank_profiles: Sequence[RankProfile]) -> bool:
    """Return whether all ranks spent their time in the same regions of code."""
    if not len(rank_profiles) == len(context.evidence.ranks) > 1 or any(
        2 * profile.computing < profile.samples for profile in rank_profiles
    ):
        return False
    shares = [
        {
            (region.frame.file, region.frame.function, region.loop_line): region.sample_count / profile.working
            for region in _code_regions(context, profile)
        }
        for profile in rank_profiles
    ]
    return all(
        sum(min(share, shares[0].get(region, 0.0)) for region, share in shares_of_rank.items()) > _SAME_WORK_SHARE
        for shares_of_rank in shares
    )


def _hot_region_facts(context: DiagnosisContext, profile: RankProfile) -> tuple[Facts, ...]:
    """Return facts about the two regions of the program's code with the most samples."""
    return tuple(
        {
            "function": region.frame.function,
            "line": Place(file=region.frame.file, line=region.frame.line),
            "loop_line": region.loop_line,
            "samples": region.sample_count,
            "of": profile.working,
        }
        for region in _code_regions(context, profile)[:2]
    )
