"""What came before a difference: batches at their end or given up, steps of fewer reductions, another pace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, frame, mark
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.collectives.reasons import (
    AbandonedBatch,
    ModuleDifference,
    OutOfBatches,
    PaceDifference,
    StepDifference,
    abandoned_batch,
    first_step_of_difference,
    last_common_call,
    module_difference,
    others_got_more_batches,
    pace_difference,
    ranks_out_of_batches,
)
from nsa_harness.core.evidence.evidence import (
    Call,
    DataLoaderProgress,
    ModuleCall,
    ProgressEvent,
    StatusFile,
    StepForwards,
    StepRow,
    Tally,
)
from nsa_harness.core.report import Place


def made(*calls: Call, step: int = 1, position: int = 0, **changes: Any) -> StatusFile:
    """A rank that made these calls and trains at this point."""
    return board(mark("forward", step=step, position=position), calls=calls, **changes)


# The last call that every rank made and left.


def left(number: int, op: str = "all_reduce", **changes: Any) -> Call:
    return call(number, op, **{"left_s": 9.0, **changes})


def test_the_last_agreed_call_is_the_latest_one_that_every_rank_has_left() -> None:
    one = made(left(1), left(2), call(3, left_s=None))
    other = made(left(1), left(2), left(3, "barrier"))
    assert last_common_call({0: one, 1: other}) == left(2)


def test_a_call_that_one_rank_is_still_inside_is_not_agreed() -> None:
    assert last_common_call({0: made(left(1)), 1: made(call(1, left_s=None))}) is None


def test_the_later_step_is_the_last_one_agreed() -> None:
    ranks = {rank: made(left(1), left(2, "barrier"), left(3, step=2), step=2) for rank in (0, 1)}
    assert last_common_call(ranks) == left(3, step=2)


def test_one_rank_agrees_with_nobody() -> None:
    assert last_common_call({0: made(left(1))}) is None
    assert last_common_call({}) is None


def test_a_step_whose_first_calls_are_forgotten_is_not_compared() -> None:
    ranks = {0: made(left(7), left(8)), 1: made(left(1), left(2))}
    assert last_common_call(ranks) is None


# Steps.


def row(step: int, count: int, *, until: int | None = None, op: str = "all_reduce", **changes: Any) -> StepRow:
    tallies = (Tally(group="0", op=op, from_python=False, count=count),) if count else ()
    return StepRow(
        **{
            "step": step,
            "last_step": until or step,
            "done_s": float(step),
            "gradients": 6,
            "tallies": tallies,
            **changes,
        }
    )


def reduced(*counts: int, **changes: Any) -> list[StepRow]:
    return [row(step, count, **changes) for step, count in enumerate(counts, start=1)]


def test_the_step_in_which_a_rank_reduced_nothing_is_named_and_not_the_one_where_it_showed() -> None:
    found = first_step_of_difference({0: reduced(1, 1, 1, 1), 1: reduced(1, 0, 1, 1)})
    assert found == StepDifference(
        step=2,
        group="0",
        op="all_reduce",
        from_python=False,
        is_only_difference=True,
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
    gather = Tally(group="0", op="all_gather", from_python=False, count=3)
    reduce = Tally(group="0", op="all_reduce", from_python=False, count=1)
    found = first_step_of_difference({0: [row(1, 0, tallies=(gather, reduce))], 1: [row(1, 0, tallies=())]})
    assert found is None, "a rank that never entered the group is no member"
    found = first_step_of_difference(
        {0: [row(1, 1), row(2, 0, tallies=(gather, reduce))], 1: [row(1, 1), row(2, 0, tallies=())]}
    )
    assert found is not None
    assert (found.op, found.is_only_difference, found.counts) == ("all_gather", False, ((0, 3), (1, 0)))


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


def batches(newest: ProgressEvent, *calls: Call, steps: int = 2, **changes: Any) -> StatusFile:
    done = tuple((step, float(step)) for step in range(1, steps + 1))
    return board(newest, steps_s=done, calls=calls, **changes)


def test_a_rank_that_got_no_more_batch_and_went_on_has_finished() -> None:
    found = ranks_out_of_batches({0: batches(TRAINING), 1: batches(FETCH, BARRIER)})
    assert found == OutOfBatches(ranks=(1,), others=(0,), step=2, open_call=BARRIER)


def test_a_rank_that_got_no_more_batch_and_ended_has_finished() -> None:
    found = ranks_out_of_batches({0: batches(TRAINING), 1: batches(FETCH, exit_s=7.0)})
    assert found == OutOfBatches(ranks=(1,), others=(0,), step=2, open_call=None)


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
def test_nobody_has_finished_where_that_is_not_shown(other: StatusFile) -> None:
    assert ranks_out_of_batches({0: batches(TRAINING), 1: other}) is None


def test_where_nobody_goes_on_nobody_was_early() -> None:
    assert ranks_out_of_batches({0: batches(FETCH, BARRIER), 1: batches(FETCH, BARRIER)}) is None
    assert ranks_out_of_batches({0: batches(TRAINING, steps=2), 1: batches(FETCH, BARRIER, steps=3)}) is None
    assert ranks_out_of_batches({}) is None


# Steps compared by how much training they hold.


def loaded(*loaders: tuple[int, int, int, bool], made_at: int = 9) -> StatusFile:
    """(number, iterators so far, batches of the newest, whether it has ended)."""
    chain = (frame(made_at),)
    made_of = [
        DataLoaderProgress(number=n, iterators=count, batches=given, is_exhausted=e, chain=chain)
        for n, count, given, e in loaders
    ]
    return board(loaders=tuple(made_of))


@pytest.mark.parametrize(
    ("other", "uneven"),
    [
        (loaded((1, 2, 5, False)), True),
        (loaded((1, 2, 4, False)), False),
        (loaded((1, 3, 5, False)), False),
        (loaded((1, 2, 4, True), (2, 1, 5, False)), False),
        (loaded((1, 2, 5, False), made_at=19), False),
        (loaded(), True),
    ],
    ids=["more of the same", "as many", "another iterator", "another loader", "made elsewhere", "not told"],
)
def test_batches_are_uneven_where_the_iterator_that_ended_here_gave_others_more(
    other: StatusFile, uneven: bool
) -> None:
    finished = OutOfBatches(ranks=(1,), others=(0,), step=4, open_call=None)
    assert others_got_more_batches({0: other, 1: loaded((1, 2, 4, True))}, finished) is uneven
    assert others_got_more_batches({0: other, 1: loaded()}, finished)


def test_an_evaluation_of_one_rank_that_came_to_its_end_is_not_uneven() -> None:
    finished = OutOfBatches(ranks=(0,), others=(1,), step=4, open_call=None)
    evaluated = loaded((1, 1, 4, False), (2, 1, 3, True))
    assert not others_got_more_batches({0: evaluated, 1: loaded((1, 1, 5, False))}, finished)


def steps(count: int) -> tuple[tuple[int, float], ...]:
    return tuple((step, float(step)) for step in range(1, count + 1))


def through(*marks: int, calls: tuple[Call, ...] = (BARRIER,), **changes: Any) -> StatusFile:
    """A rank that has done a step a number, with so many marks each, and stands in a barrier after the last."""
    done = len(marks)
    facts = {"steps_s": steps(done), "events_per_step": dict(enumerate(marks, start=1)), "calls": calls}
    return board(mark("step", step=done, position=marks[-1], at_s=5.0), **{**facts, **changes})


def training(*marks: int, **changes: Any) -> StatusFile:
    """A rank that has done these steps and is in the backward pass of the next one."""
    done = len(marks)
    facts = {"steps_s": steps(done), "events_per_step": dict(enumerate(marks, start=1))}
    return board(mark("backward", step=done + 1, position=6, at_s=5.0), **{**facts, **changes})


def test_a_step_with_more_marks_than_usual_on_a_rank_that_is_a_batch_short_was_begun_twice() -> None:
    found = abandoned_batch({0: training(10, 10, 10), 1: through(10, 14, 10)})
    assert found == AbandonedBatch(rank=1, step=2, event_count=14, usual_count=10, others=(0,))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (training(10, 10, 10), through(10, 10, 10)),  # nothing unusual
        (training(10, 14, 10), through(10, 14, 10)),  # the others did as much: a longer step of the program
        (training(10, 10, 10), through(10, 20, 10)),  # a whole step more: an evaluation
        (through(10, 10, 10), through(10, 14, 10)),  # no rank has another step to do
        (training(10, 14, 10), through(10, 10, 10)),  # the other one is not short
        (training(10, 10), through(10, 14)),  # too few steps to say what is usual
        (training(10, 10, 10, events_per_step={}), through(10, 14, 10)),  # a board that did not count them
    ],
)
def test_no_step_was_given_up_where_its_marks_or_the_other_ranks_do_not_show_it(
    first: StatusFile, second: StatusFile
) -> None:
    assert abandoned_batch({0: first, 1: second}) is None


def test_a_rank_whose_every_step_holds_more_batches_than_the_others_has_another_pace() -> None:
    boards = {0: training(10, 10, 10, 10), 1: through(15, 15, 15), 2: training(10, 10, 10, 10)}
    assert pace_difference(boards) == PaceDifference(ranks=(1,), events_per_step=((0, 10), (1, 15), (2, 10)))
    assert pace_difference({0: training(10, 10, 10), 1: through(10, 10, 10)}) is None
    assert pace_difference({0: training(10, 11, 10), 1: through(15, 15, 15)}) is None
    assert pace_difference({0: through(10, 10, 10), 1: through(15, 15, 15)}) is None


# Modules.

NET = ("net", "inward", "blocks.0", "blocks.1", "head")
DROPPED = ("net", "inward", "blocks.0", "head")


def module(name: str, line: int = 22) -> ModuleCall:
    """A Sequential of torch's own calls the blocks."""
    place = None if name.startswith("blocks.") else Place(file="/home/ada/model.py", line=line, function="forward")
    return ModuleCall(name=name, place=place)


