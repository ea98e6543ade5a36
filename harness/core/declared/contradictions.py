"""Keys that are right each for itself and make no sense together, each with its place."""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.declared.env_names import name_mistakes
from harness.core.declared.layers import named_layers
from harness.core.declared.scenario import NSA_TRAIN, FaultSection, FaultWhenSection, Scenario
from harness.core.declared.scenario_types import (
    Attention,
    CommHook,
    Dtype,
    ExpectedVerdict,
    FaultKind,
    Implementation,
    Phase,
    Unit,
    Wrapper,
)
from harness.core.diagnosed.causes import CAUSES_OF_VERDICTS
from harness.core.suggest import did_you_mean

_OURS_ONLY = ("model", "train", "gc", "parallel", "trace")
_LAYERLESS = (FaultKind.SKIP_COLLECTIVE,)

Location = tuple[str | int, ...]


def contradictions(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    """Every contradiction of a scenario whose keys are sound: (place, what is wrong)."""
    yield from _program(scenario)
    yield from _expectations(scenario)
    if scenario.is_ours:
        yield from _model(scenario)
        yield from _training(scenario)
        yield from ((("run", "env", name), what) for name, what in name_mistakes(scenario.run.env, ours=True))
    if scenario.fault is not None:
        yield from _fault(scenario, scenario.fault)


def _program(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    run = scenario.run
    if run.command is not None and run.program != NSA_TRAIN:
        yield ("run", "command"), "given together with program; keep one of the two"
    if scenario.is_ours:
        return
    for section in _OURS_ONLY:
        if section in scenario.model_fields_set:
            yield (section,), f"only {NSA_TRAIN} reads this; remove it and pass options in run.args"


def _expectations(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    expect = scenario.expect
    if expect.cause and expect.verdict is ExpectedVerdict.PASS:
        yield ("expect", "cause"), "a PASS has no cause; remove it or expect FAIL or HANG"
    if expect.cause and expect.cause not in CAUSES_OF_VERDICTS:
        suggestion = did_you_mean(expect.cause, CAUSES_OF_VERDICTS)
        yield ("expect", "cause"), f"no such cause{suggestion or '; docs/findings.md lists them'}"
    for name, bound in expect.metrics.items():
        if bound.unit is Unit.UNIFORM and not scenario.is_ours:
            what = f"only {NSA_TRAIN} has a vocabulary that is known; give the bounds as plain numbers"
            yield ("expect", "metrics", name, "unit"), what


def _model(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    model = scenario.model
    if model.attention is Attention.NSA:
        return
    words = f"attention is {model.attention}"
    if model.branch != "all":
        yield ("model", "branch"), f"{words}, which has no branches; remove it or set model.attention: nsa"
    if model.impl is not Implementation.AUTO:
        yield ("model", "impl"), f"{words}, which has one implementation; remove it"
    if model.stop_gradient_gates:
        yield ("model", "stop_gradient_gates"), f"{words}, which has no gates; remove it or set model.attention: nsa"


def _training(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    wrapper, train = scenario.parallel.wrapper, scenario.train
    if scenario.parallel.comm_hook is not CommHook.NONE and wrapper is not Wrapper.DDP:
        yield ("parallel", "comm_hook"), f"a hook of DDP, and the wrapper is {wrapper}; set parallel.wrapper: ddp"
    if scenario.model.dtype is Dtype.FLOAT16 and wrapper in (Wrapper.FSDP, Wrapper.FSDP1):
        what = f"float16 needs loss scaling, which {wrapper} does not share; use bfloat16"
        yield ("model", "dtype"), what
    if train.phase is Phase.DATA and (train.resume or train.checkpoint_every):
        key = "resume" if train.resume else "checkpoint_every"
        yield ("train", key), "the phase is data, which has no model; set train.phase: step"


def _fault(scenario: Scenario, fault: FaultSection) -> Iterator[tuple[Location, str]]:
    if fault.rank >= scenario.run.ranks:
        yield ("fault", "rank"), f"expected a rank below run.ranks, which is {scenario.run.ranks}, got {fault.rank}"
    if scenario.is_ours and fault.step > scenario.train.steps:
        yield ("fault", "step"), f"expected at most train.steps, which is {scenario.train.steps}, got {fault.step}"
    in_recomputation = fault.when is not None and fault.when.in_recomputation
    if fault.layer is None and fault.kind not in _LAYERLESS and not in_recomputation:
        yield ("fault",), f"{fault.kind} is planted in a layer; add `layer: 0`"
    if fault.when is not None:
        yield from _fault_when(fault.kind, fault.when)


def _fault_when(kind: FaultKind, when: FaultWhenSection) -> Iterator[tuple[Location, str]]:
    for key in ("recomputed", "any_recomputed"):
        choice = getattr(when, key)
        if choice is not None and not named_layers(choice):
            yield ("fault", "when", key), f'expected layers by their numbers, "4:9" or [3, 8], got {choice}'
    if kind in _LAYERLESS:
        yield ("fault", "when"), f"{kind} happens in no layer, so it cannot depend on one; remove it"
