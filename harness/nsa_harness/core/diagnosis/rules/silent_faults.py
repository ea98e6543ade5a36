"""Rules about faults that end no run: numbers that are not finite, replicas that differ, memory that grows.

Their findings are noted with any verdict, even a PASS. Each rule allows for what a program may do on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, takewhile
from statistics import median
from typing import TypeVar

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, layer_of, parameter_place
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, given
from nsa_harness.core.evidence.health_samples import (
    DataWait,
    DroppedBatches,
    GradientArrivals,
    HealthSamples,
    MemorySample,
    OverwrittenFile,
    ParameterBlock,
    Replica,
    ReplicaSample,
    UnawaitedCall,
)
from nsa_harness.core.report import Facts, Place, Status

_BAD_LOSSES = 3  # at the end, in a row: a single broken batch that the program skips does not count
_MIN_GRADIENT_SAMPLES = 4  # fewer samples do not show that a gradient never came
# Memory grows if it rose for at least this many steps and samples, and about as fast in the later half as before.
_GROWTH_STEPS, _GROWTH_SAMPLES = 32, 8
_GROWTH_BYTES, _GROWTH_SHARE = 48 << 20, 0.15
_FEWER_STEPS, _LARGE_SHARE, _STEADY = 20, 0.5, 0.98  # a shorter run has to grow more, and in nearly every sample
_CONTINUES = 0.6  # smallest slope of the later half, as a share of the slope of the earlier half
_RISING = 0.8  # smallest share of pairs of samples of which the later one is larger
# Waiting for data: smallest share of each half of the run; smallest total time; smallest number of steps; and the
# number of first steps that do not count.
_WAITING, _WAITED_S, _WAITED_STEPS, _WARM_STEPS = 0.5, 5.0, 8, 2

Sample = TypeVar("Sample")
ByRank = list[tuple[int, Sample]]


def _samples(context: DiagnosisContext, of: Callable[[HealthSamples], Iterable[Sample]]) -> ByRank[Sample]:
    """Return what `of` takes from the health samples of each rank."""
    return [(rank.rank, sample) for rank in context.evidence.ranks if rank.health for sample in of(rank.health)]


def _any_of(
    of: Callable[[HealthSamples], Iterable[Sample]],
) -> Callable[[DiagnosisContext], tuple[ByRank[Sample]] | None]:
    """Find what `of` takes from the health samples of each rank; None if that is nothing."""

    def find(context: DiagnosisContext) -> tuple[ByRank[Sample]] | None:
        samples = _samples(context, of)
        return (samples,) if samples else None

    return find


def _any_rank(
    matches: Callable[[HealthSamples], object],
) -> Callable[[DiagnosisContext], tuple[ByRank[HealthSamples]] | None]:
    """Find the ranks whose health samples match."""
    return _any_of(lambda looks: [looks] if matches(looks) else [])


def _noted(
    cause: Cause,
    ranks: Iterable[int],
    facts: Facts,
    *,
    place: Place | None = None,
    step: int | None = None,
    evidence: EvidenceKind = EvidenceKind.EFFECT,
    left_open: tuple[OpenQuestion, ...] = (),
) -> Explanation:
    """Return an explanation whose proof is the health samples of these ranks."""
    ranks = tuple(sorted(set(ranks)))
    return Explanation(
        cause=cause,
        evidence=evidence,
        facts=facts,
        ranks=ranks,
        place=place,
        step=step,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
        left_open=left_open,
    )


def _is_broken(looks: HealthSamples) -> bool:
    return looks.non_finite_parameters is not None or (
        looks.non_finite_loss is not None and looks.bad_in_a_row >= _BAD_LOSSES
    )


@given(_any_rank(_is_broken))
def nan(_: DiagnosisContext, broken: ByRank[HealthSamples]) -> Explanation:
    """Parameters are not finite at the end, or the last losses are not finite."""
    losses = {rank: samples.non_finite_loss for rank, samples in broken if samples.non_finite_loss is not None}
    parameters = {
        rank: samples.non_finite_parameters for rank, samples in broken if samples.non_finite_parameters is not None
    }
    # Within a step the loss comes first: its backward pass carries the broken value to the parameters.
    first = min((*losses.values(), *parameters.values()), key=lambda broken_at: broken_at.step)
    by_loss = [rank for rank, loss in losses.items() if loss.step == first.step]
    ranks = by_loss or [rank for rank, broken_at in parameters.items() if broken_at.step == first.step]
    name = next((broken_at.names[0] for broken_at in parameters.values() if broken_at.names), None)
    # Gradients are averaged, so parameters that broke on several ranks at once may have broken on one of them first.
    is_origin_known = bool(first.place) or len(ranks) == 1
    origin = EvidenceKind.RECORD if is_origin_known else EvidenceKind.EFFECT
    return _noted(
        Cause.NAN,
        ranks,
        {
            "variant": "loss" if by_loss else "parameters",
            "value": first.value,
            "other_ranks_broke_later": len(ranks) < len(broken),
            "parameter": name,
        },
        place=first.place or (Place(parameter=name, layer=layer_of(name)) if name else None),
        step=first.step,
        evidence=origin if name else EvidenceKind.PART,
    )


def _divergences(context: DiagnosisContext) -> tuple[list[Divergence]] | None:
    """Find the divergence of each model in each group of ranks, if all ranks of the group have samples of it."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Replica]] = {}
    for rank, replica in _samples(context, lambda looks: looks.replicas):
        groups.setdefault((replica.number, replica.ranks), {})[rank] = replica
    complete = (replicas for (_, members), replicas in groups.items() if set(members) == set(replicas))
    divergences = [match for replicas in complete if (match := first_divergence(replicas)) is not None]
    return (divergences,) if divergences else None


