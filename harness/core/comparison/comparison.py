"""Comparison: claims, each against the pairs of runs that can tell, and nothing against a single run.

A claim is what people blame or hope for, with the one setting that two runs must differ in to tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.comparison.configuration import (
    Contrast,
    RunPair,
    blocked_pairs,
    configuration,
    is_evidence,
    is_number,
    one_of,
    other_than,
    pairs,
    passed,
    setting,
)
from nsa_harness.core.report import Outcome

NO_CONTROL = "no control run"


class ClaimKind(StrEnum):
    CAUSE = "cause"  # without it a run passes, with it it does not
    CHANGE = "change"  # with and without it, one run passes and the other does not


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    kind: ClaimKind
    contrast: Contrast


def switch(key: str, on: str, *, off: str = "") -> Contrast:
    undo = (f"{key}={off}",) if off else ()
    return Contrast(keys=(key,), without=other_than(on), with_it=one_of(on), undo=undo)


def swap(key: str, control: tuple[str, ...], changed: tuple[str, ...], *, typed: str | None = None) -> Contrast:
    """`typed`: the key as the command line knows it."""
    undo = (f"{typed or key}={control[0]}",)
    return Contrast(keys=(key,), without=one_of(*control), with_it=one_of(*changed), undo=undo)


def rising(key: str) -> Contrast:
    return Contrast(
        keys=(key,),
        without=is_number,
        with_it=is_number,
        related=lambda control, changed: float(control) < float(changed),
    )


NCCL = replace(
    swap("backend", ("gloo",), ("nccl",), typed="needs.backend"), besides=("run.env.NCCL_", "run.env.TORCH_NCCL_")
)
NCCL_CLAIM = Claim(text="NCCL is the cause", kind=ClaimKind.CAUSE, contrast=NCCL)
ENVIRONMENT_CLAIMS = tuple(
    Claim(text=f"{name} changes it", kind=ClaimKind.CHANGE, contrast=switch(f"run.env.{name}", "1"))
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")
)


class ClaimResult(StrEnum):
    SUPPORTED = "supported"
    RULED_OUT = "ruled out"
    UNDECIDED = "undecided"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim with one result. A claim that pairs of runs answer differently has a row for each answer."""

    claim: Claim
    result: ClaimResult
    pair: RunPair | None  # None where the claim is not checked
    of_pairs: tuple[int, int]  # how many pairs of runs say so, of how many
    reason: str
    command: str | None  # the missing run


def compared(outcomes: Sequence[Outcome], claims: Sequence[Claim]) -> tuple[ClaimRow, ...]:
    return tuple(row for claim in claims for row in _rows(claim, outcomes))


def override_command(scenario: str, *overrides: str) -> str:
    return f"nsa-harness run {shlex.join((scenario, *overrides))}"


def takes_our_keys(outcome: Outcome) -> bool:
    """The program is ours. A foreign one knows nothing of model, gc and parallel, and chooses its device itself."""
    return outcome.device != "any" and not {"run.program", "run.command"} & set(configuration(outcome))


def silenced(contrast: Contrast, outcomes: Sequence[Outcome]) -> str:
    """ "ddp_nccl was SKIP": why runs that would have answered say nothing; empty where there are none."""
    for pair in blocked_pairs(contrast, outcomes)[:1]:
        return "; ".join(
            f"{run.scenario} {'is flaky' if run.flaky else f'was {run.verdict.status.value}'}"
            for run in (pair.control, pair.changed)
            if not is_evidence(run)
        )
    return ""


def _rows(claim: Claim, outcomes: Sequence[Outcome]) -> Iterator[ClaimRow]:
    found = pairs(claim.contrast, outcomes)
    if not found:
        reason, command = silenced(claim.contrast, outcomes) or NO_CONTROL, _missing_run(claim, outcomes)
        unknown = ClaimResult.NOT_CHECKED
        yield ClaimRow(claim=claim, result=unknown, pair=None, of_pairs=(0, 0), reason=reason, command=command)
    answers = [(_result(claim.kind, pair), pair) for pair in found]
    for result in ClaimResult:
        saying = [pair for answer, pair in answers if answer is result]
        if saying:
            count = (len(saying), len(found))
            reason = _reason(saying[0])
            yield ClaimRow(claim=claim, result=result, pair=saying[0], of_pairs=count, reason=reason, command=None)


def _result(kind: ClaimKind, pair: RunPair) -> ClaimResult:
    control, changed = passed(pair.control), passed(pair.changed)
    if control and not changed:
        return ClaimResult.SUPPORTED
    if kind is ClaimKind.CHANGE and changed and not control:
        return ClaimResult.SUPPORTED
    return ClaimResult.RULED_OUT if changed or _ended_alike(pair) else ClaimResult.UNDECIDED


def _ended_alike(pair: RunPair) -> bool:
    one, other = pair.control.verdict, pair.changed.verdict
    return (one.status, one.kind, one.cause) == (other.status, other.kind, other.cause)


def _reason(pair: RunPair) -> str:
    if passed(pair.control) != passed(pair.changed):
        return "breaks it" if passed(pair.control) else "passes with it, not without it"
    if passed(pair.control):
        return "passes with and without it"
    return (
        "ends the same way with and without it" if _ended_alike(pair) else "ends badly with and without it, not alike"
    )


def _missing_run(claim: Claim, outcomes: Sequence[Outcome]) -> str | None:
    """The control run of a failure that nobody announced, in which what is blamed was switched on."""
    key, undo = claim.contrast.keys[0], claim.contrast.undo
    bad = [
        outcome
        for outcome in outcomes
        if is_evidence(outcome)
        and not (passed(outcome) or outcome.expected)
        and takes_our_keys(outcome)
        and claim.contrast.with_it(setting(outcome, key))
    ]
    plainest = min(bad, key=lambda outcome: (len(outcome.settings), outcome.scenario), default=None)
    return override_command(plainest.scenario, *undo) if plainest and undo else None
