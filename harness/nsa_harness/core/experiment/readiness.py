"""Readiness: the phases and criteria of a checklist, and the GO or NO-GO that follows from their runs."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from nsa_harness.core.comparison.severity import severity, silent_faults
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.rules.silent_faults import first_divergence
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.evidence.health_samples import Replica
from nsa_harness.core.report import Finding, MachineFacts, Outcome, Place, Severity, Status
from nsa_harness.core.scenario.program import Contradictions, Location
from nsa_harness.core.scenario.resolve import gpus_text
from nsa_harness.core.scenario.scenario import Name, NumberBound, Word
from nsa_harness.core.schedule import as_expected
from nsa_harness.errors import did_you_mean


class Together(StrEnum):
    """Whether the runs of a phase are launched at the same time."""

    NEVER = "never"  # their times are measured
    MAY = "may"  # if the machine has room
    MUST = "must"  # each run is load for the others


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Phase(_Section):
    """A group of runs, and the earlier phases that must pass first."""

    name: Word
    about: Annotated[str, Field(max_length=300)] = ""
    runs: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(description="scenarios, each with its matrix")
    needs: tuple[Word, ...] = Field(default=(), description="earlier phases; where one failed, this one says nothing")
    together: Together = Together.NEVER
    set: dict[str, JsonValue] = Field(
        default={}, description="dotted keys of its scenarios; {RUN} in a text is the folder of an earlier run"
    )


class CriterionNeeds(_Section):
    """The devices that the criterion needs. It is not tested on a machine that lacks them."""

    gpus: Annotated[int, Field(ge=0, le=1024)] = 0


class Criterion(NumberBound):
    """Bounds for a number of one or more runs. The run that is nearest to missing them counts."""

    metric: Word
    runs: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(alias="in", description="whose number it is")
    unit: Annotated[str, Field(max_length=40)] = Field(default="", description="for people")
    over: Name | None = Field(default=None, description="the number is divided by that of this run")
    minus: Name | None = Field(default=None, description="the number is how far it is from that of this run")
    needs: CriterionNeeds = CriterionNeeds()

    def reads(self, run: str) -> bool:
        """Whether the criterion uses a number of this run, for the bounds or as the run to compare with."""
        return any(_is_of(run, word) for _, word in _named_runs(self))

    def bounds_run(self, run: str) -> bool:
        """Whether this run's number must meet the bounds; a run that is only compared with need not."""
        return any(_is_of(run, word) for word in self.runs) and run not in (self.over, self.minus)

    def bounds(self) -> tuple[tuple[str, float], ...]:
        return tuple((key, limit) for key, limit in self.numbers().items() if limit is not None)