@given(_divergences)
def replica_divergence(_: DiagnosisContext, divergences: Sequence[Divergence]) -> Explanation:
    """Replicas that should be equal, because DDP or the program made them so, differ in the last common sample."""
    first = min(divergences, key=lambda divergence: divergence.round)
    name = first.names[0] if first.names else None
    return _noted(
        Cause.REPLICA_DIVERGENCE,
        first.ranks,
        {
            "in_ddp": first.wrapped,
            "since": first.at,
            "last_step": first.round,
            "identified_by": first.identified_by,
            "parts": first.names,
            "difference": first.difference if math.isfinite(first.difference) else None,
        },
        place=Place(parameter=name, layer=layer_of(name)) if name else None,
        evidence=EvidenceKind.RECORD if first.identified_by and first.wrapped else EvidenceKind.EFFECT,
    )


@given(_any_of(lambda looks: looks.overwritten_files))
def shared_file(_: DiagnosisContext, wrote: ByRank[OverwrittenFile]) -> Explanation | None:
    """Several ranks wrote one file from its beginning, so only one content survives, or several are mixed."""
    writers: dict[str, dict[int, OverwrittenFile]] = {}
    for rank, written in wrote:
        writers.setdefault(written.path, {})[rank] = written
    several = [(path, by_rank) for path, by_rank in writers.items() if len(by_rank) > 1]
    if not several:
        return None
    path, by_rank = several[0]
    return _noted(
        Cause.SHARED_FILE,
        by_rank,
        {"path": path, "more_files": len(several) - 1},
        place=by_rank[min(by_rank)].place,
        evidence=EvidenceKind.PART,
    )


@dataclass(frozen=True, kw_only=True)
class _Growth:
    slope_bytes: float  # per step
    grown_bytes: int
    first_step: int
    last_step: int


def memory_growth(context: DiagnosisContext) -> Explanation | None:
    """Memory grows with the steps until the end, about as fast late in the run as early."""
    kinds: Mapping[str, Callable[[MemorySample], int | None]] = {
        "host": lambda point: point.anonymous_bytes,
        "GPU": lambda point: point.gpu_bytes,
    }
    growing = [
        (rank, kind, growth)
        for kind, of in kinds.items()
        for rank, memory in _samples(context, lambda looks: [looks.memory])
        if (growth := _growth(memory, of)) is not None
    ]
    if not growing:
        return None
    _, kind, most = max(growing, key=lambda entry: entry[2].grown_bytes)
    return _noted(
        Cause.MEMORY_GROWTH,
        [rank for rank, other_kind, _ in growing if other_kind == kind],
        {
            "memory": kind,
            "bytes_per_step": most.slope_bytes,
            "grown_bytes": most.grown_bytes,
            "first_step": most.first_step,
            "last_step": most.last_step,
        },
        evidence=EvidenceKind.PART,
    )


