"""The order of gradients over ranks and steps."""

from __future__ import annotations

from builders import diagnose, ended, evidence, rank_evidence

from nsa_harness.core.evidence.gradients import (
    BucketOrder,
    OrderDifference,
    compare_bucket_order,
    first_order_difference,
    read_bucket_orders,
    read_orders,
)
from nsa_harness.core.outcome.outcome import passed_checks
from nsa_harness.core.verdict.verdict import judge

AB, BA = ("head.weight", "body.weight"), ("body.weight", "head.weight")


def test_the_same_order_on_all_ranks_is_no_difference_also_where_it_changes() -> None:
    assert first_order_difference({0: {1: AB, 3: BA}, 1: {1: AB, 3: BA}}) is None


def test_a_rank_unlike_the_most_is_named_with_the_step_and_the_first_gradient() -> None:
    orders = {rank: {1: AB, 4: BA if rank == 2 else AB} for rank in range(4)}
    assert first_order_difference(orders) == OrderDifference(
        step=4, rank=2, position=1, name="body.weight", expected="head.weight", other=0
    )


def test_a_step_that_is_not_written_had_the_order_of_the_one_before() -> None:
    found = first_order_difference({0: {1: AB, 3: BA}, 1: {1: AB, 3: BA, 5: AB}})
    assert found is not None
    assert (found.step, found.rank) == (5, 1)


def test_a_gradient_that_is_missing_is_no_other_order() -> None:
    assert first_order_difference({0: {1: AB}, 1: {1: ("body.weight",)}}) is None
    assert first_order_difference({0: {1: AB}, 1: {}}) is None
    assert first_order_difference({}) is None


def test_lines_of_another_form_are_passed_over() -> None:
    lines = [{"step": 1, "arrived": ["a", "b"]}, {"step": "2", "arrived": ["b"]}, {"step": 3}, {"arrived": []}]
    assert read_orders(lines) == {1: ("a", "b")}


def test_another_order_is_a_finding_of_a_run_that_passed() -> None:
    order = first_order_difference({0: {2: AB}, 1: {2: BA}})
    seen = evidence(*(rank_evidence(rank, exit=ended(rank)) for rank in (0, 1)), gradient_order=order)
    (found,) = diagnose(seen, judge(seen)).findings
    assert (found.code, found.ranks) == ("gradient_order_differs", (1,))
    assert (found.facts["other_rank"], found.facts["position"]) == (0, 1)
    assert (found.facts["parameter"], found.facts["parameter_there"]) == ("body.weight", "head.weight")


def ready(*numbers: int) -> dict[str, object]:
    return {"step": 2, "buckets": [{"bucket": number, "parameters": 3, "last": "a"} for number in numbers]}


def test_buckets_are_read_in_the_order_in_which_they_became_ready() -> None:
    lines = [ready(1, 0), {"step": 3}, {"step": 4, "buckets": "no"}, {"step": "5", "buckets": []}]
    assert read_bucket_orders(lines) == {2: ("bucket 1", "bucket 0")}
    assert read_bucket_orders([{"step": 1, "buckets": [{"bucket": "x"}, 7, {"bucket": 3}]}]) == {1: ("bucket 3",)}


def test_buckets_of_one_rank_are_compared_with_nothing() -> None:
    assert compare_bucket_order({0: read_bucket_orders([ready(0, 1)]), 1: {}}) is None


def test_buckets_that_became_ready_in_another_order_are_told_with_the_gradients() -> None:
    order = first_order_difference({0: {2: AB}, 1: {2: BA}})
    for numbers, swapped in (((1, 0), {"rank": 1, "first": "bucket 1", "second": "bucket 0"}), ((0, 1), None)):
        both = compare_bucket_order({0: read_bucket_orders([ready(0, 1)]), 1: read_bucket_orders([ready(*numbers)])})
        ranks = (rank_evidence(rank, exit=ended(rank)) for rank in (0, 1))
        seen = evidence(*ranks, gradient_order=order, bucket_order=both)
        (found,) = diagnose(seen, judge(seen)).findings
        assert (found.facts["swapped_buckets"], found.facts["buckets"]) == (swapped, 2)


def test_buckets_that_became_ready_in_the_same_order_are_said_to_be_checked() -> None:
    seen = evidence(rank_evidence(0, exit=ended(0)), bucket_order=BucketOrder(count=4, difference=None))
    assert "4 buckets of DDP ready in the same order on every rank" in list(passed_checks(seen, judge(seen)))
    parted = OrderDifference(step=2, rank=1, position=1, name="bucket 1", expected="bucket 0", other=0)
    seen = evidence(rank_evidence(0, exit=ended(0)), bucket_order=BucketOrder(count=4, difference=parted))
    assert [line for line in passed_checks(seen, judge(seen)) if "bucket" in line] == []