class Checklist(_Section):
    """The phases and criteria that a program must pass before production."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    about: Annotated[str, Field(max_length=300)] = ""
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    criteria: dict[Word, Criterion]
    accept: tuple[Word, ...] = Field(default=(), description="findings that a run may have all the same")


# Metrics that change when another run shares the machine.
_OF_TIME = re.compile(r"(?:.*_)?(?:tokens_per_s|step_s|forward_s|backward_s|optimizer_s|wall_s)(?:_.*)?")
_FOLDER = re.compile(r"\{([^{}]*)\}")


def contradictions(checklist: Checklist) -> Contradictions:
    """Yield (location, mistake) for a checklist whose keys are valid, before its scenarios are known."""
    names: list[str] = []
    for number, phase in enumerate(checklist.phases):
        if phase.name in names:
            yield ("phases", number, "name"), f"{phase.name} is the name of an earlier phase; rename one"
        for place, need in enumerate(phase.needs):
            if need not in names:
                hint = did_you_mean(need, names) or "; phases run in the order written"
                yield ("phases", number, "needs", place), f"{need} is no earlier phase{hint}"
        names.append(phase.name)
    for name, criterion in checklist.criteria.items():
        if criterion.over is not None and criterion.minus is not None:
            yield ("criteria", name, "minus"), "given together with over; keep one of the two"
    codes = [cause.value for cause in Cause]
    for number, code in enumerate(checklist.accept):
        if code not in codes:
            yield ("accept", number), f"no such finding{did_you_mean(code, codes) or '; docs/findings.md lists them'}"


def run_contradictions(checklist: Checklist, runs: Sequence[Sequence[str]]) -> Contradictions:
    """Yield mistakes in the names of runs. `runs`: per phase, every variant by its own name."""
    before: list[str] = []
    for number, (phase, names) in enumerate(zip(checklist.phases, runs, strict=True)):
        for run in names:
            if run in before:
                yield ("phases", number, "runs"), f"{run} is run by an earlier phase; each run has one folder"
        for key, value in phase.set.items():
            for run in folders_in(value):
                if run not in before:
                    yield ("phases", number, "set", key), f"{{{run}}} is no run of an earlier phase"
        before += names
    for name, criterion in checklist.criteria.items():
        for at, word in _named_runs(criterion):
            if not any(_is_of(run, word) for run in before):
                yield ("criteria", name, *at), f"{word} is the run of no phase{did_you_mean(word, before)}"
            elif at[0] != "in" and word not in before:
                one_of = ", ".join(run for run in before if _is_of(run, word))
                yield ("criteria", name, *at), f"{word} has a matrix; name one of its runs: {one_of}"
        if not any(map(criterion.bounds_run, before)):
            yield ("criteria", name, "in"), "no run is left besides the one that it is told against"
        for phase, names in zip(checklist.phases, runs, strict=True):
            uses_phase = any(map(criterion.reads, names))
            if uses_phase and phase.together is Together.MAY and _OF_TIME.fullmatch(criterion.metric):
                what = f"{criterion.metric} is a time, and runs of the phase {phase.name} may go on together"
                yield ("criteria", name, "metric"), f"{what}; set together: never there"


def _named_runs(criterion: Criterion) -> Iterator[tuple[Location, str]]:
    """Yield each run that the criterion names, with the location of the name in its section."""
    yield from ((("in", number), run) for number, run in enumerate(criterion.runs))
    compared = (("over", criterion.over), ("minus", criterion.minus))
    yield from (((key,), run) for key, run in compared if run is not None)


def folders_in(value: JsonValue) -> list[str]:
    """Return the runs whose directories a value names."""
    return _FOLDER.findall(value) if isinstance(value, str) else []


def with_folders(value: JsonValue, folders: Mapping[str, str]) -> JsonValue:
    """Return the value with each {RUN} replaced by its directory; a run without a directory stays as it is."""
    return _FOLDER.sub(lambda match: folders.get(match[1], match[0]), value) if isinstance(value, str) else value


def _is_of(name: str, word: str) -> bool:
    """Whether the word names this run, or the scenario whose matrix contains it."""
    return name == word or name.partition("@")[0] == word


@dataclass(frozen=True, kw_only=True)
class Number:
    """A measured number, with its interval if it comes from a fit."""

    value: float
    low: float | None = None
    high: float | None = None


Numbers = Mapping[str, Number]  # of one run, by the names that a criterion takes


def expected_s(steps: Sequence[int], outcomes: Sequence[Outcome]) -> float | None:
    """Return the expected time of runs with `steps`, one after another, from the runs that trained; None: none did."""
    trained = [
        (outcome, outcome.metrics["step_s_median"], outcome.metrics["steps"])
        for outcome in outcomes
        if {"step_s_median", "optimizer_s"} <= set(outcome.metrics)
    ]
    if not trained:
        return None
    step_s = median(took_s for _, took_s, _ in trained)
    start_up_s = median(max(outcome.timing.wall_s - took_s * made, 0.0) for outcome, took_s, made in trained)
    return sum(start_up_s + step_s * count for count in steps)


FROM_EVIDENCE = frozenset({"memory_slope_bytes", "gpu_slope_bytes", "replicas_apart", "replica_looks"})


def numbers_of(outcome: Outcome, evidence: Evidence | None) -> dict[str, Number]:
    """Return the numbers of a run: its program's metrics, its peak memory, and fits over its evidence.

    `evidence`: None if no criterion needs a number from it.
    """
    usage = {"peak_gpu_bytes": outcome.usage.peak_gpu_bytes, "peak_rss_bytes": outcome.usage.peak_rss_bytes}
    values = {**outcome.metrics, **{name: value for name, value in usage.items() if value is not None}}
    numbers = {name: Number(value=float(value)) for name, value in values.items()}
    return {**numbers, **(_of_evidence(evidence) if evidence else {})}


def _of_evidence(evidence: Evidence) -> dict[str, Number]:
    checks = [rank.health for rank in evidence.ranks if rank.health is not None]
    host = [slope([(at.step, at.anonymous_bytes) for at in check.memory]) for check in checks]
    device = [slope([(at.step, at.gpu_bytes) for at in check.memory if at.gpu_bytes]) for check in checks]
    numbers: dict[str, Number] = {}
    for name, fits in (("memory_slope_bytes", host), ("gpu_slope_bytes", device)):
        if fits and None not in fits:
            numbers[name] = max((fit for fit in fits if fit is not None), key=lambda fit: fit.high or fit.value)
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Replica]] = {}
    for rank in evidence.ranks:
        for replica in rank.health.replicas if rank.health else ():
            groups.setdefault((replica.number, replica.ranks), {})[rank.rank] = replica
    complete = [of_rank for (_, ranks), of_rank in groups.items() if len(ranks) > 1 and set(ranks) == set(of_rank)]
    if complete:
        diverged = sum(first_divergence(of_rank) is not None for of_rank in complete)
        fewest = min(len(replica.samples) for of_rank in complete for replica in of_rank.values())
        numbers |= {"replicas_apart": Number(value=float(diverged)), "replica_looks": Number(value=float(fewest))}
    return numbers


_WARM_UP = 0.25  # share of the steps in which a program makes its one-time allocations
_BLOCKS = 8  # memory grows in jumps: means over blocks of samples are nearly independent, single samples are not
_SAMPLES_PER_BLOCK = 2
_STUDENT = 2.447  # 95 % quantile with _BLOCKS - 2 degrees of freedom


def slope(points: Sequence[tuple[int, int]]) -> Number | None:
    """Return the slope per step with its 95 % interval, by least squares over the means of blocks of points.

    None: there are too few points after the warm-up.
    """
    last = points[-1][0] if points else 0
    kept = [point for point in points if point[0] > last * _WARM_UP]
    if len(kept) < _BLOCKS * _SAMPLES_PER_BLOCK:
        return None
    edges = [round(number * len(kept) / _BLOCKS) for number in range(_BLOCKS + 1)]
    blocks = [kept[begin:end] for begin, end in pairwise(edges)]
    xs = [fmean(step for step, _ in block) for block in blocks]
    ys = [fmean(amount for _, amount in block) for block in blocks]
    x, y = fmean(xs), fmean(ys)
    spread = sum((block_x - x) ** 2 for block_x in xs)
    rise = sum((block_x - x) * (block_y - y) for block_x, block_y in zip(xs, ys, strict=True)) / spread
    rest = sum((block_y - y - rise * (block_x - x)) ** 2 for block_x, block_y in zip(xs, ys, strict=True))
    half = _STUDENT * math.sqrt(rest / (_BLOCKS - 2) / spread)
    return Number(value=rise, low=rise - half, high=rise + half)


class Result(StrEnum):
    """The result of a criterion or a phase."""

    MET = "met"
    MISSED = "missed"
    OPEN = "open"  # this machine can test it, but the runs did not decide it
    NOT_TESTED = "not tested"  # this machine cannot test it
    NOT_REACHED = "not reached"


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The reason why a run did not end as it should, from its outcome."""

    run: str
    verdict: str
    cause: str | None
    sentence: str
    place: Place | None
    advice: str
    next: str | None  # the command to continue with


