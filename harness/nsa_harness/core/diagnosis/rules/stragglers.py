"""A rule about a rank that needs longer for its part of each training step than the other ranks, which wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.diagnosis.rules.silent_faults import input_bound
from nsa_harness.core.evidence.health_samples import StepTimes
from nsa_harness.core.report import Place

_WARM_STEPS = 3  # in these first steps, memory is allocated and libraries are loaded
_MIN_STEPS = 12  # steps after them that must have been measured on every rank
_RATIO = 1.3  # a straggler needs at least this many times as long as the other ranks
_LOST_SHARE = 0.15  # the others wait for a straggler for at least this share of a step
_LOST_S = 0.01  # and for at least this many seconds per step
_STEPS_SHARE = 0.8  # a rank must be slow in this share of the steps; work on some steps, such as saving, does not count
_PHASE_SHARE = 0.7  # a phase that takes this share of the extra time is named
# In a pipeline, the ranks do different work on purpose, and they exchange it with these operations.
_TRANSFERS = frozenset({"batch_isend_irecv", "irecv", "isend", "recv", "send"})

_MIN_LINE_SAMPLES = 12  # samples of the current line, four per second, that every rank must have
_EXCESS = 0.2  # a function is named if its share of the samples is larger by this than on the other ranks

_Function = tuple[str | None, str | None]  # file and name
_ByRank = Mapping[int, StepTimes]


def _steps_of_all_ranks(context: DiagnosisContext) -> tuple[list[_ByRank]] | None:
    """Return the step times of all ranks for each group of steps, or None if there are too few, or in a pipeline."""
    ranks = context.evidence.ranks
    times = {rank.rank: {one.step: one for one in rank.health.step_times} for rank in ranks if rank.health}
    calls = (call.op for rank in ranks if rank.status_file for call in rank.status_file.calls)
    if len(times) < max(2, len(ranks)) or any(op in _TRANSFERS for op in calls):
        return None
    common = set.intersection(*(set(by_step) for by_step in times.values()))
    steps: list[_ByRank] = [
        {rank: times[rank][step] for rank in sorted(times)} for step in sorted(common) if step > _WARM_STEPS
    ]
    return (steps,) if sum(map(_count, steps)) >= _MIN_STEPS else None


def _count(by_rank: _ByRank) -> int:
    return min(one.count for one in by_rank.values())


def _is_slow(by_rank: _ByRank, rank: int) -> bool:
    """Return whether the other ranks wait for `rank` in these steps, because it needs longer for its own part."""
    own, others = by_rank[rank], [one for other, one in by_rank.items() if other != rank]
    usual_s = median(one.max_own_s for one in others)
    lost_s = min(own.min_own_s - usual_s, median(map(_idle_s, others)))
    return own.min_own_s >= _RATIO * usual_s and lost_s >= max(_LOST_SHARE * own.passed_s, _LOST_S)


def _idle_s(times: StepTimes) -> float:
    return times.passed_s - times.max_own_s


@rule_if(_steps_of_all_ranks)
def straggler(context: DiagnosisContext, steps: Sequence[_ByRank]) -> Explanation | None:
    """Report ranks that need longer per step than the others, outside of collectives."""
    total = sum(map(_count, steps))
    ranks = sorted(steps[0])
    slow_steps = {rank: sum(_count(by_rank) for by_rank in steps if _is_slow(by_rank, rank)) for rank in ranks}
    stragglers = [rank for rank in ranks if slow_steps[rank] >= _STEPS_SHARE * total]
    loader = input_bound(context) if stragglers else None
    if not stragglers or (loader is not None and set(stragglers) <= set(loader.ranks)):
        return None  # the finding about the loader says more

    def usual(value: Callable[[StepTimes], float], members: Sequence[int]) -> float:
        """Return the median over the steps of the median over the ranks `members`."""
        return median(
            amount
            for by_rank in steps
            for amount in [median(value(by_rank[rank]) for rank in members)] * _count(by_rank)
        )

    others = [rank for rank in ranks if rank not in stragglers]
    slowest = max(stragglers, key=lambda rank: usual(lambda one: one.min_own_s, [rank]))
    own_s, usual_s = usual(lambda one: one.min_own_s, [slowest]), usual(lambda one: one.max_own_s, others)
    extra = {
        phase: usual(value, [slowest]) - usual(value, others)
        for phase, value in {"loading": lambda one: one.fetching_s, "backward": lambda one: one.backward_s}.items()
    }
    place, share, usual_share = _slow_function(context, slowest, others)
    extra["other"] = own_s - usual_s - sum(extra.values())
    return Explanation(
        cause=Cause.STRAGGLER,
        evidence=EvidenceKind.EFFECT,
        facts={
            "slowest_rank": slowest,
            "own_s": own_s,
            "usual_s": usual_s,
            "ratio": own_s / usual_s if usual_s else None,
            "lost_s": min(own_s - usual_s, usual(_idle_s, others)),
            "step_s": usual(lambda one: one.passed_s, ranks),
            "steps": total,
            "other_ranks": others,
            **(
                {
                    "loop_line": _loop_line(context, place),
                    "percent": 100 * share,
                    "usual_percent": 100 * usual_share,
                }
                if place
                else {}
            ),
            "phase": next((phase for phase, s in extra.items() if s >= _PHASE_SHARE * (own_s - usual_s)), None),
        },
        ranks=tuple(stragglers),
        place=place,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
    )


def _slow_function(context: DiagnosisContext, slowest: int, others: Sequence[int]) -> tuple[Place | None, float, float]:
    """Return the line in whose function the slowest rank spends more of its time than the others.

    Also return the function's share of the samples on this rank, and the median of its shares on the other ranks. The
    line is None if there are too few samples, or if no function stands out.
    """
    health = {rank.rank: rank.health for rank in context.evidence.ranks if rank.health is not None}
    shares: dict[int, dict[_Function, float]] = {}
    for rank in (slowest, *others):
        shares[rank] = defaultdict(float)
        if health[rank].line_samples < _MIN_LINE_SAMPLES:
            return None, 0.0, 0.0
        for line in health[rank].lines:
            shares[rank][line.place.file, line.place.function] += line.count / health[rank].line_samples
    excess = {
        function: share - median(shares[rank][function] for rank in others)
        for function, share in shares[slowest].items()
    }
    function = max(excess, key=lambda function: excess[function])
    if excess[function] < _EXCESS:
        return None, 0.0, 0.0
    lines = [line.place for line in health[slowest].lines if (line.place.file, line.place.function) == function]
    return lines[0], shares[slowest][function], shares[slowest][function] - excess[function]


def _loop_line(context: DiagnosisContext, place: Place | None) -> int | None:
    """Return the line of the innermost loop around the place, or None if there is none in its function."""
    excerpt = context.program.excerpt(place) if place is not None else None
    loops = excerpt.loops_around(place.line) if excerpt and place and place.line else ()
    return loops[0].line if loops else None
