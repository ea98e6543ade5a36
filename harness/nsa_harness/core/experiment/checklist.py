"""A readiness checklist: its phases of runs and its criteria, read from a plan file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.scenario.program import Contradictions, Location
from nsa_harness.core.scenario.scenario import Name, NumberBound, Word
from nsa_harness.errors import did_you_mean


class Concurrency(StrEnum):
    """The choice of whether the runs of a phase are launched in parallel."""

    NEVER = "never"  # one after another, because their times are measured
    MAY = "may"  # in parallel if the machine has room
    MUST = "must"  # in parallel, because each run must be load for the others


class _Section(BaseModel):
    """The base class of the sections in a checklist file. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ChecklistPhase(_Section):
    """A phase of a readiness checklist, with its runs and the phases that must pass before it."""

    name: Word
    about: Annotated[str, Field(max_length=300)] = ""
    runs: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(description="scenarios, each with its matrix")
    needs: tuple[Word, ...] = Field(
        default=(), description="earlier phases; if one of them failed, this phase does not run"
    )
    together: Concurrency = Concurrency.NEVER
    set: dict[str, JsonValue] = Field(
        default={}, description="dotted keys of its scenarios; {RUN} in a text is the directory of an earlier run"
    )


class CriterionNeeds(_Section):
    """The devices that a criterion needs; it is not tested on a machine without them."""

    gpus: Annotated[int, Field(ge=0, le=1024)] = 0


class Criterion(NumberBound):
    """A required bound on a measured number, the worst of several runs."""

    metric: Word
    runs: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(alias="in", description="the runs that are measured")
    unit: Annotated[str, Field(max_length=40)] = Field(default="", description="human-readable")
    over: Name | None = Field(default=None, description="the number is divided by the number of this run")
    minus: Name | None = Field(default=None, description="the number is its distance from the number of this run")
    needs: CriterionNeeds = CriterionNeeds()

    def reads(self, run: str) -> bool:
        """Return whether the criterion uses a number from this run, as the measured value or as the reference."""
        return any(_names_run(run, word) for _, word in _named_runs(self))

    def bounds_run(self, run: str) -> bool:
        """Return whether the number of this run, unless it is a reference, must be within the bounds."""
        return any(_names_run(run, word) for word in self.runs) and run not in (self.over, self.minus)

    def bounds(self) -> tuple[tuple[str, float], ...]:
        """Return the bounds as pairs of operator and limit, such as ("lt", 30e9)."""
        return tuple((key, limit) for key, limit in self.numbers().items() if limit is not None)


class PlannedRun(_Section):
    """The production run that a readiness check decides about. Unset values are those of the runs of the check."""

    steps: Annotated[int, Field(ge=1)] | None = Field(default=None, description="training steps")
    ranks: Annotated[int, Field(ge=1, le=100_000)] | None = Field(default=None, description="all ranks")
    seq_len: Annotated[int, Field(ge=1)] | None = Field(default=None, description="tokens per sequence")
    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="machines")


class Checklist(_Section):
    """The phases and criteria that a program must pass before production."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    about: Annotated[str, Field(max_length=300)] = ""
    phases: Annotated[tuple[ChecklistPhase, ...], Field(min_length=1)]
    criteria: dict[Word, Criterion]
    accept: tuple[Word, ...] = Field(default=(), description="findings that are accepted in every run")
    planned: PlannedRun = PlannedRun()


# Metrics that change when another run shares the machine.
_TIME_METRIC = re.compile(r"(?:.*_)?(?:tokens_per_s|step_s|forward_s|backward_s|optimizer_s|wall_s)(?:_.*)?")
_RUN_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def checklist_mistakes(checklist: Checklist) -> Contradictions:
    """Yield each error in a checklist with its location, except errors in run names."""
    names: list[str] = []
    for number, phase in enumerate(checklist.phases):
        if phase.name in names:
            yield ("phases", number, "name"), f"{phase.name} is the name of an earlier phase; rename one"
        for index, need in enumerate(phase.needs):
            if need not in names:
                hint = did_you_mean(need, names) or "; phases run in the order written"
                yield ("phases", number, "needs", index), f"{need} is no earlier phase{hint}"
        names.append(phase.name)
    for name, criterion in checklist.criteria.items():
        if criterion.over is not None and criterion.minus is not None:
            yield ("criteria", name, "minus"), "given together with over; keep one of the two"
    codes = [cause.value for cause in Cause]
    for number, code in enumerate(checklist.accept):
        if code not in codes:
            yield ("accept", number), f"no such finding{did_you_mean(code, codes) or '; docs/findings.md lists them'}"


def run_name_mistakes(checklist: Checklist, runs: Sequence[Sequence[str]]) -> Contradictions:
    """Yield the errors in the run names of a checklist. `runs` has the names of all runs of each phase."""
    earlier_runs: list[str] = []
    for number, (phase, names) in enumerate(zip(checklist.phases, runs, strict=True)):
        for run in names:
            if run in earlier_runs:
                yield ("phases", number, "runs"), f"{run} is run by an earlier phase; each run has only one directory"
        for key, value in phase.set.items():
            for run in runs_named_in(value):
                if run not in earlier_runs:
                    yield ("phases", number, "set", key), f"{{{run}}} is no run of an earlier phase"
        earlier_runs += names
    for name, criterion in checklist.criteria.items():
        for location, word in _named_runs(criterion):
            if not any(_names_run(run, word) for run in earlier_runs):
                yield ("criteria", name, *location), f"{word} is the run of no phase{did_you_mean(word, earlier_runs)}"
            elif location[0] != "in" and word not in earlier_runs:
                one_of = ", ".join(run for run in earlier_runs if _names_run(run, word))
                yield ("criteria", name, *location), f"{word} has a matrix; name one of its runs: {one_of}"
        if not any(map(criterion.bounds_run, earlier_runs)):
            yield ("criteria", name, "in"), "the only run is the one that it is compared with; name another"
        for phase, names in zip(checklist.phases, runs, strict=True):
            uses_phase = any(map(criterion.reads, names))
            if uses_phase and phase.together is Concurrency.MAY and _TIME_METRIC.fullmatch(criterion.metric):
                problem = f"{criterion.metric} is a time, and runs of the phase {phase.name} may run in parallel"
                yield ("criteria", name, "metric"), f"{problem}; set together: never there"


def _named_runs(criterion: Criterion) -> Iterator[tuple[Location, str]]:
    yield from ((("in", number), run) for number, run in enumerate(criterion.runs))
    reference_runs = (("over", criterion.over), ("minus", criterion.minus))
    yield from (((key,), run) for key, run in reference_runs if run is not None)


def runs_named_in(value: JsonValue) -> list[str]:
    """Return the run names that occur as {RUN} placeholders in a string. Other values contain none."""
    return _RUN_PLACEHOLDER.findall(value) if isinstance(value, str) else []


def fill_run_directories(value: JsonValue, folders: Mapping[str, str]) -> JsonValue:
    """Replace each {RUN} placeholder in `value` with the directory of that run, if it is known."""
    return (
        _RUN_PLACEHOLDER.sub(lambda match: folders.get(match[1], match[0]), value) if isinstance(value, str) else value
    )


def _names_run(name: str, word: str) -> bool:
    """Return whether `word` is the run name `name` or the name of that run's scenario."""
    return name == word or name.partition("@")[0] == word
