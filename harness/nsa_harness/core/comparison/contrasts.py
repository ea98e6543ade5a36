"""Find pairs of runs that differ in exactly one setting, and count the failures on each side.

Such a pair is called a contrast: a control run, and a run with a changed value. Every conclusion from several runs is
based on contrasts.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from nsa_harness.core.diagnosis.causes import Cause, SecondRun, row_of
from nsa_harness.core.experiment.repeats import own_status
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.scenario.resolve import shown_setting
from nsa_harness.core.scenario.scenario import Scenario

_DEFAULTS: dict[str, str] = {
    f"{section}.{key}": shown_setting(value)
    for section, values in Scenario(name="x").model_dump(mode="json").items()
    if isinstance(values, dict)
    for key, value in values.items()
}
_EVIDENCE = frozenset({Status.PASS, Status.FAIL, Status.HANG})

_STEPS = "train.steps"
_DEBUG = "run.env.TORCH_DISTRIBUTED_DEBUG"
_ONLY_LOGS = ("run.env.NCCL_DEBUG", "run.env.TORCH_CPP_LOG_LEVEL", "run.env.TORCH_SHOW_CPP_STACKTRACES")

# gloo ignores the settings of NCCL, so they do not count as a difference between a gloo run and an nccl run.
NCCL_SETTINGS = ("run.env.NCCL_", "run.env.TORCH_NCCL_")


class Comparison(StrEnum):
    """The required relation of a setting's value to given values, or to its value in another run."""

    ONE_OF = "one of"
    OTHER_THAN = "other than"
    MORE = "more"  # larger than the value of the other run
    LESS = "less"  # smaller than the value of the other run


RELATIONS: Mapping[Comparison, Callable[[str, str], bool]] = {
    Comparison.MORE: lambda control, changed: float(control) < float(changed),
    Comparison.LESS: lambda control, changed: float(control) > float(changed),
}


@dataclass(frozen=True, kw_only=True)
class ValueFilter:
    """A condition that the value of a setting is one of `values`, or none of them."""

    comparison: Comparison = Comparison.OTHER_THAN
    values: tuple[str, ...] = ()

    def allows(self, value: str) -> bool:
        """Return whether this value meets the condition."""
        if self.comparison in RELATIONS:
            return is_number(value)
        return any(same_value(value, listed_value) for listed_value in self.values) is (
            self.comparison is Comparison.ONE_OF
        )


@dataclass(frozen=True, kw_only=True)
class KeyFilter(ValueFilter):
    """A condition on the value of one setting in a run."""

    key: str  # dotted, such as "parallel.wrapper"


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """A condition on the scenario and settings of a run. An empty filter allows every run."""

    scenarios: tuple[str, ...] = ()
    values: tuple[KeyFilter, ...] = ()


EVERY_RUN = RunFilter()
ValuePredicate = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A setting that both runs of a contrast need, because the variable has no effect without it."""

    key: str
    allows: ValuePredicate
    override: str = ""  # an override that meets the requirement; empty if there is none
    only_to_launch: bool = False  # runs that do not meet it may be compared, but cannot be launched with the variable


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A setting that differs between two otherwise identical runs.

    If there are several `keys`, the runs must differ in all of them and in no other. For the first key, the control run
    must have a value that meets `is_control_value`, and the changed run one that meets `is_changed_value`. `relation`
    must hold between the two values.
    """

    keys: tuple[str, ...]
    is_control_value: ValuePredicate
    is_changed_value: ValuePredicate
    relation: Callable[[str, str], bool] = operator.ne
    ignored_prefixes: tuple[str, ...] = ()  # keys with these prefixes only have a meaning in one of the two runs
    undo_overrides: tuple[str, ...] = ()  # overrides that turn a changed run into the control run; empty if impossible
    # For the command that tests the variable: a value of the control run, and one of the changed run.
    example_values: tuple[str, str] | None = None
    requirements: tuple[Requirement, ...] = ()
    command_overrides: tuple[str, ...] = ()  # overrides that the command that tests the variable also needs


