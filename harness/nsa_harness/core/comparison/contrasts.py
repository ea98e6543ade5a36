"""Find contrasts: pairs of runs that differ in exactly one variable, and how often each side failed.

Every conclusion from several runs is based on contrasts.
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

# gloo reads no NCCL settings, so they make no difference between the two backends.
NCCL_SETTINGS = ("run.env.NCCL_", "run.env.TORCH_NCCL_")


class Test(StrEnum):
    """How a value is compared with the values of a filter."""

    ONE_OF = "one of"
    OTHER_THAN = "other than"
    MORE = "more"  # than the other run has
    LESS = "less"


RELATED: Mapping[Test, Callable[[str, str], bool]] = {
    Test.MORE: lambda control, changed: float(control) < float(changed),
    Test.LESS: lambda control, changed: float(control) > float(changed),
}


@dataclass(frozen=True, kw_only=True)
class ValueFilter:
    """The values that one key of a run may have; every value by default."""

    test: Test = Test.OTHER_THAN
    values: tuple[str, ...] = ()

    def allows(self, value: str) -> bool:
        if self.test in RELATED:
            return is_number(value)
        return any(same_value(value, allowed) for allowed in self.values) is (self.test is Test.ONE_OF)


@dataclass(frozen=True, kw_only=True)
class KeyFilter(ValueFilter):
    """A key, and the values that it may have."""

    key: str


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Runs of any of these scenarios, or runs with all of these values; every run if both are empty."""

    scenarios: tuple[str, ...] = ()
    values: tuple[KeyFilter, ...] = ()


EVERY_RUN = RunFilter()
ValueTest = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """The difference that two runs of a contrast must have: in all of `keys`, and in no other key.

    The value of the first key satisfies `without` in the control run and `with_it` in the changed run, and the two
    values together satisfy `related`.
    """

    keys: tuple[str, ...]
    without: ValueTest
    with_it: ValueTest
    related: Callable[[str, str], bool] = operator.ne
    ignored_prefixes: tuple[str, ...] = ()  # prefixes of keys that have a meaning in only one of the two runs
    undo: tuple[str, ...] = ()  # overrides that turn a changed run into the control run; empty if impossible
    values: tuple[str, str] | None = None  # for a command: a value of the control run, and one of the changed run


@dataclass(frozen=True, kw_only=True)
class Endings:
    """How many attempts of one configuration failed, over all its scenarios."""

    bad: int
    of: int

    @property
    def steady(self) -> bool:
        return self.bad in (0, self.of)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two configurations that differ in exactly one variable, each represented by its simplest run."""

    control: Outcome
    changed: Outcome
    controls: Endings
    changes: Endings

    @property
    def steady(self) -> bool:
        """Whether the attempts of each side agree."""
        return self.controls.steady and self.changes.steady

    @property
    def ends_alike(self) -> bool:
        one, other = self.control.verdict, self.changed.verdict
        return (one.status, one.kind, one.cause) == (other.status, other.kind, other.cause)


def one_of(*values: str) -> ValueTest:
    return ValueFilter(test=Test.ONE_OF, values=values).allows


def other_than(*values: str) -> ValueTest:
    return ValueFilter(test=Test.OTHER_THAN, values=values).allows


def same_value(one: str, other: str) -> bool:
    """Whether two values are equal; 1 and 1.0 are."""
    return one == other or (is_number(one) and is_number(other) and float(one) == float(other))


def is_number(value: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}(\.[0-9]+)?", value) is not None


def is_evidence(outcome: Outcome) -> bool:
    """Whether the run is the final attempt, judged, and not flaky."""
    return outcome.final and outcome.verdict.status in _EVIDENCE and not outcome.flaky


def passed(outcome: Outcome) -> bool:
    return outcome.verdict.status is Status.PASS


def configuration(outcome: Outcome) -> dict[str, str]:
    """Return the settings of a run. Its actual backend and device replace the requirements of its scenario."""
    backend = outcome.spec.backend or dict(outcome.spec.settings).get("needs.backend", "")
    # On gloo, our program gets INFO for DETAIL, which only adds lines to the log; see docs/scenarios.md.
    checks = outcome.spec.backend == "nccl" and dict(outcome.spec.settings).get(_DEBUG) == "DETAIL"
    quiet = _ONLY_LOGS if checks else (*_ONLY_LOGS, _DEBUG)
    chosen = {key: value for key, value in outcome.spec.settings if not key.startswith(("needs.", *quiet))}
    return {**chosen, "backend": backend, "device": outcome.spec.device}


def setting(outcome: Outcome, key: str) -> str:
    """Return the value of a key in that run: the chosen value, else the default, else ""."""
    return _value(_all_settings(outcome), key)


def endings(outcomes: Sequence[Outcome]) -> Callable[[Outcome], Endings]:
    """Return a function from a run to the endings of all attempts with its configuration."""
    last = {outcome.spec.scenario: outcome.spec.spec_hash for outcome in outcomes if outcome.final}
    counted: dict[object, list[bool]] = {}
    for attempt in outcomes:
        if (
            _is_about_program(attempt)
            and last.get(attempt.spec.scenario) == attempt.spec.spec_hash
            and _same_launch(attempt)
        ):
            counted.setdefault(_key(attempt), []).append(own_status(attempt) is not Status.PASS)

    def of(outcome: Outcome) -> Endings:
        ended = counted.get(_key(outcome), [])
        return Endings(bad=sum(ended), of=len(ended))

    return of


def contrasts(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[Contrast, ...]:
    """Return every contrast of that variable, simplest first. The order of the outcomes does not matter."""
    of = endings(outcomes)
    representatives = _one_per_configuration(outcome for outcome in sorted(outcomes, key=simplest) if _judged(outcome))
    return tuple(
        Contrast(control=control, changed=changed, controls=of(control), changes=of(changed))
        for control, changed in _candidates(variable, representatives)
        if _comparable(control, changed)
    )


def steady_contrasts(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[Contrast, ...]:
    """Return the contrasts in which all attempts of each side agree."""
    return tuple(contrast for contrast in contrasts(variable, outcomes) if contrast.steady)


def unjudged_pairs(variable: Variable, outcomes: Sequence[Outcome]) -> tuple[tuple[Outcome, Outcome], ...]:
    """Return pairs of runs that differ in this variable only, but of which a run was skipped, broken or killed.

    They explain why there is no contrast.
    """
    return tuple(
        pair
        for pair in _candidates(variable, [outcome for outcome in outcomes if outcome.final])
        if not all(map(_judged, pair))
    )


def simplest(outcome: Outcome) -> tuple[object, ...]:
    """Return a unique sort key that puts the run with the fewest settings first."""
    return len(outcome.spec.settings), outcome.spec.scenario, outcome.attempt, outcome.spec.spec_hash, outcome.dir


def _judged(outcome: Outcome) -> bool:
    return outcome.final and _is_about_program(outcome)


def _is_about_program(outcome: Outcome) -> bool:
    """Whether the result is evidence about the program. A rank that was killed from outside is not."""
    return own_status(outcome) in _EVIDENCE and outcome.verdict.cause != Cause.KILLED


def _same_launch(outcome: Outcome) -> bool:
    """Whether the launch has no diagnostic change."""
    return outcome.spec.deepening is None or outcome.spec.deepening.change == SecondRun.AGAIN


def _key(outcome: Outcome) -> object:
    """Return the identity of a configuration: its settings and the criteria of its verdict."""
    decided = _all_settings(outcome)
    return (
        frozenset((key, value) for key, value in decided.items() if value != _DEFAULTS.get(key, "")),
        outcome.spec.criteria,
    )


def _one_per_configuration(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the first run of each configuration."""
    first: dict[object, Outcome] = {}
    for outcome in outcomes:
        first.setdefault(_key(outcome), outcome)
    return list(first.values())