def _growth(memory: Sequence[MemorySample], of: Callable[[MemorySample], int | None]) -> _Growth | None:
    """Return the growth of one rank's memory, or None if it does not grow or levels off."""
    points = [(point.step, amount) for point in memory if (amount := of(point)) is not None]
    last = points[-1][0] if points else 0
    points = [(step, amount) for step, amount in points if step >= last / 8]  # before that, caches and pools fill
    if last < _FEWER_STEPS or len(points) < _GROWTH_SAMPLES:
        return None
    late = [point for point in points if point[0] >= last / 2]
    early = [point for point in points if point[0] <= last / 2]
    if len(late) < 4 or len(early) < 4:
        return None
    slope, before = _slope(late), _slope(early)
    grown = points[-1][1] - points[0][1]
    share, steady = (_GROWTH_SHARE, _RISING) if last >= _GROWTH_STEPS else (_LARGE_SHARE, _STEADY)
    enough = grown >= max(_GROWTH_BYTES, share * points[0][1])
    rising = [b > a for (_, a), (_, b) in combinations(points, 2)]
    if not enough or slope <= 0 or slope < _CONTINUES * before or sum(rising) < steady * len(rising):
        return None
    return _Growth(slope_bytes=slope, grown_bytes=grown, first_step=points[0][0], last_step=last)


