"""Decide whether a program is ready for production, based on a checklist of runs and required numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from nsa_harness.core.comparison.severity import severity, silent_faults
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.rules.replicas import complete_replicas, first_divergence
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.experiment.checklist import Checklist, ChecklistPhase, Criterion, PlannedRun
from nsa_harness.core.report import Finding, MachineFacts, Outcome, Place, Severity, Status
from nsa_harness.core.scenario.resolve import gpus_text
from nsa_harness.core.schedule import is_as_expected


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured number, with its 95 % confidence interval if it comes from a fit."""

    value: float
    low: float | None = None
    high: float | None = None


Measurements = Mapping[str, Measurement]  # the numbers of one run by metric name


def expected_s(steps: Sequence[int], outcomes: Sequence[Outcome]) -> float | None:
    """Return the expected total time of several runs in seconds, or None if it cannot be estimated."""
    training_runs = [
        (outcome, outcome.metrics["step_s_median"], outcome.metrics["steps"])
        for outcome in outcomes
        if {"step_s_median", "optimizer_s"} <= set(outcome.metrics)
    ]
    if not training_runs:
        return None
    step_s = median(run_step_s for _, run_step_s, _ in training_runs)
    start_up_s = median(
        max(outcome.timing.wall_s - run_step_s * steps_done, 0.0) for outcome, run_step_s, steps_done in training_runs
    )
    return sum(start_up_s + step_s * count for count in steps)


_PLANNED_METRICS = frozenset({"planned_memory_share", "planned_gpu_bytes"})
EVIDENCE_METRICS = _PLANNED_METRICS | {"memory_slope_bytes", "gpu_slope_bytes", "replicas_apart", "replica_looks"}


def numbers_of(outcome: Outcome, evidence: Evidence | None) -> dict[str, Measurement]:
    """Return the measured numbers of a run by name. `evidence` is None if no criterion needs it."""
    usage = {"peak_gpu_bytes": outcome.usage.peak_gpu_bytes, "peak_rss_bytes": outcome.usage.peak_rss_bytes}
    values = {**outcome.metrics, **{name: value for name, value in usage.items() if value is not None}}
    numbers = {name: Measurement(value=float(value)) for name, value in values.items()}
    return {**numbers, **(_evidence_measurements(evidence) if evidence else {})}


def _evidence_measurements(evidence: Evidence) -> dict[str, Measurement]:
    checks = [rank.health for rank in evidence.ranks if rank.health is not None]
    host_fits = [slope([(sample.step, sample.anonymous_bytes) for sample in check.memory]) for check in checks]
    device_fits = [
        slope([(sample.step, sample.gpu_bytes) for sample in check.memory if sample.gpu_bytes]) for check in checks
    ]
    host = evidence.memory
    limits = [limit for limit in (host.total_bytes, host.limit_bytes) if limit] if host else []
    numbers: dict[str, Measurement] = {"memory_bytes": Measurement(value=float(min(limits)))} if limits else {}
    for name, fits in (("memory_slope_bytes", host_fits), ("gpu_slope_bytes", device_fits)):
        if fits and None not in fits:
            numbers[name] = max((fit for fit in fits if fit is not None), key=lambda fit: fit.high or fit.value)
    replicas = [
        (rank.rank, replica)
        for rank in evidence.ranks
        for replica in (rank.health.replicas if rank.health else ())
        if len(replica.ranks) > 1 and not replica.kind
    ]
    complete = list(complete_replicas(replicas))
    if complete:
        diverged_count = sum(first_divergence(replica_by_rank) is not None for replica_by_rank in complete)
        fewest = min(len(replica.samples) for replica_by_rank in complete for replica in replica_by_rank.values())
        numbers |= {
            "replicas_apart": Measurement(value=float(diverged_count)),
            "replica_looks": Measurement(value=float(fewest)),
        }
    return numbers


