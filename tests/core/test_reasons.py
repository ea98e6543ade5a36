"""Which rank left out a call, a reduction or a step that the others made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import USER, board, call, mark
from hypothesis import given
from hypothesis import strategies as st
from nsa_harness.core.divergence.ledger import (
    OutOfBatches,
    SkippedCall,
    StepDifference,
    first_out_of_batches,
    first_skipped,
    first_step_of_difference,
    last_agreed,
)

from nsa_harness.core.evidence.evidence import Board, Call, Mark, StepRow, Tally
from nsa_harness.core.report import Place

REDUCE = call(1, position=5)
LOSS = Place(file=USER, line=37, function="step")


def made(*calls: Call, step: int = 1, position: int = 0, **changes: Any) -> Board:
    """A rank that made these calls and trains at this point."""
    return board(mark("forward", step=step, position=position), calls=calls, **changes)


def test_a_rank_that_went_on_to_the_next_step_without_the_call_skipped_it() -> None:
    skipped = first_skipped({0: made(REDUCE), 1: made(step=2)})
    assert skipped == SkippedCall(rank=1, call=REDUCE, step=1, counts=((0, 1), (1, 0)))
    assert skipped.place == LOSS


def test_ranks_that_made_the_same_calls_skipped_nothing() -> None:
    assert first_skipped({0: made(REDUCE), 1: made(REDUCE)}) is None
    assert first_skipped({}) is None
    assert first_skipped({0: made(REDUCE)}) is None


def test_a_rank_that_has_not_come_to_the_call_yet_skipped_nothing() -> None:
    assert first_skipped({0: made(REDUCE), 1: made()}) is None
    assert first_skipped({0: made(call(1, step=2), step=2), 1: made(position=99)}) is None


@pytest.mark.parametrize(("position", "skipped"), [(4, False), (5, False), (6, True)])
def test_a_rank_further_on_in_the_same_step_skipped_it(position: int, skipped: bool) -> None:
    assert (first_skipped({0: made(REDUCE), 1: made(position=position)}) is not None) is skipped


def test_a_rank_that_calls_something_else_at_that_point_skipped_it() -> None:
    other = call(1, "broadcast", position=6)
    found = first_skipped({0: made(REDUCE, position=5), 1: made(other, position=5)})
    assert found == SkippedCall(rank=1, call=REDUCE, step=1, counts=((0, 1), (1, 0)))


def test_a_rank_that_met_the_same_operation_later_on_another_line_did_not_skip_it() -> None:
    later = call(1, position=6, place=Place(file=USER, line=40, function="step"))
    assert first_skipped({0: made(REDUCE, position=5), 1: made(later, position=5)}) is None


def test_the_same_operation_on_another_line_is_the_other_half_of_a_condition() -> None:
    elsewhere = call(1, position=5, place=Place(file=USER, line=40, function="step"))
    assert first_skipped({0: made(REDUCE), 1: made(elsewhere)}) is None


def test_the_other_half_of_a_condition_is_no_call_left_out_in_later_steps_either() -> None:
    """One rank makes the call where it opens a port, the others where they ask for it, and all go on."""
    elsewhere = call(1, position=5, place=Place(file=USER, line=40, function="step"))
    assert first_skipped({0: made(REDUCE, step=2), 1: made(elsewhere, step=2)}) is None
    once_less = {0: made(REDUCE, call(2, position=6), step=2), 1: made(elsewhere, step=2)}
    assert first_skipped(once_less) is not None


def test_a_call_before_that_point_does_not_show_that_the_rank_passed_it() -> None:
    before = call(1, "broadcast", position=4)
    assert first_skipped({0: made(before, call(2, position=5)), 1: made(before)}) is None


def test_a_rank_that_only_left_did_not_pass_the_call_and_one_that_tore_down_its_groups_did() -> None:
    """The first is an early exit, which has a cause of its own."""
    destroyed = call(1, "destroy_process_group", position=5)
    assert first_skipped({0: made(REDUCE), 1: made(exit_s=9.0)}) is None
    assert first_skipped({0: made(REDUCE, destroyed), 1: made(destroyed, exit_s=9.0)}) is not None


def test_the_call_that_is_missing_is_named_and_not_the_first_of_its_kind() -> None:
    first, second = call(1, position=5), call(2, position=8)
    found = first_skipped({0: made(first, second), 1: made(first, step=2)})
    assert found == SkippedCall(rank=1, call=second, step=1, counts=((0, 2), (1, 1)))


def test_the_earliest_step_and_in_it_the_earliest_place_comes_first() -> None:
    late, early = call(1, "barrier", position=9), call(2, position=2)
    third = call(3, step=2, position=1)
    ranks = {0: made(late, early, third, step=3), 1: made(step=3)}
    assert first_skipped(ranks) == SkippedCall(rank=1, call=early, step=1, counts=((0, 1), (1, 0)))


def test_of_two_ranks_that_skipped_it_the_lower_one_is_named_and_both_are_counted() -> None:
    ranks = {0: made(REDUCE), 1: made(step=2), 2: made(step=2)}
    assert first_skipped(ranks) == SkippedCall(rank=1, call=REDUCE, step=1, counts=((0, 1), (1, 0), (2, 0)))


def test_another_group_is_another_call() -> None:
    ranks = {0: made(REDUCE, step=2), 1: made(call(1, group="1"), step=2)}
    found = first_skipped(ranks)
    assert found is not None
    assert (found.step, len(found.counts)) == (1, 2)


def test_a_step_whose_calls_were_overwritten_proves_nothing() -> None:
    ranks = {0: made(call(300, step=9)), 1: made(call(257, "broadcast", step=9), step=10)}
    assert first_skipped(ranks) is None, "the ring may have held the call of step 9 before its oldest entry"


def test_a_step_after_the_oldest_remembered_one_is_whole() -> None:
    lap = [call(300, "broadcast", step=8), call(301, "broadcast", step=9)]
    ranks = {0: made(*lap, call(302, step=9), step=10), 1: made(*lap, step=10)}
    assert first_skipped(ranks) == SkippedCall(rank=1, call=call(302, step=9), step=9, counts=((0, 1), (1, 0)))


def test_of_several_calls_at_one_point_the_one_that_was_made_first_is_named() -> None:
    operations = ["barrier", "broadcast", "all_gather", "reduce", "gather", "scatter", "all_to_all", "all_reduce"]
    calls = [call(number, op, position=5) for number, op in enumerate(operations, start=1)]
    assert first_skipped({0: made(*calls), 1: made(step=2)}) == SkippedCall(
        rank=1, call=calls[0], step=1, counts=((0, 1), (1, 0))
    )


_CALLS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=4).map(sorted)
_RANK = st.builds(
    lambda calls, step, position, left: made(
        *[call(number, step=at[0], position=at[1]) for number, at in enumerate(calls, start=1)],
        step=step,
        position=position,
        exit_s=9.0 if left else None,
    ),
    _CALLS,
    st.integers(1, 3),
    st.integers(0, 4),
    st.booleans(),
)


@given(_RANK, _RANK, st.integers(0, 9), st.integers(10, 19))
def test_renaming_the_ranks_renames_the_answer_and_nothing_else(one: Board, other: Board, low: int, high: int) -> None:
    plain = first_skipped({low: one, high: other})
    swapped = first_skipped({low: other, high: one})
    names = {low: high, high: low}
    if plain is None or swapped is None:
        assert plain is swapped
        return
    assert swapped.rank == names[plain.rank]
    assert (swapped.step, swapped.call) == (plain.step, plain.call)
    assert dict(swapped.counts) == {names[rank]: count for rank, count in plain.counts}


@given(st.lists(_RANK, min_size=1, max_size=4))
def test_who_is_named_made_the_call_less_often_than_somebody_else(boards: list[Board]) -> None:
    found = first_skipped(dict(enumerate(boards)))
    if found:
        counts = dict(found.counts)
        assert counts[found.rank] < max(counts.values())
        assert found.call.step == found.step
        assert boards[found.rank].step >= found.step


# The last call that every rank made and left.


def left(number: int, op: str = "all_reduce", **changes: Any) -> Call:
    return call(number, op, **{"left_s": 9.0, **changes})


def test_the_last_agreed_call_is_the_latest_one_that_every_rank_has_left() -> None:
    one = made(left(1), left(2), call(3, left_s=None))
    other = made(left(1), left(2), left(3, "barrier"))
    assert last_agreed({0: one, 1: other}) == left(2)


def test_a_call_that_one_rank_is_still_inside_is_not_agreed() -> None:
    assert last_agreed({0: made(left(1)), 1: made(call(1, left_s=None))}) is None


def test_the_later_step_is_the_last_one_agreed() -> None:
    ranks = {rank: made(left(1), left(2, "barrier"), left(3, step=2), step=2) for rank in (0, 1)}
    assert last_agreed(ranks) == left(3, step=2)


def test_one_rank_agrees_with_nobody() -> None:
    assert last_agreed({0: made(left(1))}) is None
    assert last_agreed({}) is None


def test_a_step_whose_first_calls_are_forgotten_is_not_compared() -> None:
    ranks = {0: made(left(7), left(8)), 1: made(left(1), left(2))}
    assert last_agreed(ranks) is None


# Waits that lasted stand beside the program's calls, on some ranks only.


def test_a_wait_that_lasted_is_no_call_that_the_others_skipped() -> None:
    waited = call(2, "wait all_reduce", position=5)
    assert first_skipped({0: made(REDUCE, waited), 1: made(REDUCE, step=2)}) is None


# Steps.


def row(step: int, count: int, *, until: int | None = None, op: str = "all_reduce", **changes: Any) -> StepRow:
    tallies = (Tally(group="0", op=op, called=False, count=count),) if count else ()
    return StepRow(
        **{"step": step, "until": until or step, "done_s": float(step), "gradients": 6, "tallies": tallies, **changes}
    )


def reduced(*counts: int, **changes: Any) -> list[StepRow]:
    return [row(step, count, **changes) for step, count in enumerate(counts, start=1)]


def test_the_step_in_which_a_rank_reduced_nothing_is_named_and_not_the_one_where_it_showed() -> None:
    found = first_step_of_difference({0: reduced(1, 1, 1, 1), 1: reduced(1, 0, 1, 1)})
    assert found == StepDifference(
        step=2,
        group="0",
        op="all_reduce",
        called=False,
        alone=True,
        counts=((0, 1), (1, 0)),
        behind=(1,),
        without_gradients=(),
    )


def test_ranks_that_reduced_alike_have_no_difference() -> None:
    assert first_step_of_difference({0: reduced(1, 0, 1), 1: reduced(1, 0, 1)}) is None
    assert first_step_of_difference({0: reduced(1, 2)}) is None
    assert first_step_of_difference({}) is None


def test_what_another_thread_entered_a_step_later_is_no_difference() -> None:
    assert first_step_of_difference({0: reduced(1, 2, 1, 1), 1: reduced(1, 1, 2, 1)}) is None


def test_a_step_that_a_rank_does_not_remember_or_has_not_finished_is_not_compared() -> None:
    open_step = row(3, 5, done_s=None)
    assert first_step_of_difference({0: reduced(1, 1, 1), 1: [*reduced(1, 1), open_step]}) is None
    assert first_step_of_difference({0: reduced(1, 1, 1), 1: reduced(0, 1, 1)[1:]}) is None


def test_a_group_is_compared_between_the_ranks_that_entered_it() -> None:
    assert first_step_of_difference({0: reduced(1, 1), 1: reduced(1, 1), 2: reduced(0, 0)}) is None


def test_a_rank_without_gradients_did_not_run_its_backward_there() -> None:
    found = first_step_of_difference({0: reduced(1, 1), 1: [row(1, 1), row(2, 0, gradients=0)]})
    assert found is not None
    assert (found.behind, found.without_gradients) == ((1,), (1,))


def test_the_operation_with_the_widest_gap_is_named_and_others_are_told_apart() -> None:
    gather = Tally(group="0", op="all_gather", called=False, count=3)
    reduce = Tally(group="0", op="all_reduce", called=False, count=1)
    found = first_step_of_difference({0: [row(1, 0, tallies=(gather, reduce))], 1: [row(1, 0, tallies=())]})
    assert found is None, "a rank that never entered the group is no member"
    found = first_step_of_difference(
        {0: [row(1, 1), row(2, 0, tallies=(gather, reduce))], 1: [row(1, 1), row(2, 0, tallies=())]}
    )
    assert found is not None
    assert (found.op, found.alone, found.counts) == ("all_gather", False, ((0, 3), (1, 0)))


def test_merged_rows_are_compared_step_by_step() -> None:
    found = first_step_of_difference({0: [row(1, 1, until=9)], 1: [row(1, 1, until=4), row(5, 0), row(6, 1, until=9)]})
    assert found is not None
    assert found.step == 5


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 7))
def test_leaving_out_one_reduction_names_that_step(counts: list[int], where: int) -> None:
    step = where % len(counts)
    with_it = [count + (index == step) for index, count in enumerate(counts)]
    found = first_step_of_difference({0: reduced(9, *with_it), 1: reduced(9, *counts)})
    assert found is not None
    assert (found.step, found.behind) == (step + 2, (1,))


# Who ran out of batches.

FETCH = mark("data", "fetch", step=3, at_s=5.0)
TRAINING = mark("backward", step=3)
BARRIER = call(1, "barrier", entered_s=6.0, left_s=None)


def batches(newest: Mark, *calls: Call, steps: int = 2, **changes: Any) -> Board:
    done = tuple((step, float(step)) for step in range(1, steps + 1))
    return board(newest, steps_s=done, calls=calls, **changes)


def test_a_rank_that_got_no_more_batch_and_went_on_has_finished() -> None:
    found = first_out_of_batches({0: batches(TRAINING), 1: batches(FETCH, BARRIER)})
    assert found == OutOfBatches(ranks=(1,), others=(0,), step=2, calls=((1, BARRIER),))


def test_a_rank_that_got_no_more_batch_and_ended_has_finished() -> None:
    found = first_out_of_batches({0: batches(TRAINING), 1: batches(FETCH, exit_s=7.0)})
    assert found == OutOfBatches(ranks=(1,), others=(0,), step=2, calls=())


@pytest.mark.parametrize(
    "other",
    [
        batches(FETCH),
        batches(FETCH, replace(BARRIER, entered_s=4.0, left_s=4.1)),
        batches(mark("data", "fetched", step=3, at_s=5.0), BARRIER),
        batches(mark("step", step=2, at_s=5.0), BARRIER),
    ],
    ids=["still in the fetch", "called something before it", "got one", "asks for none"],
)
def test_nobody_has_finished_where_that_is_not_shown(other: Board) -> None:
    assert first_out_of_batches({0: batches(TRAINING), 1: other}) is None


def test_where_nobody_goes_on_nobody_was_early() -> None:
    assert first_out_of_batches({0: batches(FETCH, BARRIER), 1: batches(FETCH, BARRIER)}) is None
    assert first_out_of_batches({0: batches(TRAINING, steps=2), 1: batches(FETCH, BARRIER, steps=3)}) is None
    assert first_out_of_batches({}) is None


def test_only_the_members_of_a_group_have_to_make_its_calls() -> None:
    made = call(op="all_gather_single", group="7", place=Place(file=USER, line=74), position=3)
    inside = board(mark(step=1, position=9), calls=(made,), groups={"7": (2, 3)})
    outside = board(mark(step=2, position=9), calls=(call(op="all_reduce", group="8"),), groups={"8": (0, 1)})
    assert first_skipped({0: outside, 2: inside, 3: inside}) is None
    beyond = board(mark(step=2, position=9), groups={"7": (2, 3)})
    found = first_skipped({0: outside, 2: inside, 3: beyond})
    assert found is not None
    assert (found.rank, found.counts) == (3, ((2, 1), (3, 0)))


def test_of_a_group_that_nobody_has_described_those_are_members_that_entered_it() -> None:
    made = call(op="all_reduce", group="7", position=3)
    assert first_skipped({0: board(mark(step=2)), 1: board(mark(step=1), calls=(made,))}) is None


def test_the_two_sides_of_a_transfer_are_no_call_that_one_of_them_left_out() -> None:
    receives = board(mark(step=1), calls=(call(op="recv", peer=0),))
    sends = board(mark(step=2), calls=(call(op="send", peer=1),))
    assert first_skipped({0: sends, 1: receives}) is None


def test_a_rank_that_makes_more_marks_on_its_way_has_not_passed_a_call_before_its_own_usual_point() -> None:
    """Rank 1 went round a part of the model, came to the call with fewer marks, and rank 0 is still on its way."""
    usual = call(1, "all_gather", step=1, position=37)
    short = replace(usual, number=2, step=2, position=33, left_s=None)
    on_its_way = board(mark("backward", step=2, position=35), calls=(usual,))
    through = board(mark("backward", step=2, position=33), calls=(usual, short))
    assert first_skipped({0: on_its_way, 1: through}) is None
    beyond = board(mark("backward", step=2, position=38), calls=(usual,))
    found = first_skipped({0: beyond, 1: through})
    assert found is not None
    assert found.rank == 0