def _slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the slope of Theil and Sen: the median over all pairs, which a few outliers do not move."""
    return median((b - a) / (y - x) for (x, a), (y, b) in combinations(points, 2) if y > x)


def input_bound(context: DiagnosisContext) -> Explanation | None:
    """A rank waits for its data loader most of the time, in both halves of the run."""
    waits = {
        rank: wait
        for rank, fetched in _samples(context, lambda looks: [looks.data_waits])
        if (wait := _steady_wait(fetched)) is not None
    }
    if not waits:
        return None
    worst = max(waits, key=lambda rank: waits[rank].waited_s)
    most = waits[worst]
    return _noted(
        Cause.INPUT_BOUND,
        waits,
        {
            "slowest_rank": worst,
            "waited_s": most.waited_s,
            "passed_s": most.elapsed_s,
            "last_step": most.step,
        },
        place=most.place,
        evidence=EvidenceKind.PART,
    )


def _steady_wait(fetched: Sequence[DataWait]) -> DataWait | None:
    """Return how long a rank waited for data after its first steps; None if it waited little or only for a while."""
    points = [point for point in fetched if point.step > _WARM_STEPS]
    if not points or points[-1].step - points[0].step < _WAITED_STEPS:
        return None
    first, last = points[0], points[-1]
    halfway = (first.elapsed_s + last.elapsed_s) / 2
    middle = min(points, key=lambda point: abs(point.elapsed_s - halfway))
    shares = [
        (b.waited_s - a.waited_s) / max(b.elapsed_s - a.elapsed_s, 1e-9) for a, b in pairwise((first, middle, last))
    ]
    waited_s = last.waited_s - first.waited_s
    if waited_s < _WAITED_S or min(shares) < _WAITING:
        return None
    return replace(last, waited_s=waited_s, elapsed_s=last.elapsed_s - first.elapsed_s)


def no_gradient(context: DiagnosisContext) -> Explanation | None:
    """Parameters never have a gradient. The most specific evidence answers: a trace, an optimizer, a backward pass."""
    answers = (rule(context) for rule in (_traced, _never_trained, _trained_by_zeros, _left_zeros, _left_none))
    return next((answer for answer in answers if answer is not None), None)


def _lacking(context: DiagnosisContext) -> tuple[dict[int, tuple[str, ...]]] | None:
    lacking = {rank.rank: rank.traces.missing_parameters for rank in context.evidence.ranks}
    lacking = {rank: names for rank, names in lacking.items() if names}
    return (lacking,) if lacking else None


@given(_lacking)
def _traced(_: DiagnosisContext, lacking: Mapping[int, Sequence[str]]) -> Explanation:
    missing = sorted({name for names in lacking.values() for name in names})
    return Explanation(
        cause=Cause.NO_GRADIENT,
        evidence=EvidenceKind.FACT,
        facts={"variant": "traced", "parameters": missing},
        ranks=tuple(lacking),
        place=parameter_place(missing[0]),
        proof=("traces.log",),
    )


@given(_any_rank(lambda looks: looks.without_gradient_count and looks.sample_count >= _MIN_GRADIENT_SAMPLES))
def _never_trained(_: DiagnosisContext, without: ByRank[HealthSamples]) -> Explanation:
    """An optimizer has parameters whose module ran, but that had a gradient in no sample."""
    names = list(dict.fromkeys(name for _, looks in without for name in looks.without_gradient))
    used = next((looks.without_gradient_place for _, looks in without if looks.without_gradient_place), Place())
    return _noted(
        Cause.NO_GRADIENT,
        [rank for rank, _ in without],
        {
            "variant": "optimizer_has_none",
            "parameters": names,
            "count": max(looks.without_gradient_count for _, looks in without),
        },
        place=parameter_place(names[0], used),
    )


@given(_any_rank(lambda looks: looks.zero_gradient_count and looks.zero_gradient_samples >= _MIN_GRADIENT_SAMPLES))
def _trained_by_zeros(_: DiagnosisContext, still: ByRank[HealthSamples]) -> Explanation:
    """Every gradient of an optimizer was zero in every sample, so its steps change nothing."""
    most = max((looks for _, looks in still), key=lambda looks: looks.zero_gradient_count)
    return _noted(
        Cause.NO_GRADIENT,
        [rank for rank, _ in still],
        {"variant": "optimizer_has_zeros", "count": most.zero_gradient_count, "samples": most.zero_gradient_samples},
    )


def _left_by_backward(
    matches: Callable[[GradientArrivals], object],
) -> Callable[[DiagnosisContext], tuple[list[int], GradientArrivals] | None]:
    """Find the first model whose gradients match after a backward pass, and its ranks.

    Without an optimizer, nothing shows which parameters are meant to be trained. So the probe skips modules that run
    without gradients, and parameters that the program writes itself.
    """

    def find(context: DiagnosisContext) -> tuple[list[int], GradientArrivals] | None:
        models = _samples(context, lambda looks: looks.gradient_arrivals)
        left = [
            (rank, model) for rank, model in models if model.sample_count >= _MIN_GRADIENT_SAMPLES and matches(model)
        ]
        return ([rank for rank, model in left if model.model == left[0][1].model], left[0][1]) if left else None

    return find


@given(_left_by_backward(lambda model: model.zero_gradient_count))
def _left_zeros(_: DiagnosisContext, ranks: Sequence[int], first: GradientArrivals) -> Explanation:
    return _noted(
        Cause.NO_GRADIENT,
        ranks,
        {"variant": "backward_left_zeros", "model": first.model, "samples": first.sample_count},
    )


@given(_left_by_backward(lambda model: model.without_gradient_count))
def _left_none(context: DiagnosisContext, ranks: Sequence[int], first: GradientArrivals) -> Explanation:
    # If every rank leaves out the same part with `detach`, it may be on purpose.
    chosen = set(ranks) == {rank.rank for rank in context.evidence.ranks if rank.health}
    return _noted(
        Cause.NO_GRADIENT,
        ranks,
        {
            "variant": "backward_left_none",
            "parameters": first.without_gradient,
            "count": first.without_gradient_count,
            "model": first.model,
            "samples": first.sample_count,
        },
        evidence=EvidenceKind.OPEN if chosen else EvidenceKind.EFFECT,
        left_open=(OpenQuestion(code="detached_on_purpose"),) if chosen else (),
        place=parameter_place(first.without_gradient[0]) if first.without_gradient else None,
    )


@given(_any_of(lambda looks: looks.unawaited_calls))
def unwaited_collective(_: DiagnosisContext, lines: ByRank[UnawaitedCall]) -> Explanation:
    """A line of the program starts asynchronous collectives, and the program never uses any of their handles."""
    first = lines[0][1]
    return _noted(
        Cause.UNWAITED_COLLECTIVE,
        [rank for rank, line in lines if (line.op, line.place) == (first.op, first.place)],
        {"op": first.op, "calls": first.calls, "more_lines": len({line.place for _, line in lines}) - 1},
        place=first.place,
    )


@given(_any_of(lambda looks: looks.dropped_batches))
def batches_given_up(context: DiagnosisContext, lost: ByRank[DroppedBatches]) -> Explanation | None:
    """The program caught exceptions that ended training passes, and lost the batches of these passes.

    Only ranks that exited with code 0 count: on any other rank the exception may follow from the failure of the run.
    """
    lost = [(rank, batches) for rank, batches in lost if _exited_well(context, rank)]
    if not lost:
        return None
    first = min((batches for _, batches in lost), key=lambda batches: batches.step)
    same_line = [
        (rank, batches) for rank, batches in lost if (batches.type, batches.place) == (first.type, first.place)
    ]
    return _noted(
        Cause.SWALLOWED_EXCEPTION,
        [rank for rank, _ in same_line],
        {
            "variant": "lost_batches",
            "exception": first.type,
            "batches": max(batches.batches for _, batches in same_line),
            "other_exceptions": len({(batches.type, batches.place) for _, batches in lost}) - 1,
        },
        place=first.place,
        step=first.step,
    )


def _exited_well(context: DiagnosisContext, rank: int) -> bool:
    evidence = context.rank(rank)
    return evidence is not None and evidence.exit is not None and evidence.exit.status == 0


@given(_any_of(lambda looks: [model for model in looks.gradient_arrivals if model.unset]))
def uninitialised_parameters(_: DiagnosisContext, unset: ByRank[GradientArrivals]) -> Explanation:
    """Parameters with a gradient had, before the first step, values with which no program starts."""
    first = unset[0][1]
    return _noted(
        Cause.UNINITIALISED_PARAMETERS,
        [rank for rank, _ in unset],
        {
            "parameter": first.unset[0],
            "more_parameters": len(first.unset) - 1,
            "model": first.model,
            "value": first.unset_value,
        },
        place=parameter_place(first.unset[0]),
    )


_EXIT_KINDS = ("atexit", "left", "process group")  # kinds of last messages, the most serious first


def dirty_exit(context: DiagnosisContext) -> Explanation | None:
    """A rank failed at exit or left a resource behind, although every rank exited with code 0."""
    if context.judgement.status is not Status.PASS:
        return None
    messages = [(rank.rank, message) for rank in context.evidence.ranks for message in rank.exit_messages]
    if not messages:
        return None
    rank, first = min(messages, key=lambda entry: _EXIT_KINDS.index(entry[1].kind))
    ranks = tuple(sorted({other for other, message in messages if message.kind == first.kind}))
    return Explanation(
        cause=Cause.DIRTY_EXIT,
        evidence=EvidenceKind.ENDED,
        facts={
            "variant": first.kind,
            "name": first.name,
            "error": first.error,
            "more_messages": len(messages) - len(ranks),
        },
        ranks=ranks,
        place=first.place,
        proof=(f"rank{rank}/stderr.log",),
    )


# Smallest difference that counts, as a share of the parameters' size. Another order of summation causes less.
MATERIAL = 1e-4


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How replicas differ in their last common sample, and since when."""

    ranks: tuple[int, ...]  # ranks that changed what the others did not, or the minority; else all
    identified_by: str  # how these ranks differ from the others: "outside", "extra step", "fewer", "" = they do not
    at: str  # moment of the first sample in which they differ; "before": earlier samples are lost
    round: int
    names: tuple[str, ...]  # of parameters that differ in the last sample
    difference: float  # the largest, as a share of the size
    wrapped: bool  # in DDP