def planned_numbers(planned: PlannedRun, outcome: Outcome, numbers: Measurements) -> dict[str, Measurement]:
    """Return the memory at the end of the planned run, if memory keeps growing at the measured rate."""
    steps = planned.steps or numbers.get("steps", Measurement(value=0.0)).value
    ranks_per_node = math.ceil((planned.ranks or outcome.spec.ranks) / planned.nodes)
    result = {}
    if "memory_bytes" in numbers and (host := _at_end(numbers, "peak_rss_bytes", "memory_slope_bytes", steps)):
        result["planned_memory_share"] = _scaled(host, ranks_per_node / numbers["memory_bytes"].value)
    if device := _at_end(numbers, "peak_gpu_bytes", "gpu_slope_bytes", steps):
        result["planned_gpu_bytes"] = device
    return result


def _at_end(numbers: Measurements, peak: str, rise: str, steps: float) -> Measurement | None:
    """Return the peak plus the growth over `steps`, or None if one of the two numbers is missing."""
    if peak not in numbers or rise not in numbers:
        return None
    base, growth = numbers[peak].value, numbers[rise]
    # Memory that shrinks in the measured steps is not counted: the peak was reached all the same.
    ends = [None if value is None else base + max(value, 0.0) * steps for value in (growth.low, growth.high)]
    return Measurement(value=base + max(growth.value, 0.0) * steps, low=ends[0], high=ends[1])


def _scaled(number: Measurement, factor: float) -> Measurement:
    low, high = (None if value is None else value * factor for value in (number.low, number.high))
    return Measurement(value=number.value * factor, low=low, high=high)


_WARM_UP = 0.25  # this share of the steps is ignored, because a program makes one-time allocations in them
# Memory grows in jumps, so single samples are not independent. The means of this many blocks of samples nearly are.
_BLOCKS = 8
_SAMPLES_PER_BLOCK = 2
_STUDENT = 2.447  # 95 % quantile with _BLOCKS - 2 degrees of freedom


def slope(points: Sequence[tuple[int, int]]) -> Measurement | None:
    """Return the slope of (step, amount) points with its 95 % interval, or None if there are too few points."""
    last = points[-1][0] if points else 0
    used_points = [point for point in points if point[0] > last * _WARM_UP]
    if len(used_points) < _BLOCKS * _SAMPLES_PER_BLOCK:
        return None
    edges = [round(number * len(used_points) / _BLOCKS) for number in range(_BLOCKS + 1)]
    blocks = [used_points[begin:end] for begin, end in pairwise(edges)]
    xs = [fmean(step for step, _ in block) for block in blocks]
    ys = [fmean(amount for _, amount in block) for block in blocks]
    x, y = fmean(xs), fmean(ys)
    spread = sum((block_x - x) ** 2 for block_x in xs)
    rise = sum((block_x - x) * (block_y - y) for block_x, block_y in zip(xs, ys, strict=True)) / spread
    rest = sum((block_y - y - rise * (block_x - x)) ** 2 for block_x, block_y in zip(xs, ys, strict=True))
    half = _STUDENT * math.sqrt(rest / (_BLOCKS - 2) / spread)
    return Measurement(value=rise, low=rise - half, high=rise + half)


class CriterionResult(StrEnum):
    """The result of a criterion or a phase of a readiness checklist."""

    MET = "met"
    MISSED = "missed"
    OPEN = "open"  # this machine can test it, but the runs so far do not decide it
    NOT_TESTED = "not tested"  # this machine cannot test it
    NOT_REACHED = "not reached"  # an earlier phase that it needs was not met


@dataclass(frozen=True, kw_only=True)
class FailureReason:
    """The reason why a run did not end as expected, with advice and the next command to run."""

    run: str
    verdict: str
    cause: str | None
    sentence: str
    place: Place | None
    advice: str
    next: str | None  # the command to run next