@dataclass(frozen=True, kw_only=True)
class CriterionRow:
    """A criterion with its measured number and result."""

    name: str
    result: Result
    metric: str
    unit: str
    limit: tuple[tuple[str, float], ...]  # "lt", 30e9
    measured: Number | None
    margin: float | None  # how far the number is inside its limit, as a share of the limit; negative: missed
    run: str | None  # the run whose number counts: the nearest to its limit
    dir: str | None
    repeat: str | None  # the command that repeats that run
    why: str = ""  # why nothing was measured, or which runs the number combines
    blame: Blame | None = None


@dataclass(frozen=True, kw_only=True)
class RunRow:
    scenario: str
    verdict: str
    cause: str | None
    as_it_should: bool
    dir: str
    wall_s: float
    repeat: str | None
    blame: Blame | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """A phase with its runs."""

    name: str
    about: str
    result: Result
    why: str  # why it was not reached, or is open
    runs: tuple[RunRow, ...]


class Decision(StrEnum):
    GO = "GO"
    NO_GO = "NO-GO"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, kw_only=True)
class Untested:
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The decision with its reasons."""

    decision: Decision
    criteria: tuple[CriterionRow, ...]
    phases: tuple[PhaseRow, ...]
    not_tested: tuple[Untested, ...]


@dataclass(frozen=True, kw_only=True)
class PhaseRuns:
    """The runs of a phase that were made so far."""

    names: tuple[str, ...]  # all runs of the phase
    outcomes: tuple[Outcome, ...] = ()  # the final outcome of each run that was made
    numbers: Mapping[str, Numbers] = field(default_factory=dict)  # by run


def blocked(results: Mapping[str, Result], phase: Phase) -> str:
    """Return why a phase must not run: a phase that it needs was not met. Return "" if it may run.

    `results` has the results of the earlier phases.
    """
    for need in phase.needs:
        if results.get(need) is not Result.MET:
            return f"{need} {_NOT_MET[results.get(need, Result.OPEN)]}"
    return ""


_NOT_MET = {
    Result.MISSED: "failed",
    Result.OPEN: "is not decided",
    Result.NOT_TESTED: "cannot run here",
    Result.NOT_REACHED: "was not reached",
}


def readiness(checklist: Checklist, done: Sequence[PhaseRuns], facts: MachineFacts) -> Readiness:
    """Judge the checklist. `done`: every phase in order, without outcomes if it has not run."""
    numbers = {run: of_run for phase_runs in done for run, of_run in phase_runs.numbers.items()}
    outcomes = {outcome.spec.scenario: outcome for phase_runs in done for outcome in phase_runs.outcomes}
    names = [name for phase_runs in done for name in phase_runs.names]
    rows = tuple(
        _criterion_row(name, criterion, [*filter(criterion.bounds_run, names)], numbers, outcomes, facts)
        for name, criterion in checklist.criteria.items()
    )
    results: dict[str, Result] = {}
    phases = []
    for phase, phase_runs in zip(checklist.phases, done, strict=True):
        row = _phase_row(checklist, phase, phase_runs, rows, blocked(results, phase))
        results[phase.name] = row.result
        phases.append(row)
    return Readiness(
        decision=_decision(rows, phases),
        criteria=rows,
        phases=tuple(phases),
        not_tested=tuple(_not_tested(rows, done, facts)),
    )


def _decision(rows: Sequence[CriterionRow], phases: Sequence[PhaseRow]) -> Decision:
    results = [*(row.result for row in rows), *(row.result for row in phases)]
    if Result.MISSED in results:
        return Decision.NO_GO
    if Result.OPEN in results or Result.NOT_REACHED in results:
        return Decision.UNDECIDED
    # Without a single phase that passed there is no evidence for GO.
    return Decision.GO if Result.MET in (row.result for row in phases) else Decision.UNDECIDED


def _phase_row(
    checklist: Checklist, phase: Phase, done: PhaseRuns, rows: Sequence[CriterionRow], block: str
) -> PhaseRow:
    runs = tuple(_run_row(checklist, outcome) for outcome in done.outcomes)
    result, why = _phase_result(done, runs, [row for row in rows if row.run in done.names], block)
    return PhaseRow(name=phase.name, about=phase.about, result=result, why=why, runs=runs)


def _phase_result(
    done: PhaseRuns, runs: Sequence[RunRow], rows: Sequence[CriterionRow], block: str
) -> tuple[Result, str]:
    statuses = [outcome.verdict.status for outcome in done.outcomes]
    bad = [row.scenario for row in runs if not row.as_it_should and row.verdict != Status.ERROR]
    missed = [row.name for row in rows if row.result is Result.MISSED]
    if bad or missed:
        return Result.MISSED, ", ".join([*bad, *missed])
    if block and not runs:
        return Result.NOT_REACHED, block
    if Status.ERROR in statuses:
        return Result.OPEN, "the harness could not judge " + ", ".join(
            row.scenario for row in runs if row.verdict == Status.ERROR
        )
    if len(runs) < len(done.names):
        return Result.OPEN, f"{len(runs)} of {len(done.names)} runs made"
    if all(status is Status.SKIP for status in statuses):
        return Result.NOT_TESTED, done.outcomes[0].verdict.summary
    return Result.MET, ""


def _run_row(checklist: Checklist, outcome: Outcome) -> RunRow:
    wrong = [finding for finding in silent_faults(outcome) if finding.code not in checklist.accept]
    well = as_expected(outcome) and not outcome.flaky and not wrong
    blame = None if well else _blame(outcome, wrong)
    return RunRow(
        scenario=outcome.spec.scenario,
        verdict=outcome.verdict.status.value,
        cause=blame.cause if blame else outcome.verdict.cause,
        as_it_should=well,
        dir=outcome.dir,
        wall_s=outcome.timing.wall_s,
        repeat=outcome.repeat,
        blame=blame,
    )


def _blame(outcome: Outcome, wrong: Sequence[Finding] = ()) -> Blame:
    """Return the cause of a run that did not pass; for a run that passed or missed a number, its worst finding."""
    cause, sentence = outcome.verdict.cause, outcome.verdict.summary
    others = [
        finding
        for finding in outcome.findings
        if finding.code != cause and severity(finding, outcome) is not Severity.INFO
    ]
    named = next((finding for finding in outcome.findings if finding.code == cause), None)
    if cause is None or (cause == Cause.EXPECTATION_MISSED and others):
        named = next(iter(wrong or others), None)
        cause, sentence = (named.code, f"{sentence}; {named.claim}".removeprefix("; ")) if named else (cause, _PASSED)
    place = outcome.culprit.place if outcome.culprit and outcome.culprit.place else named.place if named else None
    return Blame(
        run=outcome.spec.scenario,
        verdict=outcome.verdict.status.value,
        cause=cause,
        sentence=sentence,
        place=place,
        advice=named.advice if named else "",
        next=outcome.next or outcome.repeat,
    )


_PASSED = "it passed, and nothing else was found wrong in it"


def _criterion_row(
    name: str,
    criterion: Criterion,
    runs: Sequence[str],
    numbers: Mapping[str, Numbers],
    outcomes: Mapping[str, Outcome],
    facts: MachineFacts,
) -> CriterionRow:
    """Return the criterion's row for the run that is nearest to missing it."""
    empty = CriterionRow(
        name=name, result=Result.OPEN, metric=criterion.metric, unit=criterion.unit, limit=criterion.bounds(),
        measured=None, margin=None, run=None, dir=None, repeat=None,
    )  # fmt: skip
    if criterion.needs.gpus > len(facts.gpus):
        why = f"needs {gpus_text(criterion.needs.gpus)}; this machine has {gpus_text(len(facts.gpus))}"
        return replace(empty, result=Result.NOT_TESTED, why=why)
    rows = [_row_of_run(empty, criterion, run, numbers, outcomes) for run in runs]
    return min(rows, key=lambda row: (_WORST.index(row.result), row.margin if row.margin is not None else 0.0))


