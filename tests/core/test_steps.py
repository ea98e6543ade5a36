"""Which collectives belong to which optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
from builders import board, call, collective
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Call, Collective, StatusFile, StepRow, Tally
from nsa_harness.core.evidence.steps import by_step, entered_s, ledger_table, python_calls, step_rows

ZERO_NS = 1_800_000_000_000_000_000


def at(seq: int, at_s: float, op: str = "all_reduce", **changes: Any) -> Collective:
    return collective(seq, op, created_ns=ZERO_NS + round(at_s * 1e9), **changes)


def trained(*steps_s: float, first: int = 1, calls: tuple[Call, ...] = (), **changes: Any) -> StatusFile:
    """A rank whose steps were done at these times."""
    facts = {"zero_ns": ZERO_NS, "steps_s": tuple(enumerate(steps_s, start=first)), "calls": calls}
    return board(**{**facts, **changes})


def counts(rows: tuple[StepRow, ...]) -> dict[int, int]:
    return {step: sum(tally.count for tally in row.tallies) for step, row in by_step(rows).items()}


def test_a_collective_belongs_to_the_step_that_was_in_progress_when_it_was_entered() -> None:
    rows = step_rows(trained(1.0, 2.0), [at(1, 0.5), at(2, 1.0), at(3, 1.5), at(4, 2.5)])
    assert counts(rows) == {1: 2, 2: 1, 3: 1}
    assert [row.done_s for row in rows] == [1.0, 2.0, None]


def test_without_a_common_clock_or_a_finished_step_there_is_no_ledger() -> None:
    assert step_rows(trained(1.0, zero_ns=None), [at(1, 0.5)]) == ()
    assert step_rows(trained(), [at(1, 0.5)]) == ()
    assert entered_s(trained(zero_ns=None), at(1, 0.5)) is None


def test_operations_groups_and_what_is_called_are_counted_apart() -> None:
    entered = [at(1, 0.1), at(2, 0.2), at(3, 0.3, "barrier"), at(1, 0.4, group="1"), at(4, 0.55)]
    made = call(1, entered_s=0.5, left_s=0.6)
    (done, _) = step_rows(trained(1.0, calls=(made,)), entered)
    assert done.tallies == (
        Tally(group="0", op="all_reduce", from_python=False, count=2),
        Tally(group="0", op="all_reduce", from_python=True, count=1),
        Tally(group="0", op="barrier", from_python=False, count=1),
        Tally(group="1", op="all_reduce", from_python=False, count=1),
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"left_s": None}, True),
        ({"left_s": 1.4}, False),
        ({"entered_s": 1.6}, False),
        ({"group": "1"}, False),
        ({"op": "new_group"}, False),
        ({"op": "wait all_reduce"}, False),
    ],
)
def test_a_collective_comes_from_the_call_of_its_group_that_it_lies_within(
    changes: dict[str, Any], found: bool
) -> None:
    made = call(1, **{"entered_s": 1.0, "left_s": 2.0, **changes})
    assert python_calls(trained(calls=(made,)), [at(1, 1.5)]) == ({("0", 1): made} if found else {})


def test_calls_within_a_tenth_of_a_millisecond_are_matched_in_their_order_the_newest_first() -> None:
    """Both clocks are read a moment apart: by their times alone each of these lies within several calls."""
    made = tuple(call(number, entered_s=1 + number / 1e5, left_s=1 + number / 1e5 + 2e-5) for number in (1, 2, 3))
    entered = [at(seq, 1 + number / 1e5) for seq, number in ((7, 3), (8, 4), (9, 5))]
    assert python_calls(trained(calls=made), entered) == {("0", 7): made[0], ("0", 8): made[1], ("0", 9): made[2]}
    assert python_calls(trained(calls=made), entered[2:]) == {("0", 9): made[2]}, "the older ones are lost"
    other = at(9, 1.00005, "barrier")
    assert python_calls(trained(calls=made), [*entered[:2], other])["0", 9] == made[2], "of another kind: the nearest"


def test_steps_before_a_hole_in_the_recorder_are_left_out() -> None:
    """The ring was overwritten; an old entry was kept only for being open."""
    entered = [at(1, 0.5), at(7, 1.5), at(8, 2.5), at(9, 3.5)]
    assert counts(step_rows(trained(1.0, 2.0, 3.0), entered)) == {3: 1, 4: 1}


def test_steps_before_the_first_remembered_number_are_left_out() -> None:
    assert counts(step_rows(trained(1.0, 2.0), [at(5, 0.5), at(6, 1.5)])) == {2: 1, 3: 0}


def test_steps_before_the_first_remembered_call_are_left_out() -> None:
    made = call(257, entered_s=1.5, left_s=1.6)
    assert counts(step_rows(trained(1.0, 2.0, calls=(made,)), [at(1, 0.5), at(2, 1.55)])) == {3: 0}


def test_a_step_whose_begin_was_overwritten_is_left_out() -> None:
    assert counts(step_rows(trained(1.0, 2.0, first=300), [at(1, 1.5)])) == {301: 1, 302: 0}


def test_equal_steps_in_a_row_are_one_row_and_a_different_one_is_not() -> None:
    entered = [at(1, 0.5), at(2, 1.5), at(3, 3.5), at(4, 4.5)]
    board = trained(1.0, 2.0, 3.0, 4.0, gradients={1: 6, 2: 6, 3: 6, 4: 6})
    assert [(row.step, row.last_step, row.gradients) for row in step_rows(board, entered)] == [
        (1, 2, 6), (3, 3, 6), (4, 4, 6), (5, 5, None)
    ]  # fmt: skip


def test_of_steps_that_all_differ_only_the_newest_are_kept() -> None:
    board = trained(*[float(step) for step in range(1, 101)], gradients={step: step for step in range(1, 101)})
    rows = step_rows(board, [at(1, 0.5)])
    assert (len(rows), rows[0].step, rows[-1].step) == (64, 38, 101)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_merging_rows_loses_no_step_and_no_collective(entered: list[int]) -> None:
    times = [step + (number + 1) / 10 for step, count in enumerate(entered) for number in range(count)]
    collectives = [at(seq, at_s) for seq, at_s in enumerate(times, start=1)]
    rows = step_rows(trained(*[step + 1.0 for step in range(len(entered))]), collectives)
    assert counts(rows) == {**dict(enumerate(entered, start=1)), len(entered) + 1: 0}


def test_people_read_a_line_a_rank_for_every_step_that_differs_from_the_one_before() -> None:
    rows = {
        0: step_rows(trained(1.0, 2.0, 3.0), [at(1, 0.5), at(2, 1.5), at(3, 2.5)]),
        1: step_rows(trained(1.0, 2.0, gradients={1: 6, 2: 6}), [at(1, 0.5), at(2, 1.5)]),
    }
    assert "\n".join(list(ledger_table(rows))[1:]) == (
        "steps 1 to 2\n"
        "  rank 0  done: all_reduce x1 group 0 below\n"
        "  rank 1  done, 6 gradients: all_reduce x1 group 0 below\n"
        "step 3\n"
        "  rank 0  done: all_reduce x1 group 0 below\n"
        "  rank 1  in progress: no collective\n"
        "step 4\n"
        "  rank 0  in progress: no collective\n"
        "  rank 1  not remembered, or not reached"
    )