_Moment = tuple[str, int]  # `at` and `round` of a sample


def first_divergence(replicas: Mapping[int, Replica]) -> Divergence | None:
    """Return how the replicas of one model differ, by rank; None if they end equal, or need not be equal."""
    if len(replicas) < 2 or any(replica.hook or replica.names != _any(replicas).names for replica in replicas.values()):
        return None
    looks = {rank: {(look.at, look.round): look for look in replica.samples} for rank, replica in replicas.items()}
    common = [key for key in _moments(replicas) if all(key in by_moment for by_moment in looks.values())]
    if not common or len({replica.samples[-1].round for replica in replicas.values()}) > 1:
        return None
    differing = [key for key in common if len({by_moment[key].checksum for by_moment in looks.values()}) > 1]
    if not differing or differing[-1] != common[-1]:
        return None
    first = list(takewhile(lambda key: key in differing, reversed(common)))[-1]
    names, difference = _difference([replicas[rank] for rank in sorted(replicas)])
    wrapped = all(replica.in_ddp for replica in replicas.values())
    if difference < MATERIAL or not (wrapped or _meant_to_be_equal(replicas, looks, common, differing)):
        return None
    ranks, identified_by = _differing_ranks(looks, common, first)
    return Divergence(
        ranks=ranks,
        identified_by=identified_by,
        at="before" if first == common[0] and first[0] != "made" else first[0],
        round=first[1],
        names=names,
        difference=difference,
        wrapped=wrapped,
    )