@dataclass(frozen=True, kw_only=True)
class FailureCounts:
    """The number of attempts of one configuration, and the number of those that failed."""

    failed: int
    attempts: int

    @property
    def is_steady(self) -> bool:
        """Whether either all attempts failed or none did."""
        return self.failed in (0, self.attempts)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A pair of runs that differ in exactly one setting, with their failure counts."""

    control: Outcome
    changed: Outcome
    control_counts: FailureCounts
    changed_counts: FailureCounts

    @property
    def is_steady(self) -> bool:
        """Whether each of the two configurations either always fails or always passes."""
        return self.control_counts.is_steady and self.changed_counts.is_steady

    @property
    def ends_same_way(self) -> bool:
        """Whether both runs have the same verdict, kind and cause."""
        control_verdict, changed_verdict = self.control.verdict, self.changed.verdict
        return (control_verdict.status, control_verdict.kind, control_verdict.cause) == (
            changed_verdict.status,
            changed_verdict.kind,
            changed_verdict.cause,
        )


def one_of(*values: str) -> ValuePredicate:
    """Return a predicate for values that are in `values`."""
    return ValueFilter(comparison=Comparison.ONE_OF, values=values).allows


def other_than(*values: str) -> ValuePredicate:
    """Return a predicate for values that are not in `values`."""
    return ValueFilter(comparison=Comparison.OTHER_THAN, values=values).allows


def same_value(first: str, second: str) -> bool:
    """Return whether two values are equal as text or as numbers, for example "1" and "1.0"."""
    return first == second or (is_number(first) and is_number(second) and float(first) == float(second))


def is_number(value: str) -> bool:
    """Return whether the text is a non-negative decimal number."""
    return re.fullmatch(r"[0-9]{1,15}(\.[0-9]+)?", value) is not None


def is_evidence(outcome: Outcome) -> bool:
    """Return whether conclusions can be drawn from this run."""
    return outcome.final and outcome.verdict.status in _EVIDENCE and not outcome.flaky


def unmet_requirements(variable: Variable, outcome: Outcome) -> tuple[Requirement, ...]:
    """Return the requirements that the run does not meet."""
    return tuple(need for need in variable.requirements if not need.allows(setting(outcome, need.key)))


def has_passed(outcome: Outcome) -> bool:
    return outcome.verdict.status is Status.PASS


def configuration(outcome: Outcome) -> dict[str, str]:
    """Return the settings of a run, keyed by dotted key.

    "backend" and "device" are what the run really used. Variables that only change the log are left out.
    """
    backend = outcome.spec.backend or dict(outcome.spec.settings).get("needs.backend", "")
    # With gloo, our program replaces DETAIL by INFO, which only adds lines to the log; see docs/scenarios.md.
    is_nccl_detail = outcome.spec.backend == "nccl" and dict(outcome.spec.settings).get(_DEBUG) == "DETAIL"
    ignored = _ONLY_LOGS if is_nccl_detail else (*_ONLY_LOGS, _DEBUG)
    settings = {key: value for key, value in outcome.spec.settings if not key.startswith(("needs.", *ignored))}
    return {**settings, "backend": backend, "device": outcome.spec.device}


def setting(outcome: Outcome, key: str) -> str:
    """Return the value of a setting in a run, including defaults, or "" if the run does not have the setting."""
    return _value(_all_settings(outcome), key)


def failure_counts(outcomes: Sequence[Outcome]) -> Callable[[Outcome], FailureCounts]:
    """Return a function that takes a run and counts the failed attempts of its configuration."""
    last_hash = {outcome.spec.scenario: outcome.spec.spec_hash for outcome in outcomes if outcome.final}
    failed_by_key: dict[object, list[bool]] = {}
    for attempt in outcomes:
        if (
            _is_about_program(attempt)
            and last_hash.get(attempt.spec.scenario) == attempt.spec.spec_hash
            and _is_same_launch(attempt)
        ):
            failed_by_key.setdefault(_configuration_key(attempt), []).append(own_status(attempt) is not Status.PASS)

    def of(outcome: Outcome) -> FailureCounts:
        failures = failed_by_key.get(_configuration_key(outcome), [])
        return FailureCounts(failed=sum(failures), attempts=len(failures))

    return of


def contrasts(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[Contrast, ...]:
    """Return every pair of runs that differ only in this variable, with the simplest pairs first."""
    counts_of = failure_counts(outcomes)
    representatives = _one_per_configuration(
        outcome for outcome in sorted(outcomes, key=simplicity_key) if _is_judged(outcome)
    )
    return tuple(
        Contrast(
            control=control,
            changed=changed_run,
            control_counts=counts_of(control),
            changed_counts=counts_of(changed_run),
        )
        for control, changed_run in _candidates(variable, representatives)
        if _is_comparable(control, changed_run)
    )


def steady_contrasts(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[Contrast, ...]:
    """Return the pairs of runs that differ only in this variable and always end the same way."""
    return tuple(contrast for contrast in contrasts(variable, outcomes) if contrast.is_steady)


def unjudged_pairs(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Outcome], ...]:
    """Return pairs of runs that differ only in this variable but cannot be compared.

    At least one of the two was skipped, ended with ERROR, or was killed from outside. Such pairs explain why there is
    no contrast.
    """
    return tuple(
        pair
        for pair in _candidates(variable, [outcome for outcome in outcomes if outcome.final])
        if not all(map(_is_judged, pair))
    )


def simplicity_key(outcome: Outcome) -> tuple[object, ...]:
    """Return a unique sort key that puts runs with few settings first."""
    return len(outcome.spec.settings), outcome.spec.scenario, outcome.attempt, outcome.spec.spec_hash, outcome.dir


def _is_judged(outcome: Outcome) -> bool:
    return outcome.final and _is_about_program(outcome)


def _is_about_program(outcome: Outcome) -> bool:
    """Return whether the result of a run says something about the program."""
    return own_status(outcome) in _EVIDENCE and outcome.verdict.cause != Cause.KILLED


def _is_same_launch(outcome: Outcome) -> bool:
    return outcome.spec.deepening is None or outcome.spec.deepening.change == SecondRun.AGAIN


def _configuration_key(outcome: Outcome) -> object:
    """Return a key that is equal for runs of the same configuration."""
    settings = _all_settings(outcome)
    return (
        frozenset((key, value) for key, value in settings.items() if value != _DEFAULTS.get(key, "")),
        outcome.spec.criteria,
    )


def _one_per_configuration(outcomes: Iterable[Outcome]) -> list[Outcome]:
    first: dict[object, Outcome] = {}
    for outcome in outcomes:
        first.setdefault(_configuration_key(outcome), outcome)
    return list(first.values())


def _candidates(variable: Variable, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return every pair of runs that differ only in this variable, with the simplest pairs first."""
    runs_with_values = [
        (outcome, setting(outcome, variable.keys[0]))
        for outcome in outcomes
        if all(need.only_to_launch for need in unmet_requirements(variable, outcome))
    ]
    changed_runs = [(outcome, value) for outcome, value in runs_with_values if variable.is_changed_value(value)]
    control_runs = [(outcome, value) for outcome, value in runs_with_values if variable.is_control_value(value)]
    pairs = (
        (control, changed_run)
        for (control, before), (changed_run, after) in product(control_runs, changed_runs)
        if variable.relation(before, after)
    )
    return sorted((pair for pair in pairs if _differing_keys(variable, *pair) == set(variable.keys)), key=_pair_order)


