"""Configuration: what a run was set to, and which pairs of runs differ in exactly one thing."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from nsa_harness.core.diagnosis.causes import Cause, row_of
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
_ONLY_LOGS = ("run.env.NCCL_DEBUG", "run.env.TORCH_CPP_LOG_LEVEL", "run.env.TORCH_SHOW_CPP_STACKTRACES")

Test = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A question for two runs: all keys of `keys` differ between them and no other does.

    The value of the first key satisfies `without` in the control run and `with_it` in the changed run, and the two
    values together satisfy `related`.
    """

    keys: tuple[str, ...]
    without: Test
    with_it: Test
    related: Callable[[str, str], bool] = operator.ne
    besides: tuple[str, ...] = ()  # beginnings of keys that mean something in one of the two runs only
    undo: tuple[str, ...] = ()  # overrides that make the control run out of a changed one; empty where none does


@dataclass(frozen=True, kw_only=True)
class RunPair:
    control: Outcome
    changed: Outcome


def one_of(*values: str) -> Test:
    return lambda value: value in values


def other_than(*values: str) -> Test:
    return lambda value: value not in values


def is_number(value: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}(\.[0-9]+)?", value) is not None


def is_evidence(outcome: Outcome) -> bool:
    """The run that counts, judged, and not flaky: only such a run supports or rules out anything."""
    return outcome.final and outcome.verdict.status in _EVIDENCE and not outcome.flaky


def passed(outcome: Outcome) -> bool:
    return outcome.verdict.status is Status.PASS


def configuration(outcome: Outcome) -> dict[str, str]:
    """What decided the run. What a scenario needed is replaced by what it got."""
    backend = outcome.backend or dict(outcome.settings).get("needs.backend", "")
    # On gloo, our program gets INFO for DETAIL, which adds lines to the log and nothing else; see docs/scenarios.md.
    quiet = _ONLY_LOGS if outcome.backend == "nccl" else (*_ONLY_LOGS, "run.env.TORCH_DISTRIBUTED_DEBUG")
    chosen = {key: value for key, value in outcome.settings if not key.startswith(("needs.", *quiet))}
    return {**chosen, "backend": backend, "device": outcome.device}


def setting(outcome: Outcome, key: str) -> str:
    """The value of a key in that run, its default where the scenario says nothing; empty where there is none."""
    return _value(configuration(outcome), key)


def pairs(contrast: Contrast, outcomes: Sequence[Outcome]) -> tuple[RunPair, ...]:
    """Every pair that answers the question, plainest first, the same whatever the order of the outcomes."""
    return tuple(filter(_comparable, _candidates(contrast, outcomes)))


def blocked_pairs(contrast: Contrast, outcomes: Sequence[Outcome]) -> tuple[RunPair, ...]:
    """The pairs that would answer it, if each of the two had been judged."""
    found = _candidates(contrast, outcomes)
    return tuple(pair for pair in found if not (is_evidence(pair.control) and is_evidence(pair.changed)))


def _candidates(contrast: Contrast, outcomes: Sequence[Outcome]) -> list[RunPair]:
    """Plainest first."""
    valued = [(outcome, setting(outcome, contrast.keys[0])) for outcome in outcomes if outcome.final]
    changed = [(outcome, value) for outcome, value in valued if contrast.with_it(value)]
    controls = [(outcome, value) for outcome, value in valued if contrast.without(value)]
    related = (
        RunPair(control=control, changed=other)
        for (control, before), (other, after) in product(controls, changed)
        if contrast.related(before, after)
    )
    return sorted((pair for pair in related if _differing_keys(contrast, pair) == set(contrast.keys)), key=_plainest)


def _differing_keys(contrast: Contrast, pair: RunPair) -> set[str]:
    """The keys that could be the reason for two different verdicts."""
    differ = differences(pair.control, pair.changed)
    differ -= {key for key in differ if key.startswith(contrast.besides)} if contrast.besides else set()
    return differ - {_STEPS} if _STEPS in differ and _steps_do_not_matter(pair) else differ


def _steps_do_not_matter(pair: RunPair) -> bool:
    """More steps only ask more: the longer run passed, or it failed in a step that the shorter one has too."""
    shorter, longer = sorted((pair.control, pair.changed), key=_steps)
    if Cause.EXPECTATION_MISSED in (shorter.verdict.cause, longer.verdict.cause):
        return False
    failed_in = longer.culprit.step if longer.culprit else None
    return passed(longer) or (failed_in is not None and failed_in <= _steps(shorter))


def _steps(outcome: Outcome) -> float:
    """None asked for is endless: such a run is compared to no other."""
    asked = setting(outcome, _STEPS)
    return float(asked) if is_number(asked) else math.inf


def differences(one: Outcome, other: Outcome) -> set[str]:
    """The keys in which two runs differ. What a run that was never made would have run on is not known."""
    left, right = configuration(one), configuration(other)
    unknown = {"device"} if Status.SKIP in (one.verdict.status, other.verdict.status) else set()
    keys = {*left, *right} - unknown
    return {key for key in keys if _value(left, key) != _value(right, key)}


def _value(chosen: Mapping[str, str], key: str) -> str:
    return chosen.get(key, _DEFAULTS.get(key, ""))


def _comparable(pair: RunPair) -> bool:
    if not (is_evidence(pair.control) and is_evidence(pair.changed)):
        return False
    causes = (pair.control.verdict.cause, pair.changed.verdict.cause)
    prefixes = tuple(prefix for cause in causes if (prefix := row_of(cause).criteria))
    return _criteria(pair.control, prefixes) == _criteria(pair.changed, prefixes)


def _criteria(outcome: Outcome, prefixes: tuple[str, ...]) -> Mapping[str, str]:
    return {key: value for key, value in outcome.criteria if key.startswith(prefixes)} if prefixes else {}


def _plainest(pair: RunPair) -> tuple[object, ...]:
    """Whole, so that equal runs give equal answers in every order."""
    one, other = pair.control, pair.changed
    size = len(one.settings) + len(other.settings)
    return (size, one.scenario, other.scenario, one.spec_hash, other.spec_hash, one.attempt, other.attempt, one.dir)