@dataclass(frozen=True, kw_only=True)
class CriterionRow:
    """A criterion of a readiness checklist with its measured number and its result."""

    name: str
    result: CriterionResult
    metric: str
    unit: str
    limit: tuple[tuple[str, float], ...]  # pairs of operator and limit, such as ("lt", 30e9)
    measured: Measurement | None
    margin: float | None  # distance of the number to its limit, as a share of the limit; negative if it is missed
    run: str | None  # the run whose number counts: the one with the worst margin
    dir: str | None  # the directory of that run
    repeat: str | None  # the command that repeats that run
    why: str = ""  # why nothing was measured, or which runs were compared
    blame: FailureReason | None = None


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run of a readiness check, with its verdict."""

    scenario: str
    verdict: str
    cause: str | None
    as_it_should: bool  # it ended as its scenario expects, is not flaky, and has no fault that is not accepted
    dir: str
    wall_s: float
    repeat: str | None
    blame: FailureReason | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """A phase of a readiness check, with its result and its runs."""

    name: str
    about: str
    result: CriterionResult
    why: str  # why it failed, was not reached, or is open; "" if it is met
    runs: tuple[RunRow, ...]


class Decision(StrEnum):
    """The decision on whether a program can go into production."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, kw_only=True)
class Untested:
    """A check that could not be run on this machine, with the reason."""

    what: str  # a criterion, a run, or a part of the program
    why: str


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The decision of a readiness check, with the results of all its criteria and phases."""

    decision: Decision
    criteria: tuple[CriterionRow, ...]
    phases: tuple[PhaseRow, ...]
    not_tested: tuple[Untested, ...]


@dataclass(frozen=True, kw_only=True)
class PhaseRuns:
    """The finished runs of a phase, and the names of all its runs."""

    names: tuple[str, ...]  # the names of all its runs
    outcomes: tuple[Outcome, ...] = ()  # the final outcome of each finished run
    numbers: Mapping[str, Measurements] = field(default_factory=dict)  # the measured numbers by run name


def unmet_need(results: Mapping[str, CriterionResult], phase: ChecklistPhase) -> str:
    """Return why a phase must be skipped, given the results of the earlier phases by name, or "" if it can run."""
    for need in phase.needs:
        if results.get(need) is not CriterionResult.MET:
            return f"{need} {_NOT_MET[results.get(need, CriterionResult.OPEN)]}"
    return ""


_NOT_MET = {
    CriterionResult.MISSED: "failed",
    CriterionResult.OPEN: "is not decided",
    CriterionResult.NOT_TESTED: "cannot run here",
    CriterionResult.NOT_REACHED: "was not reached",
}


def judge_checklist(checklist: Checklist, runs_of_phases: Sequence[PhaseRuns], facts: MachineFacts) -> Readiness:
    """Decide whether a program is ready for production, based on the runs of each phase so far."""
    outcomes = {outcome.spec.scenario: outcome for phase_runs in runs_of_phases for outcome in phase_runs.outcomes}
    numbers = {
        run: {**run_numbers, **planned_numbers(checklist.planned, outcomes[run], run_numbers)}
        for phase_runs in runs_of_phases
        for run, run_numbers in phase_runs.numbers.items()
    }
    names = [name for phase_runs in runs_of_phases for name in phase_runs.names]
    rows = tuple(
        _criterion_row(name, criterion, [*filter(criterion.bounds_run, names)], numbers, outcomes, facts)
        for name, criterion in checklist.criteria.items()
    )
    results: dict[str, CriterionResult] = {}
    phases = []
    for phase, phase_runs in zip(checklist.phases, runs_of_phases, strict=True):
        row = _phase_row(checklist, phase, phase_runs, rows, unmet_need(results, phase))
        results[phase.name] = row.result
        phases.append(row)
    return Readiness(
        decision=_decision(rows, phases),
        criteria=rows,
        phases=tuple(phases),
        not_tested=(
            *_not_tested(rows, runs_of_phases, facts),
            *_beyond_the_runs(checklist.planned, [*outcomes.values()], facts),
        ),
    )


def _decision(rows: Sequence[CriterionRow], phases: Sequence[PhaseRow]) -> Decision:
    results = [*(row.result for row in rows), *(row.result for row in phases)]
    if CriterionResult.MISSED in results:
        return Decision.NO_GO
    if CriterionResult.OPEN in results or CriterionResult.NOT_REACHED in results:
        return Decision.UNDECIDED
    # If no phase passed, there is no evidence for GO.
    return Decision.GO if CriterionResult.MET in (row.result for row in phases) else Decision.UNDECIDED


def _phase_row(
    checklist: Checklist, phase: ChecklistPhase, phase_runs: PhaseRuns, rows: Sequence[CriterionRow], unmet_need: str
) -> PhaseRow:
    runs = tuple(_run_row(checklist, outcome) for outcome in phase_runs.outcomes)
    result, why = _phase_result(phase_runs, runs, [row for row in rows if row.run in phase_runs.names], unmet_need)
    return PhaseRow(name=phase.name, about=phase.about, result=result, why=why, runs=runs)


def _phase_result(
    phase_runs: PhaseRuns, runs: Sequence[RunRow], rows: Sequence[CriterionRow], unmet_need: str
) -> tuple[CriterionResult, str]:
    statuses = [outcome.verdict.status for outcome in phase_runs.outcomes]
    failed_runs = [row.scenario for row in runs if not row.as_it_should and row.verdict != Status.ERROR]
    missed_criteria = [row.name for row in rows if row.result is CriterionResult.MISSED]
    if failed_runs or missed_criteria:
        return CriterionResult.MISSED, ", ".join([*failed_runs, *missed_criteria])
    if unmet_need and not runs:
        return CriterionResult.NOT_REACHED, unmet_need
    if Status.ERROR in statuses:
        return CriterionResult.OPEN, "nsa-harness could not judge " + ", ".join(
            row.scenario for row in runs if row.verdict == Status.ERROR
        )
    if len(runs) < len(phase_runs.names):
        return CriterionResult.OPEN, f"{len(runs)} of {len(phase_runs.names)} runs finished"
    if all(status is Status.SKIP for status in statuses):
        return CriterionResult.NOT_TESTED, phase_runs.outcomes[0].verdict.summary
    return CriterionResult.MET, ""


def _run_row(checklist: Checklist, outcome: Outcome) -> RunRow:
    faults = [finding for finding in silent_faults(outcome) if finding.code not in checklist.accept]
    is_good = is_as_expected(outcome) and not outcome.flaky and not faults
    blame = None if is_good else _blame(outcome, faults)
    return RunRow(
        scenario=outcome.spec.scenario,
        verdict=outcome.verdict.status.value,
        cause=blame.cause if blame else outcome.verdict.cause,
        as_it_should=is_good,
        dir=outcome.dir,
        wall_s=outcome.timing.wall_s,
        repeat=outcome.repeat_command,
        blame=blame,
    )


def _blame(outcome: Outcome, faults: Sequence[Finding] = ()) -> FailureReason:
    """Return why a run did not end as expected: its cause, or else the first of `faults` or other findings."""
    cause, sentence = outcome.verdict.cause, outcome.verdict.summary
    others = [
        finding
        for finding in outcome.findings
        if finding.code != cause and severity(finding, outcome) is not Severity.INFO
    ]
    finding = next((finding for finding in outcome.findings if finding.code == cause), None)
    if cause is None or (cause == Cause.EXPECTATION_MISSED and others):
        finding = next(iter(faults or others), None)
        cause, sentence = (
            (finding.code, f"{sentence}; {finding.claim}".removeprefix("; ")) if finding else (cause, _PASSED)
        )
    place = outcome.culprit.place if outcome.culprit and outcome.culprit.place else finding.place if finding else None
    return FailureReason(
        run=outcome.spec.scenario,
        verdict=outcome.verdict.status.value,
        cause=cause,
        sentence=sentence,
        place=place,
        advice=finding.advice if finding else "",
        next=outcome.next_command or (f"nsa-harness explain {finding.code}" if finding else outcome.repeat_command),
    )


_PASSED = "the run passed, and nothing else is wrong with it"


def _criterion_row(
    name: str,
    criterion: Criterion,
    runs: Sequence[str],
    numbers: Mapping[str, Measurements],
    outcomes: Mapping[str, Outcome],
    facts: MachineFacts,
) -> CriterionRow:
    """Return the result of a criterion, based on the run with the worst number."""
    empty = CriterionRow(
        name=name, result=CriterionResult.OPEN, metric=criterion.metric, unit=criterion.unit, limit=criterion.bounds(),
        measured=None, margin=None, run=None, dir=None, repeat=None,
    )  # fmt: skip
    if criterion.needs.gpus > len(facts.gpus):
        why = f"needs {gpus_text(criterion.needs.gpus)}; this machine has {gpus_text(len(facts.gpus))}"
        return replace(empty, result=CriterionResult.NOT_TESTED, why=why)
    rows = [_row_of_run(empty, criterion, run, numbers, outcomes) for run in runs]
    return min(rows, key=lambda row: (_WORST_FIRST.index(row.result), row.margin if row.margin is not None else 0.0))


_WORST_FIRST = (
    CriterionResult.MISSED,
    CriterionResult.OPEN,
    CriterionResult.NOT_REACHED,
    CriterionResult.NOT_TESTED,
    CriterionResult.MET,
)


def _row_of_run(
    empty: CriterionRow,
    criterion: Criterion,
    run: str,
    numbers: Mapping[str, Measurements],
    outcomes: Mapping[str, Outcome],
) -> CriterionRow:
    """Return the criterion's row for one run, or `empty` with the reason why the number is missing."""
    other = criterion.over or criterion.minus
    for required_run in filter(None, (run, other)):
        outcome = outcomes.get(required_run)
        if outcome is None:
            return replace(
                empty, run=required_run, result=CriterionResult.NOT_REACHED, why=f"{required_run} was not reached"
            )
        row = replace(empty, run=required_run, dir=outcome.dir, repeat=outcome.repeat_command)
        if outcome.verdict.status is Status.SKIP:
            return replace(
                row, result=CriterionResult.OPEN, why=f"{required_run} cannot run here: {outcome.verdict.summary}"
            )
        if criterion.metric not in numbers.get(required_run, {}):
            reported = ", ".join(sorted(numbers.get(required_run, {}))) or "none"
            return replace(row, why=f"{required_run} reported no {criterion.metric} (reported: {reported})")
    outcome = outcomes[run]
    number = numbers[run][criterion.metric]
    why = ""
    if other is not None:
        number = _combine(number, numbers[other][criterion.metric], criterion)
        why = f"{run} {'divided by' if criterion.over else 'compared with'} {other}"
    result, margin = _compare(number, criterion)
    row = replace(
        empty,
        result=result,
        measured=number,
        margin=margin,
        run=run,
        dir=outcome.dir,
        repeat=outcome.repeat_command,
        why=why,
    )
    return row if result is CriterionResult.MET else replace(row, blame=_blame(outcome, silent_faults(outcome)))