_WORST = (Result.MISSED, Result.OPEN, Result.NOT_REACHED, Result.NOT_TESTED, Result.MET)


def _row_of_run(
    empty: CriterionRow, criterion: Criterion, run: str, numbers: Mapping[str, Numbers], outcomes: Mapping[str, Outcome]
) -> CriterionRow:
    """Return the criterion's row for one run, or the reason why the run has no number for it."""
    other = criterion.over or criterion.minus
    for needed in filter(None, (run, other)):
        outcome = outcomes.get(needed)
        if outcome is None:
            return replace(empty, run=needed, result=Result.NOT_REACHED, why=f"{needed} was not reached")
        row = replace(empty, run=needed, dir=outcome.dir, repeat=outcome.repeat)
        if outcome.verdict.status is Status.SKIP:
            return replace(row, result=Result.OPEN, why=f"{needed} cannot run here: {outcome.verdict.summary}")
        if criterion.metric not in numbers.get(needed, {}):
            known = ", ".join(sorted(numbers.get(needed, {}))) or "none"
            return replace(row, why=f"{needed} reported no {criterion.metric} (reported: {known})")
    outcome = outcomes[run]
    number = numbers[run][criterion.metric]
    why = ""
    if other is not None:
        number = _combine(number, numbers[other][criterion.metric], criterion)
        why = f"{run} {'over' if criterion.over else 'against'} {other}"
    result, margin = _compare(number, criterion)
    row = replace(
        empty, result=result, measured=number, margin=margin, run=run, dir=outcome.dir, repeat=outcome.repeat, why=why
    )
    return row if result is Result.MET else replace(row, blame=_blame(outcome, silent_faults(outcome)))