def went_through(*steps: tuple[str, ...], kind: str = "backward", whole: bool = True, **changes: Any) -> StatusFile:
    """From step 1 on, the last one in progress."""
    names = tuple(dict.fromkeys(name for step in steps for name in step))
    forwards = tuple(
        StepForwards(step=number, is_complete=whole, calls=tuple(map(names.index, step)))
        for number, step in enumerate(steps, start=1)
    )
    return board(mark(kind, step=len(steps)), modules=tuple(map(module, names)), forwards=forwards, **changes)


def test_the_module_that_one_rank_left_out_is_found_and_the_rank_by_its_step_before() -> None:
    one = ModuleDifference(
        ranks=(1,),
        step=2,
        expected=module("blocks.1"),
        actual=module("head"),
        is_skip=True,
        is_extra=False,
        culprit_is_certain=True,
    )
    assert module_difference({0: went_through(NET, NET), 1: went_through(NET, DROPPED)}) == one
    more = replace(one, expected=module("head"), actual=module("blocks.1"), is_skip=False, is_extra=True)
    assert module_difference({0: went_through(DROPPED, DROPPED), 1: went_through(DROPPED, NET)}) == more
    other = ("net", "inward", "blocks.0", "adapter", "head")
    instead = replace(one, actual=module("adapter"), is_skip=False)
    assert module_difference({0: went_through(NET, NET), 1: went_through(NET, other)}) == instead