def _meant_to_be_equal(
    replicas: Mapping[int, Replica],
    looks: Mapping[int, Mapping[_Moment, ReplicaSample]],
    common: Sequence[_Moment],
    differing: Sequence[_Moment],
) -> bool:
    """Return whether replicas outside DDP are meant to be equal: they were equal up to some step, and never again.

    While they were equal, all parameters were broadcast, or a step changed all replicas in the same way. Equality only
    at the start may come from a common seed. Replicas that become equal again are averaged from time to time, and
    replicas that differ only at the end were changed for an evaluation. Replicas that were never equal are meant to be
    if the program sums every gradient over all ranks.
    """
    equal_moments = common.index(differing[0])
    if len(differing) < len(common) - equal_moments or differing[0][0] == "over":
        return False
    if not equal_moments:
        return len(common) >= _MIN_GRADIENT_SAMPLES and all(replica.reduces_gradients for replica in replicas.values())
    by_moment = next(iter(looks.values()))
    checksums = {by_moment[key].checksum for key in common[:equal_moments]}
    return len(checksums) > 1 or (bool(checksums) and all(replica.was_broadcast for replica in replicas.values()))


def _any(replicas: Mapping[int, Replica]) -> Replica:
    return next(iter(replicas.values()))


def _moments(replicas: Mapping[int, Replica]) -> list[_Moment]:
    """Return the sampled moments of one rank in their order. A moment that came twice counts at its later position."""
    moments = [(look.at, look.round) for look in _any(replicas).samples]
    return list(dict.fromkeys(reversed(moments)))[::-1]


def _differing_ranks(
    looks: Mapping[int, Mapping[_Moment, ReplicaSample]], common: Sequence[_Moment], first: _Moment
) -> tuple[tuple[int, ...], str]:
    """Return the ranks at fault, and how they differ: "outside", "extra step", "fewer" or "".

    Their parameters changed outside a step or in additional steps, or they are the minority; else all ranks count.
    """
    every = tuple(sorted(looks))
    position = common.index(first)
    before = common[position - 1] if position else None
    if before is not None and first[0] == "begun" and before[1] == first[1]:
        changed = [rank for rank in every if looks[rank][before].checksum != looks[rank][first].checksum]
        if 0 < len(changed) < len(every):
            return tuple(changed), "outside"
    if before is not None and first[0] == "stepped":
        taken = {rank: looks[rank][first].steps - looks[rank][before].steps for rank in every}
        pace = {rank: looks[rank][before].steps / before[1] if before[1] else 1.0 for rank in every}
        more = [rank for rank in every if taken[rank] != (first[1] - before[1]) * pace[rank]]
        if 0 < len(more) < len(every):
            return tuple(more), "extra step"
    sums = {rank: looks[rank][first].checksum for rank in every}
    (most, count), *others = Counter(sums.values()).most_common()
    if 2 * count > len(every) and others:
        return tuple(rank for rank in every if sums[rank] != most), "fewer"
    return every, ""


def _difference(replicas: Sequence[Replica]) -> tuple[tuple[str, ...], float]:
    """Return the parts that differ in the last sample, and the largest difference."""
    names: list[str] = []
    largest = 0.0
    for number, (first_name, last_name) in enumerate(replicas[0].names):
        parts = [replica.blocks[number] for replica in replicas if number < len(replica.blocks)]
        if len({part.checksum for part in parts}) > 1:
            names.append(first_name if first_name == last_name else f"{first_name} .. {last_name}")
            largest = max(largest, _relative_difference(parts))
    return tuple(names), largest


def _relative_difference(parts: Sequence[ParameterBlock]) -> float:
    """Return the difference as a share of the parts' size: infinite if only some parts are finite, 0 if none is."""
    finite = [part for part in parts if math.isfinite(part.size) and math.isfinite(part.total)]
    if len(finite) < len(parts):
        return math.inf if finite else 0.0
    size = max(max(part.size for part in parts), 1e-30)
    sizes, totals = [part.size for part in parts], [part.total for part in parts]
    return max(max(sizes) - min(sizes), max(totals) - min(totals)) / size