def _differing_keys(variable: Variable, control: Outcome, changed: Outcome) -> set[str]:
    """Return the settings that differ between two runs and could explain different verdicts."""
    differ = differences(control, changed)
    differ -= (
        {key for key in differ if key.startswith(variable.ignored_prefixes)} if variable.ignored_prefixes else set()
    )
    return differ - {_STEPS} if _STEPS in differ and _steps_do_not_matter(control, changed) else differ


def _steps_do_not_matter(first: Outcome, second: Outcome) -> bool:
    """Return whether the different numbers of training steps of two runs cannot explain different verdicts."""
    shorter, longer = sorted((first, second), key=_steps)
    if Cause.EXPECTATION_MISSED in (shorter.verdict.cause, longer.verdict.cause):
        return False
    failed_in = longer.culprit.step if longer.culprit else None
    # The longer run passed, or failed in a step that the shorter run also has.
    return has_passed(longer) or (failed_in is not None and failed_in <= _steps(shorter))


def _steps(outcome: Outcome) -> float:
    steps = setting(outcome, _STEPS)
    return float(steps) if is_number(steps) else math.inf


def differences(first: Outcome, second: Outcome) -> set[str]:
    """Return the settings that differ between two runs."""
    first_settings, second_settings = _all_settings(first), _all_settings(second)
    has_skipped_run = Status.SKIP in (first.verdict.status, second.verdict.status)
    unknown_keys = {"device", *dict((*first.spec.chosen, *second.spec.chosen))} if has_skipped_run else set()
    keys = {
        key
        for key in {*first_settings, *second_settings} - unknown_keys
        if not (has_skipped_run and key.startswith("fault."))
    }
    return {key for key in keys if _value(first_settings, key) != _value(second_settings, key)}


def _all_settings(outcome: Outcome) -> dict[str, str]:
    """Return all settings of a run, including those chosen for its shape or machine."""
    return {**configuration(outcome), **dict(outcome.spec.chosen)}


def _value(settings: Mapping[str, str], key: str) -> str:
    return settings.get(key, _DEFAULTS.get(key, ""))


def _is_comparable(control: Outcome, changed: Outcome) -> bool:
    causes = (control.verdict.cause, changed.verdict.cause)
    prefixes = tuple(prefix for cause in causes if (prefix := row_of(cause).criteria))
    return _criteria(control, prefixes) == _criteria(changed, prefixes)


def _criteria(outcome: Outcome, prefixes: tuple[str, ...]) -> Mapping[str, str]:
    return {key: value for key, value in outcome.spec.criteria if key.startswith(prefixes)} if prefixes else {}


def _pair_order(pair: tuple[Outcome, Outcome]) -> tuple[object, ...]:
    control, changed = pair
    size = len(control.spec.settings) + len(changed.spec.settings)
    return (
        size,
        control.spec.scenario,
        changed.spec.scenario,
        control.spec.spec_hash,
        changed.spec.spec_hash,
        control.attempt,
        changed.attempt,
        control.dir,
    )