def _combine(number: Measurement, other: Measurement, criterion: Criterion) -> Measurement:
    if criterion.minus is not None:
        return Measurement(value=abs(number.value - other.value))
    return Measurement(value=number.value / other.value if other.value else math.inf)


def _compare(number: Measurement, criterion: Criterion) -> tuple[CriterionResult, float | None]:
    """Compare a measured number with all bounds of a criterion. Return the worst result and the smallest margin."""
    results_and_margins = [_compare_with_bound(number, key, limit) for key, limit in criterion.bounds()]
    results = [result for result, _ in results_and_margins]
    worst = next(
        result for result in (CriterionResult.MISSED, CriterionResult.OPEN, CriterionResult.MET) if result in results
    )
    return worst, min(margin for _, margin in results_and_margins)


def _compare_with_bound(number: Measurement, key: str, limit: float) -> tuple[CriterionResult, float]:
    """Compare a measured number with one bound. Return the result, and the margin as a fraction of the limit."""
    low = number.value if number.low is None else number.low
    high = number.value if number.high is None else number.high
    worse, better = (high, low) if key in ("lt", "le") else (low, high)
    inside = limit - worse if key in ("lt", "le") else worse - limit
    margin = (-abs(number.value - limit) if key == "eq" else inside) / (abs(limit) or 1.0)
    if _OPERATORS[key](worse, limit) and _OPERATORS[key](better, limit):
        return CriterionResult.MET, margin
    return (CriterionResult.OPEN if _OPERATORS[key](better, limit) else CriterionResult.MISSED), margin


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
}  # fmt: skip


