"""The order of gradients over ranks and steps."""

from __future__ import annotations

from builders import ended, evidence, rank_evidence

from nsa_harness.core.diagnosis.engine import diagnose
from nsa_harness.core.evidence.gradients import OutOfOrder, first_out_of_order, read_orders
from nsa_harness.core.verdict.verdict import judge

AB, BA = ("head.weight", "body.weight"), ("body.weight", "head.weight")


def test_the_same_order_on_all_ranks_is_no_difference_also_where_it_changes() -> None:
    assert first_out_of_order({0: {1: AB, 3: BA}, 1: {1: AB, 3: BA}}) is None


def test_a_rank_unlike_the_most_is_named_with_the_step_and_the_first_gradient() -> None:
    orders = {rank: {1: AB, 4: BA if rank == 2 else AB} for rank in range(4)}
    assert first_out_of_order(orders) == OutOfOrder(
        step=4, rank=2, position=1, name="body.weight", expected="head.weight", other=0
    )


def test_a_step_that_is_not_written_had_the_order_of_the_one_before() -> None:
    found = first_out_of_order({0: {1: AB, 3: BA}, 1: {1: AB, 3: BA, 5: AB}})
    assert found is not None
    assert (found.step, found.rank) == (5, 1)


def test_a_gradient_that_is_missing_is_no_other_order() -> None:
    assert first_out_of_order({0: {1: AB}, 1: {1: ("body.weight",)}}) is None
    assert first_out_of_order({0: {1: AB}, 1: {}}) is None
    assert first_out_of_order({}) is None


def test_lines_of_another_form_are_passed_over() -> None:
    lines = [{"step": 1, "arrived": ["a", "b"]}, {"step": "2", "arrived": ["b"]}, {"step": 3}, {"arrived": []}]
    assert read_orders(lines) == {1: ("a", "b")}


def test_another_order_is_a_finding_of_a_run_that_passed() -> None:
    order = first_out_of_order({0: {2: AB}, 1: {2: BA}})
    seen = evidence(*(rank_evidence(rank, exit=ended(rank)) for rank in (0, 1)), gradient_order=order)
    (found,) = diagnose(seen, judge(seen)).findings
    assert (found.code, found.ranks) == ("gradient_order_differs", (1,))
    assert found.claim == (
        "in step 2 the gradients of rank 1 arrived in another order than those of rank 0: number 1 was body.weight,"
        " there head.weight"
    )