def test_where_every_rank_left_its_step_before_the_few_are_named_and_of_two_both() -> None:
    known = {0: went_through(DROPPED, NET), 1: went_through(DROPPED, (*NET[:3], "extra"))}
    found = module_difference(known)
    assert found is not None
    assert (found.ranks, found.culprit_is_certain) == ((0, 1), False)
    assert {found.expected.name, found.actual.name} == {"blocks.1", "extra"}
    found = module_difference({**known, 2: known[0]})
    assert found is not None
    assert (found.ranks, found.culprit_is_certain, found.expected.name) == ((1,), False, "blocks.1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (went_through(NET, NET), went_through(NET, NET[:3])),  # behind, or done
        (went_through(NET, NET), went_through(DROPPED, DROPPED)),  # a stage, or an expert, of its own
        (went_through(NET), went_through(DROPPED)),  # nothing tells what is usual
        (went_through(NET, (*NET, "net")), went_through(NET, (*NET, "metric"))),  # another pass
        (went_through(NET, NET), went_through(NET, DROPPED, whole=False)),
        (went_through(NET, NET), went_through(DROPPED, NET, DROPPED)),
        (went_through(NET, NET), board(mark("backward", step=2))),
    ],
)
def test_what_may_be_the_same_in_the_end_or_never_was_is_no_branch(one: StatusFile, other: StatusFile) -> None:
    assert module_difference({0: one, 1: other}) is None
    assert module_difference({0: other, 1: one}) is None


def test_a_rank_whose_modules_are_not_known_may_have_gone_either_way() -> None:
    known = {0: went_through(NET, NET), 1: went_through(NET, DROPPED)}
    assert module_difference({**known, 2: went_through(NET, NET)}) is not None
    assert module_difference({**known, 2: board(mark("backward", step=2))}) is None


def test_a_rank_that_is_a_step_further_is_compared_in_the_step_that_both_did() -> None:
    found = module_difference({0: went_through(NET, NET), 1: went_through(NET, DROPPED, NET)})
    assert found is not None
    assert (found.ranks, found.step) == ((1,), 2)