def _not_tested(
    rows: Sequence[CriterionRow], runs_of_phases: Sequence[PhaseRuns], facts: MachineFacts
) -> Iterator[Untested]:
    """Yield every criterion, run and part of the program that could not be tested on this machine."""
    yield from (Untested(what=row.name, why=row.why) for row in rows if row.result is CriterionResult.NOT_TESTED)
    outcomes = [outcome for phase_runs in runs_of_phases for outcome in phase_runs.outcomes]
    skipped_outcomes = [outcome for outcome in outcomes if outcome.verdict.status is Status.SKIP]
    yield from (Untested(what=outcome.spec.scenario, why=outcome.verdict.summary) for outcome in skipped_outcomes)
    missing = dict.fromkeys(part for outcome in outcomes for part in outcome.spec.not_covered)
    cpu_ranks = next(
        (outcome.spec.ranks for outcome in outcomes if outcome.spec.not_covered and outcome.spec.device == "cpu"), None
    )
    gpu_reason = f"this machine has {gpus_text(len(facts.gpus))}" + (f" for {cpu_ranks} ranks" if facts.gpus else "")
    why = "the configuration that ran does not include it" if cpu_ranks is None else gpu_reason
    yield from (Untested(what=part, why=why) for part in missing)


def _beyond_the_runs(planned: PlannedRun, outcomes: Sequence[Outcome], facts: MachineFacts) -> Iterator[Untested]:
    """Yield each respect in which the planned run is larger than every run of the check."""
    trained = [outcome for outcome in outcomes if outcome.verdict.status is not Status.SKIP]
    if not trained:
        return
    ranks = max(outcome.spec.ranks for outcome in trained)
    idle_gpus = len(facts.gpus) - ranks if any(outcome.spec.device == "cuda" for outcome in trained) else 0
    lengths = [int(length) for outcome in trained if (length := dict(outcome.spec.chosen).get("model.seq_len"))]
    steps = [outcome.metrics["steps"] for outcome in trained if "steps" in outcome.metrics]
    if planned.ranks is not None and planned.ranks > ranks:
        yield Untested(what=f"{planned.ranks} ranks", why=f"at most {ranks} ran")
    if idle_gpus > 0:
        yield Untested(what=f"{idle_gpus} of {len(facts.gpus)} GPUs", why=f"at most {ranks} ranks ran")
    if planned.seq_len is not None and lengths and planned.seq_len > max(lengths):
        yield Untested(what=f"sequence {planned.seq_len}", why=f"at most {max(lengths)} tokens ran")
    if planned.nodes > 1:
        yield Untested(what=f"{planned.nodes} nodes", why="one node ran")
    if planned.steps is not None and steps and planned.steps > max(steps):
        yield Untested(what=f"{planned.steps} steps", why=f"at most {max(steps):.0f} ran")