def _combine(number: Number, other: Number, criterion: Criterion) -> Number:
    if criterion.minus is not None:
        return Number(value=abs(number.value - other.value))
    return Number(value=number.value / other.value if other.value else math.inf)


def _compare(number: Number, criterion: Criterion) -> tuple[Result, float | None]:
    """Return the worst result of the criterion's bounds, and the smallest margin."""
    compared = [_compare_with_bound(number, key, limit) for key, limit in criterion.bounds()]
    results = [result for result, _ in compared]
    worst = next(result for result in (Result.MISSED, Result.OPEN, Result.MET) if result in results)
    return worst, min(margin for _, margin in compared)


def _compare_with_bound(number: Number, key: str, limit: float) -> tuple[Result, float]:
    """Return whether the number is within one bound, and its margin: the distance to the limit as a share of it.

    An interval meets the bound if all of it does, and misses the bound if none of it does; otherwise it is OPEN. The
    margin is that of the interval's worse end, and negative if that end is outside the bound.
    """
    low = number.value if number.low is None else number.low
    high = number.value if number.high is None else number.high
    worse, better = (high, low) if key in ("lt", "le") else (low, high)
    inside = limit - worse if key in ("lt", "le") else worse - limit
    margin = (-abs(number.value - limit) if key == "eq" else inside) / (abs(limit) or 1.0)
    if _HOLDS[key](worse, limit) and _HOLDS[key](better, limit):
        return Result.MET, margin
    return (Result.OPEN if _HOLDS[key](better, limit) else Result.MISSED), margin


_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
}  # fmt: skip


def _not_tested(rows: Sequence[CriterionRow], done: Sequence[PhaseRuns], facts: MachineFacts) -> Iterator[Untested]:
    """Yield what this machine could not test: criteria, skipped runs, and parts that a smaller form of a run lacks."""
    yield from (Untested(what=row.name, why=row.why) for row in rows if row.result is Result.NOT_TESTED)
    outcomes = [outcome for phase_runs in done for outcome in phase_runs.outcomes]
    skipped = [outcome for outcome in outcomes if outcome.verdict.status is Status.SKIP]
    yield from (Untested(what=outcome.spec.scenario, why=outcome.verdict.summary) for outcome in skipped)
    missing = dict.fromkeys(what for outcome in outcomes for what in outcome.spec.not_covered)
    on_cpu = next(
        (outcome.spec.ranks for outcome in outcomes if outcome.spec.not_covered and outcome.spec.device == "cpu"), None
    )
    lacking = f"this machine has {gpus_text(len(facts.gpus))}" + (f" for {on_cpu} ranks" if facts.gpus else "")
    why = "the form that ran has none" if on_cpu is None else lacking
    yield from (Untested(what=what, why=why) for what in missing)
