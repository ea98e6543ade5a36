"""Rules about faults that do not end a run, such as NaN values, diverging replicas and growing memory.

Their findings are reported with any verdict, even a PASS. Each rule ignores what a program may do on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, layer_of, parameter_place
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, rule_if
from nsa_harness.core.diagnosis.sample_findings import (
    MIN_GRADIENT_SAMPLES,
    ByRank,
    Sample,
    explain_samples,
    samples_by_rank,
)
from nsa_harness.core.evidence.health_samples import (
    DataWait,
    DroppedBatches,
    GradientArrivals,
    HealthSamples,
    MemorySample,
    OverwrittenFile,
    UnawaitedCall,
)
from nsa_harness.core.report import Place, Status

_BAD_LOSSES = (
    3  # this many losses in a row, up to the end of the run, must be NaN or infinite; one bad batch does not count
)
_GROWTH_SAMPLES = 8  # memory growth needs at least this many samples
_GROWTH_BYTES = 48 << 20  # smallest growth that is reported
_GROWTH_STEPS, _GROWTH_SHARE = 32, 0.15  # a run with this many steps must grow by this share of its first sample
# A run with fewer steps, but at least _FEWER_STEPS, must grow by _LARGE_SHARE, and in nearly all pairs of samples.
_FEWER_STEPS, _LARGE_SHARE, _STEADY = 20, 0.5, 0.98
_CONTINUES = 0.6  # memory must grow at least this fast in the second half of a run, relative to the first half
_RISING = 0.8  # in at least this share of all pairs of samples, the later sample must be larger
_WAITING = 0.5  # a rank must wait for data in at least this share of each half of the run
_WAITED_S = 5.0  # a rank must wait for data for at least this many seconds in total
_WAITED_STEPS = 8  # waits for data are only judged over at least this many steps
_WARM_STEPS = 2  # waits for data in these first steps do not count


def _with_samples(
    values_of: Callable[[HealthSamples], Iterable[Sample]],
) -> Callable[[DiagnosisContext], tuple[ByRank[Sample]] | None]:
    """Return a function for `@rule_if` that extracts values from the health samples of all ranks.

    It returns None if `values_of` yields no values.
    """

    def find(context: DiagnosisContext) -> tuple[ByRank[Sample]] | None:
        samples = samples_by_rank(context, values_of)
        return (samples,) if samples else None

    return find


def _with_ranks(
    matches: Callable[[HealthSamples], object],
) -> Callable[[DiagnosisContext], tuple[ByRank[HealthSamples]] | None]:
    """Return a function for `@rule_if` that finds the ranks whose health samples satisfy `matches`."""
    return _with_samples(lambda samples: [samples] if matches(samples) else [])


def _is_not_finite(samples: HealthSamples) -> bool:
    """Return whether the rank's parameters or last losses are NaN or infinite."""
    return samples.non_finite_parameters is not None or (
        samples.non_finite_loss is not None and samples.bad_in_a_row >= _BAD_LOSSES
    )


@rule_if(_with_ranks(_is_not_finite))
def nan(_: DiagnosisContext, broken_ranks: ByRank[HealthSamples]) -> Explanation:
    """Report that parameters or losses were NaN or infinite at the end of a run.

    The ranks at fault are those on which a value first became NaN or infinite.
    """
    losses = {rank: samples.non_finite_loss for rank, samples in broken_ranks if samples.non_finite_loss is not None}
    parameters = {
        rank: samples.non_finite_parameters
        for rank, samples in broken_ranks
        if samples.non_finite_parameters is not None
    }
    # Within a step, the loss comes first: its backward pass carries the value to the parameters.
    first_value = min((*losses.values(), *parameters.values()), key=lambda broken_at: broken_at.step)
    ranks_by_loss = [rank for rank, loss in losses.items() if loss.step == first_value.step]
    ranks = ranks_by_loss or [rank for rank, broken_at in parameters.items() if broken_at.step == first_value.step]
    name = next((broken_at.names[0] for broken_at in parameters.values() if broken_at.names), None)
    # Gradients are averaged over ranks, so one rank may have made the parameters of several ranks non-finite.
    is_origin_known = bool(first_value.place) or len(ranks) == 1
    evidence = EvidenceKind.RECORD if is_origin_known else EvidenceKind.EFFECT
    return explain_samples(
        Cause.NAN,
        ranks,
        {
            "variant": "loss" if ranks_by_loss else "parameters",
            "value": first_value.value,
            "other_ranks_broke_later": len(ranks) < len(broken_ranks),
            "parameter": name,
        },
        place=first_value.place or (Place(parameter=name, layer=layer_of(name)) if name else None),
        step=first_value.step,
        evidence=evidence if name else EvidenceKind.PART,
    )