def _candidates(variable: Variable, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return control and changed run of each pair, simplest first."""
    valued = [(outcome, setting(outcome, variable.keys[0])) for outcome in outcomes]
    changed = [(outcome, value) for outcome, value in valued if variable.with_it(value)]
    controls = [(outcome, value) for outcome, value in valued if variable.without(value)]
    related = (
        (control, other)
        for (control, before), (other, after) in product(controls, changed)
        if variable.related(before, after)
    )
    return sorted((pair for pair in related if _differing_keys(variable, *pair) == set(variable.keys)), key=_pair_order)


def _differing_keys(variable: Variable, control: Outcome, changed: Outcome) -> set[str]:
    """Return the keys in which two runs differ, without those that cannot explain different verdicts."""
    differ = differences(control, changed)
    differ -= (
        {key for key in differ if key.startswith(variable.ignored_prefixes)} if variable.ignored_prefixes else set()
    )
    return differ - {_STEPS} if _STEPS in differ and _steps_do_not_matter(control, changed) else differ


def _steps_do_not_matter(one: Outcome, other: Outcome) -> bool:
    """Whether a different number of steps cannot explain different verdicts.

    The longer run passed, or failed in a step that the shorter one has too.
    """
    shorter, longer = sorted((one, other), key=_steps)
    if Cause.EXPECTATION_MISSED in (shorter.verdict.cause, longer.verdict.cause):
        return False
    failed_in = longer.culprit.step if longer.culprit else None
    return passed(longer) or (failed_in is not None and failed_in <= _steps(shorter))


def _steps(outcome: Outcome) -> float:
    """Return the number of steps. Without a limit it is infinite, and the run is compared with no other."""
    steps = setting(outcome, _STEPS)
    return float(steps) if is_number(steps) else math.inf


def differences(one: Outcome, other: Outcome) -> set[str]:
    """Return the keys in which two runs differ. For a skipped run only the scenario's own keys are known."""
    left, right = _all_settings(one), _all_settings(other)
    skipped = Status.SKIP in (one.verdict.status, other.verdict.status)
    unknown = {"device", *dict((*one.spec.chosen, *other.spec.chosen))} if skipped else set()
    keys = {key for key in {*left, *right} - unknown if not (skipped and key.startswith("fault."))}
    return {key for key in keys if _value(left, key) != _value(right, key)}


def _all_settings(outcome: Outcome) -> dict[str, str]:
    """Return the configuration, with the values that were chosen for its shape or machine."""
    return {**configuration(outcome), **dict(outcome.spec.chosen)}


def _value(decided: Mapping[str, str], key: str) -> str:
    return decided.get(key, _DEFAULTS.get(key, ""))


def _comparable(control: Outcome, changed: Outcome) -> bool:
    causes = (control.verdict.cause, changed.verdict.cause)
    prefixes = tuple(prefix for cause in causes if (prefix := row_of(cause).criteria))
    return _criteria(control, prefixes) == _criteria(changed, prefixes)


def _criteria(outcome: Outcome, prefixes: tuple[str, ...]) -> Mapping[str, str]:
    return {key: value for key, value in outcome.spec.criteria if key.startswith(prefixes)} if prefixes else {}


def _pair_order(pair: tuple[Outcome, Outcome]) -> tuple[object, ...]:
    """Return a unique sort key, so that the result does not depend on the order of the outcomes."""
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
