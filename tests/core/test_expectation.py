"""What a scenario asked for, against what was seen."""

from __future__ import annotations

import math

import pytest
from builders import evidence, rank_evidence, worded
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.outcome.expectations import is_expected, missed_expectations
from nsa_harness.core.plan import Bound, Expect
from nsa_harness.core.report import Finding, Status


def traced(missing: int) -> RankTraces:
    return RankTraces(gradient_count=3, missing_count=missing, missing_parameters=(), buckets=())


def claims(bound: Bound, **metrics: float) -> list[str]:
    expect = Expect(metrics=(("loss_last", bound),))
    return [worded(one).claim for one in missed_expectations(expect, evidence(), metrics)]


def test_a_missed_number_is_a_finding_with_proof_and_advice() -> None:
    expect = Expect(metrics=(("loss_last", Bound(lt=5.6)),))
    assert [worded(one) for one in missed_expectations(expect, evidence(), {"loss_last": 5.7})] == [
        Finding(
            code="expectation_missed",
            claim="expect.metrics.loss_last: 5.7 is not < 5.6",
            ranks=(),
            place=None,
            confidence=1.0,
            proof=("spec.json",),
            advice="The run itself ended well. Correct the number in the scenario, or find what changed it.",
            facts={"variant": "metric", "metric": "loss_last", "value": 5.7, "sign": "<", "limit": 5.6},
        ),
    ]


@pytest.mark.parametrize(
    ("bound", "met", "violated", "sign"),
    [
        (Bound(lt=5.0), 4.9, 5.0, "<"),
        (Bound(le=5.0), 5.0, 5.1, "<="),
        (Bound(gt=5.0), 5.1, 5.0, ">"),
        (Bound(ge=5.0), 5.0, 4.9, ">="),
        (Bound(eq=5.0), 5.0, 4.9, "=="),
    ],
)
def test_each_bound_is_met_and_missed(bound: Bound, met: float, violated: float, sign: str) -> None:
    assert claims(bound, loss_last=met) == []
    assert claims(bound, loss_last=violated) == [f"expect.metrics.loss_last: {violated:g} is not {sign} 5"]
    assert claims(bound, loss_last=math.nan) == [f"expect.metrics.loss_last: nan is not {sign} 5"]


def test_every_bound_of_a_metric_must_hold() -> None:
    assert claims(Bound(gt=1.0, lt=2.0), loss_last=3.0) == ["expect.metrics.loss_last: 3 is not < 2"]
    assert claims(Bound(gt=2.0, lt=1.0), loss_last=1.5) == [
        "expect.metrics.loss_last: 1.5 is not < 1",
        "expect.metrics.loss_last: 1.5 is not > 2",
    ]


def test_a_number_that_was_not_reported_is_missed_and_the_reported_ones_are_named() -> None:
    text = "expect.metrics.loss_last: the run reported no such number (reported: {})"
    assert claims(Bound(lt=5.0), steps=1.0, loss=2.0) == [text.format("loss, steps")]
    assert claims(Bound(regex="loss (.*)")) == [text.format("none")]


def test_missing_gradients_are_counted_on_every_rank() -> None:
    expect = Expect(missing_grads=0)
    good = evidence(rank_evidence(0, traces=traced(0)), rank_evidence(1, traces=traced(0)))
    assert missed_expectations(expect, good, {}) == ()
    bad = evidence(*[rank_evidence(rank, traces=traced(count)) for rank, count in enumerate((2, 0, 1))])
    found = missed_expectations(expect, bad, {})
    assert [(worded(one).claim, one.ranks) for one in found] == [
        ("expect.missing_grads is 0, but the trace shows 2 on rank 0, 1 on rank 2", (0, 2))
    ]


def test_gradients_that_nobody_traced_are_missed_and_not_zero() -> None:
    seen = evidence(rank_evidence(0, traces=traced(0)), rank_evidence(1))
    found = missed_expectations(Expect(missing_grads=0), seen, {})
    assert [(worded(one).claim, one.ranks) for one in found] == [
        ("expect.missing_grads is 0, but the program printed no [GRAD-TRACE] line", (1,))
    ]


def test_what_is_not_expected_is_not_missed() -> None:
    assert missed_expectations(Expect(), evidence(rank_evidence(0)), {}) == ()


@pytest.mark.parametrize(
    ("expect", "status", "cause", "expected"),
    [
        (Expect(), Status.PASS, None, True),
        (Expect(), Status.FAIL, "exception", False),
        (Expect(verdict="HANG"), Status.HANG, "lock_cycle", True),
        (Expect(verdict="HANG", cause="lock_cycle"), Status.HANG, "lock_cycle", True),
        (Expect(verdict="HANG", cause="lock_cycle"), Status.HANG, "infinite_loop", False),
        (Expect(verdict="HANG"), Status.PASS, None, False),
        (Expect(verdict="HANG"), Status.SKIP, "missing_need", True),
        (Expect(), Status.ERROR, "harness_error", False),
    ],
)
def test_verdict_and_cause_are_compared_with_what_was_announced(
    expect: Expect, status: Status, cause: str | None, expected: bool
) -> None:
    assert is_expected(expect, status, cause) is expected


def test_what_must_be_found_and_was_not_is_missed_by_name() -> None:
    expect = Expect(findings=("memory_growth", "nan"))
    told = [worded(one).claim for one in missed_expectations(expect, evidence(), {}, {"nan", "dirty_exit"})]
    assert told == ["expect.findings: memory_growth was not found"]
    assert missed_expectations(expect, evidence(), {}, {"nan", "memory_growth"}) == ()


@pytest.mark.parametrize(("found", "expected"), [({"nan", "exception"}, True), ({"exception"}, False), (set(), False)])
def test_a_failure_is_as_expected_only_beside_what_must_be_found(found: set[str], expected: bool) -> None:
    expect = Expect(verdict="FAIL", cause="exception", findings=("nan",))
    assert is_expected(expect, Status.FAIL, "exception", found) is expected


@given(st.floats(allow_nan=True), st.floats(allow_nan=False))
def test_a_bound_and_its_opposite_are_never_both_met(value: float, limit: float) -> None:
    assert claims(Bound(lt=limit), loss_last=value) or claims(Bound(ge=limit), loss_last=value)
    assert claims(Bound(gt=limit), loss_last=value) or claims(Bound(le=limit), loss_last=value)