@rule_if(_with_samples(lambda samples: samples.overwritten_files))
def shared_file(_: DiagnosisContext, files: ByRank[OverwrittenFile]) -> Explanation | None:
    """Report a file that several ranks wrote, overwriting each other's contents."""
    writers: dict[str, dict[int, OverwrittenFile]] = {}
    for rank, file in files:
        writers.setdefault(file.path, {})[rank] = file
    shared_files = [(path, by_rank) for path, by_rank in writers.items() if len(by_rank) > 1]
    if not shared_files:
        return None
    path, by_rank = shared_files[0]
    return explain_samples(
        Cause.SHARED_FILE,
        by_rank,
        {"path": path, "more_files": len(shared_files) - 1},
        place=by_rank[min(by_rank)].place,
        evidence=EvidenceKind.PART,
    )


@dataclass(frozen=True, kw_only=True)
class _Growth:
    slope_bytes: float  # bytes per step
    grown_bytes: int
    first_step: int
    last_step: int


def memory_growth(context: DiagnosisContext) -> Explanation | None:
    """Report memory use that keeps growing from step to step until the end of the run."""
    memory_kinds: Mapping[str, Callable[[MemorySample], int | None]] = {
        "host": lambda point: point.anonymous_bytes,
        "GPU": lambda point: point.gpu_bytes,
    }
    growing = [
        (rank, kind, growth)
        for kind, bytes_of in memory_kinds.items()
        for rank, memory in samples_by_rank(context, lambda samples: [samples.memory])
        if (growth := _memory_growth_of(memory, bytes_of)) is not None
    ]
    if not growing:
        return None
    _, kind, largest = max(growing, key=lambda entry: entry[2].grown_bytes)
    return explain_samples(
        Cause.MEMORY_GROWTH,
        [rank for rank, other_kind, _ in growing if other_kind == kind],
        {
            "memory": kind,
            "bytes_per_step": largest.slope_bytes,
            "grown_bytes": largest.grown_bytes,
            "first_step": largest.first_step,
            "last_step": largest.last_step,
        },
        evidence=EvidenceKind.PART,
    )


def _memory_growth_of(memory: Sequence[MemorySample], bytes_of: Callable[[MemorySample], int | None]) -> _Growth | None:
    """Return the growth of one rank's memory use, or None if it does not grow steadily.

    `bytes_of` returns the host or GPU memory of a sample. The growth must continue in the later half of the run at
    about the rate of the earlier half.
    """
    points = [(point.step, amount) for point in memory if (amount := bytes_of(point)) is not None]
    last = points[-1][0] if points else 0
    points = [
        (step, amount) for step, amount in points if step >= last / 8
    ]  # in the first eighth, caches and memory pools fill
    if last < _FEWER_STEPS or len(points) < _GROWTH_SAMPLES:
        return None
    late_points = [point for point in points if point[0] >= last / 2]
    early_points = [point for point in points if point[0] <= last / 2]
    if len(late_points) < 4 or len(early_points) < 4:
        return None
    slope, early_slope = _slope(late_points), _slope(early_points)
    grown_bytes = points[-1][1] - points[0][1]
    share, steady = (_GROWTH_SHARE, _RISING) if last >= _GROWTH_STEPS else (_LARGE_SHARE, _STEADY)
    is_large = grown_bytes >= max(_GROWTH_BYTES, share * points[0][1])
    rises = [b > a for (_, a), (_, b) in combinations(points, 2)]
    if not is_large or slope <= 0 or slope < _CONTINUES * early_slope or sum(rises) < steady * len(rises):
        return None
    return _Growth(slope_bytes=slope, grown_bytes=grown_bytes, first_step=points[0][0], last_step=last)


def _slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the median slope, in bytes per step, over all pairs of points (the Theil-Sen estimator)."""
    return median((b - a) / (y - x) for (x, a), (y, b) in combinations(points, 2) if y > x)


def input_bound(context: DiagnosisContext) -> Explanation | None:
    """Report ranks that spend most of their time waiting for the data loader."""
    waits = {
        rank: wait
        for rank, data_waits in samples_by_rank(context, lambda samples: [samples.data_waits])
        if (wait := _steady_wait(data_waits)) is not None
    }
    if not waits:
        return None
    slowest_rank = max(waits, key=lambda rank: waits[rank].waited_s)
    longest = waits[slowest_rank]
    return explain_samples(
        Cause.INPUT_BOUND,
        waits,
        {
            "slowest_rank": slowest_rank,
            "waited_s": longest.waited_s,
            "passed_s": longest.elapsed_s,
            "last_step": longest.step,
        },
        place=longest.place,
        evidence=EvidenceKind.PART,
    )


def _steady_wait(data_waits: Sequence[DataWait]) -> DataWait | None:
    """Return the total time that a rank waited for data after its first steps, or None if it is negligible.

    Also None if it is a small share of the first or second half of the run.
    """
    points = [point for point in data_waits if point.step > _WARM_STEPS]
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
    """Report parameters that never received a gradient.

    Traces show this best, then the gradients at optimizer steps, then the gradients after backward passes.
    """
    explanations = (
        rule(context)
        for rule in (
            _no_gradient_in_traces,
            _no_gradient_in_optimizer,
            _zero_gradients_in_optimizer,
            _zero_gradients_after_backward,
            _no_gradient_after_backward,
        )
    )
    return next((explanation for explanation in explanations if explanation is not None), None)


def _missing_in_traces(context: DiagnosisContext) -> tuple[dict[int, tuple[str, ...]]] | None:
    """Map each rank to the parameters that have no gradient in its traces. Return None if there are none."""
    lacking = {rank.rank: rank.traces.missing_parameters for rank in context.evidence.ranks}
    lacking = {rank: names for rank, names in lacking.items() if names}
    return (lacking,) if lacking else None


@rule_if(_missing_in_traces)
def _no_gradient_in_traces(_: DiagnosisContext, missing_by_rank: Mapping[int, Sequence[str]]) -> Explanation:
    """Report parameters that received no gradient according to the traces."""
    names = sorted({name for names in missing_by_rank.values() for name in names})
    return Explanation(
        cause=Cause.NO_GRADIENT,
        evidence=EvidenceKind.FACT,
        facts={"variant": "traced", "parameters": names},
        ranks=tuple(missing_by_rank),
        place=parameter_place(names[0]),
        proof=("traces.log",),
    )


@rule_if(_with_ranks(lambda samples: samples.without_gradient_count and samples.sample_count >= MIN_GRADIENT_SAMPLES))
def _no_gradient_in_optimizer(_: DiagnosisContext, ranks_without: ByRank[HealthSamples]) -> Explanation:
    """Report parameters of an optimizer that never had a gradient, although their module was called."""
    names = list(dict.fromkeys(name for _, samples in ranks_without for name in samples.without_gradient))
    cut = next((samples for _, samples in ranks_without if samples.gradient_cut_place), None)
    module_place = next(
        (samples.without_gradient_place for _, samples in ranks_without if samples.without_gradient_place), Place()
    )
    return explain_samples(
        Cause.NO_GRADIENT,
        [rank for rank, _ in ranks_without],
        {
            "variant": "gathered_without_gradient" if cut else "optimizer_has_none",
            "parameters": names,
            "count": max(samples.without_gradient_count for _, samples in ranks_without),
            **({"collective": cut.gradient_cut_op} if cut else {}),
        },
        place=parameter_place(names[0], (cut.gradient_cut_place if cut else None) or module_place),
    )


@rule_if(
    _with_ranks(lambda samples: samples.zero_gradient_count and samples.zero_gradient_samples >= MIN_GRADIENT_SAMPLES)
)
def _zero_gradients_in_optimizer(_: DiagnosisContext, ranks_with_zeros: ByRank[HealthSamples]) -> Explanation:
    """Report an optimizer whose gradients were always zero."""
    largest = max((samples for _, samples in ranks_with_zeros), key=lambda samples: samples.zero_gradient_count)
    return explain_samples(
        Cause.NO_GRADIENT,
        [rank for rank, _ in ranks_with_zeros],
        {
            "variant": "optimizer_has_zeros",
            "count": largest.zero_gradient_count,
            "samples": largest.zero_gradient_samples,
        },
    )


def _with_model_after_backward(
    matches: Callable[[GradientArrivals], object],
) -> Callable[[DiagnosisContext], tuple[list[int], GradientArrivals] | None]:
    """Return a function for `@rule_if` that finds a model whose gradients after backward satisfy `matches`.

    These samples are for programs without an optimizer. Nothing shows there which parameters are meant to be trained,
    so the probe skips modules that run without gradients and parameters that the program writes itself.
    """

    def find(context: DiagnosisContext) -> tuple[list[int], GradientArrivals] | None:
        models = samples_by_rank(context, lambda samples: samples.gradient_arrivals)
        matching = [
            (rank, model) for rank, model in models if model.sample_count >= MIN_GRADIENT_SAMPLES and matches(model)
        ]
        return (
            ([rank for rank, model in matching if model.model == matching[0][1].model], matching[0][1])
            if matching
            else None
        )

    return find


@rule_if(_with_model_after_backward(lambda model: model.zero_gradient_count))
def _zero_gradients_after_backward(_: DiagnosisContext, ranks: Sequence[int], first: GradientArrivals) -> Explanation:
    """Report a model whose gradients were zero after every sampled backward pass."""
    return explain_samples(
        Cause.NO_GRADIENT,
        ranks,
        {"variant": "backward_left_zeros", "model": first.model, "samples": first.sample_count},
    )


@rule_if(_with_model_after_backward(lambda model: model.without_gradient_count))
def _no_gradient_after_backward(
    context: DiagnosisContext, ranks: Sequence[int], first: GradientArrivals
) -> Explanation:
    """Report parameters that had no gradient after any sampled backward pass."""
    # If every rank excludes the same parameters with `detach`, the program may do so on purpose.
    on_every_rank = set(ranks) == {rank.rank for rank in context.evidence.ranks if rank.health}
    return explain_samples(
        Cause.NO_GRADIENT,
        ranks,
        {
            "variant": "backward_left_none",
            "parameters": first.without_gradient,
            "count": first.without_gradient_count,
            "model": first.model,
            "samples": first.sample_count,
        },
        evidence=EvidenceKind.OPEN if on_every_rank else EvidenceKind.EFFECT,
        left_open=(OpenQuestion(code="detached_on_purpose"),) if on_every_rank else (),
        place=parameter_place(first.without_gradient[0]) if first.without_gradient else None,
    )


@rule_if(_with_samples(lambda samples: samples.unawaited_calls))
def unwaited_collective(_: DiagnosisContext, calls: ByRank[UnawaitedCall]) -> Explanation:
    """Report asynchronous collectives that the program starts but never waits for."""
    first = calls[0][1]
    return explain_samples(
        Cause.UNWAITED_COLLECTIVE,
        [rank for rank, call in calls if (call.op, call.place) == (first.op, first.place)],
        {"op": first.op, "calls": first.calls, "more_lines": len({call.place for _, call in calls}) - 1},
        place=first.place,
    )


@rule_if(_with_samples(lambda samples: samples.dropped_batches))
def batches_given_up(context: DiagnosisContext, losses: ByRank[DroppedBatches]) -> Explanation | None:
    """Report batches that were lost because the program caught an exception while training on them.

    Only ranks that exited with code 0 count, because on other ranks the exception may follow from the failure of the
    run.
    """
    losses = [(rank, batches) for rank, batches in losses if _exited_with_0(context, rank)]
    if not losses:
        return None
    first = min((batches for _, batches in losses), key=lambda batches: batches.step)
    same_line = [
        (rank, batches) for rank, batches in losses if (batches.type, batches.place) == (first.type, first.place)
    ]
    return explain_samples(
        Cause.SWALLOWED_EXCEPTION,
        [rank for rank, _ in same_line],
        {
            "variant": "lost_batches",
            "exception": first.type,
            "batches": max(batches.batches for _, batches in same_line),
            "other_exceptions": len({(batches.type, batches.place) for _, batches in losses}) - 1,
        },
        place=first.place,
        step=first.step,
    )


def _exited_with_0(context: DiagnosisContext, rank: int) -> bool:
    evidence = context.rank(rank)
    return evidence is not None and evidence.exit is not None and evidence.exit.status == 0


@rule_if(_with_samples(lambda samples: [model for model in samples.gradient_arrivals if model.unset]))
def uninitialised_parameters(_: DiagnosisContext, models: ByRank[GradientArrivals]) -> Explanation:
    """Report trained parameters whose initial values look like uninitialized memory."""
    first = models[0][1]
    return explain_samples(
        Cause.UNINITIALISED_PARAMETERS,
        [rank for rank, _ in models],
        {
            "parameter": first.unset[0],
            "more_parameters": len(first.unset) - 1,
            "model": first.model,
            "value": first.unset_value,
        },
        place=parameter_place(first.unset[0]),
    )


_EXIT_KINDS = ("atexit", "left", "process group")  # kinds of messages at exit, most serious first


def dirty_exit(context: DiagnosisContext) -> Explanation | None:
    """Report an error or an unreleased resource at the exit of a run that passed."""
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
