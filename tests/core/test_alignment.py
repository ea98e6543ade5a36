"""Where the ranks of a group part: which event, who left its routine, and what the run leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, collective, mark
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import ZERO_NS, Made, Run, entered, line, rounds, run

from nsa_harness.core.collectives.alignment import (
    Difference,
    DifferenceKind,
    differences,
    minority,
)
from nsa_harness.core.collectives.call_patterns import broke_pattern
from nsa_harness.core.collectives.groups import groups_of
from nsa_harness.core.collectives.timeline import Timeline, timeline
from nsa_harness.core.collectives.wait_cycles import cycle
from nsa_harness.core.evidence.evidence import Collective, ForwardMode, StatusFile

MISSING, EXTRA, ORDER, COUNT = (
    DifferenceKind.MISSING,
    DifferenceKind.EXTRA,
    DifferenceKind.ORDER,
    DifferenceKind.COUNT,
)
SHAPE, DTYPE, ROOT, LATE = DifferenceKind.SHAPE, DifferenceKind.DTYPE, DifferenceKind.ROOT, DifferenceKind.LATE

Known = tuple[StatusFile | None, Sequence[Collective]]


def found(*known: Known, backend: str = "gloo") -> tuple[Difference, ...]:
    lines = {rank: timeline(rank, made, entries, backend) for rank, (made, entries) in enumerate(known)}
    boards = {rank: made for rank, (made, _) in enumerate(known) if made}
    return differences(lines, groups_of(lines, boards), boards)


def recorded(*entries: Collective, **groups: tuple[int, ...]) -> Known:
    """A rank's recorder; `g1=(0, 1)` is what its board says about the members of group 1."""
    told = {name[1:]: members for name, members in groups.items()}
    return (board(groups=told) if told else None), entries


def done(*numbers: int, **changes: Any) -> list[Collective]:
    return [collective(seq, retired=True, **changes) for seq in numbers]


def short(one: Difference) -> tuple[Any, ...]:
    """What differs, of which event by its number, who, and who entered nothing there."""
    number = one.expected.seq if one.expected else None
    return one.kind, one.group, number, one.ranks, one.absent


def only(*known: Known, backend: str = "gloo") -> Difference:
    (one,) = found(*known, backend=backend)
    return one


# By the recorder alone: nothing says what the ranks did before, so nobody is told to have left a routine.


def test_the_first_number_that_ranks_entered_otherwise_is_named() -> None:
    one = only(
        recorded(*done(1), collective(2), collective(3, "barrier")),
        recorded(*done(1), collective(2, "all_gather"), collective(3)),
    )
    assert (short(one), one.place_is_certain, one.culprit_is_certain, one.is_symmetric) == (
        (ORDER, "0", 2, (0, 1), ()),
        True,
        False,
        True,
    )


def test_with_three_ranks_the_one_that_differs_is_named() -> None:
    odd = recorded(collective(1, "broadcast"))
    one = only(recorded(collective(1)), odd, recorded(collective(1)))
    assert (short(one), one.is_symmetric) == ((ORDER, "0", 1, (1,), ()), False)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"sizes": ((5,),)}, SHAPE),
        ({"sizes": ((4,), (1,))}, SHAPE),
        ({"dtypes": ("float64",)}, DTYPE),
    ],
)
def test_other_sizes_and_types_are_told_apart(changes: dict[str, Any], kind: DifferenceKind) -> None:
    assert short(only(recorded(collective(1)), recorded(collective(1, **changes)))) == (kind, "0", 1, (0, 1), ())


@pytest.mark.parametrize("op", ["scatter", "gather", "all_to_all", "coalesced", "sparse_all_reduce"])
def test_operations_whose_sizes_rightly_differ_do_not_part_the_ranks(op: str) -> None:
    made = call(1, op, entered_s=2.0)
    rooted, other = (
        (board(calls=(replace(made, elements=size),), zero_ns=ZERO_NS), [entered(1, 2.05, op, retired=True)])
        for size in (6, 0)
    )
    assert found(rooted, other) == ()


@pytest.mark.parametrize(("backend", "kinds"), [("gloo", [SHAPE]), ("nccl", [])])
def test_an_uneven_all_gather_parts_the_ranks_on_gloo_only(backend: str, kinds: list[DifferenceKind]) -> None:
    known = [(board(calls=(call(1, "all_gather", elements=size, left_s=None),)), ()) for size in (4, 9)]
    assert [one.kind for one in found(*known, backend=backend)] == kinds


def test_a_member_that_has_not_come_to_an_open_collective_is_late() -> None:
    one = only(recorded(*done(1), collective(2)), recorded(*done(1)))
    assert (short(one), one.culprit_is_certain) == ((LATE, "0", 2, (1,), (1,)), False)


def test_a_rank_that_sent_the_data_of_another_collective_to_an_open_one_is_not_late() -> None:
    """gloo aborts a rank that receives more data than its own collective expects."""
    known = ([*done(1), collective(2)], done(1))
    lines = {rank: timeline(rank, None, entries, "gloo") for rank, entries in enumerate(known)}
    groups = groups_of(lines, {})
    assert [one.kind for one in differences(lines, groups, {})] == [LATE]
    (one,) = differences(lines, groups, {}, mismatched=[0])
    assert (one.kind, one.ranks, one.culprit_is_certain) == (MISSING, (1,), False)
    assert [one.kind for one in differences(lines, groups, {}, mismatched=[1])] == [LATE]


def test_a_number_that_only_one_rank_still_remembers_is_no_missing_one() -> None:
    assert found(recorded(collective(2), *done(9)), recorded(*done(8, 9))) == ()


def test_ranks_are_compared_from_the_first_number_that_all_of_them_hold() -> None:
    long, short_one = (
        recorded(*done(*range(1, 9)), collective(9)),
        recorded(*done(5, 6, 7, 8), collective(9, "barrier")),
    )
    one = only(long, short_one)
    assert (one.group, one.expected and one.expected.seq, one.ranks) == ("0", 9, (1,))


def test_a_rank_without_a_recorder_is_on_its_way_at_most() -> None:
    one = only(recorded(collective(1)), recorded())
    assert (short(one), one.culprit_is_certain) == ((LATE, "0", 1, (1,), (1,)), False)


def test_who_belongs_to_a_group_is_what_the_boards_say() -> None:
    members = [
        recorded(*done(1), collective(1, group="3", created_ns=2), g3=(0, 1)),
        recorded(*done(1), g3=(0, 1)),
    ]
    assert short(only(*members, recorded(*done(1)))) == (LATE, "3", 1, (1,), (1,))


def test_without_boards_the_members_of_a_group_are_those_that_entered_it() -> None:
    assert found(recorded(*done(1), collective(1, group="3")), recorded(*done(1))) == ()


def test_two_groups_of_one_name_on_different_ranks_are_two() -> None:
    first = [recorded(collective(1, group="tp"), gtp=(0, 1)) for _ in range(2)]
    other = [recorded(collective(1, "barrier", group="tp"), gtp=(2, 3)) for _ in range(2)]
    assert found(*first, *other) == ()


def test_ranks_that_all_have_the_same_open_have_not_parted() -> None:
    assert found(recorded(collective(7)), recorded(collective(7))) == ()
    assert found(recorded(collective(7))) == ()
    assert found() == ()


def test_a_collective_that_is_done_and_was_not_the_last_waits_for_nobody() -> None:
    """As a broadcast, whose root goes on at once."""
    ahead = (board(calls=(call(1, "broadcast"), call(2, "all_reduce", group="1", entered_s=3.0))), ())
    assert found(ahead, (board(), ())) == ()


def test_of_several_groups_the_earliest_difference_comes_first_and_who_is_only_late_last() -> None:
    one = recorded(
        collective(1, group="a", created_ns=1), collective(1, group="b", created_ns=9),
        collective(1, group="c", created_ns=5), ga=(0, 1), gb=(0, 1), gc=(0, 1),
    )  # fmt: skip
    other = recorded(
        collective(1, "barrier", group="b", created_ns=9), collective(1, "barrier", group="c", created_ns=5),
        ga=(0, 1), gb=(0, 1), gc=(0, 1),
    )  # fmt: skip
    assert [(each.group, each.kind) for each in found(one, other)] == [("c", ORDER), ("b", ORDER), ("a", LATE)]


def test_the_majority_is_right_and_between_equally_many_nobody_is() -> None:
    assert minority({0: "a", 1: "b", 2: "a"}) == (1,)
    assert minority({0: "a", 1: "b"}) == (0, 1)
    assert minority({0: "a", 1: "a"}) == ()
    assert minority({0: "a", 1: "b", 2: "b", 3: "c", 4: "c"}) == (0, 1, 2, 3, 4)


# By what the ranks did in their rounds before.

REDUCE, GATHER, BARRIER = Made(), Made(op="all_gather", line=41), Made(op="barrier", line=45, elements=0)
BODY = [REDUCE, GATHER, BARRIER]
MADE = rounds(BODY, 3)
OTHER = Made(op="broadcast", line=99, root=0)


def parted(mine: Sequence[Made], *, others: int = 1, count: int = 3, recorder: bool = True) -> Difference:
    """The last rank goes through `mine`, and the others through their rounds."""
    (one,) = run(*[rounds(BODY, count)] * others, mine, recorder=recorder).differences()
    return one


def without(at: int, made: Sequence[Made]) -> list[Made]:
    return [*made[:at], *made[at + 1 :]]


@pytest.mark.parametrize("recorder", [True, False], ids=["with a recorder", "by the calls alone"])
def test_who_went_on_to_what_comes_later_in_its_rounds_left_out_what_was_due(recorder: bool) -> None:
    one = parted(without(6, rounds(BODY, 3)), recorder=recorder)
    assert (one.kind, one.ranks, one.culprit_is_certain, one.is_new_event) == (MISSING, (1,), True, False)
    assert one.expected is not None
    assert (one.expected.place, one.expected.step) == (line(37), 3)
    own = one.event(1)
    assert own is not None
    assert (own.op, one.event(7)) == ("all_gather", None)


def test_after_one_round_only_it_is_likely_who() -> None:
    one = parted(without(3, rounds(BODY, 3)))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (MISSING, (1,), False)


def test_in_the_first_round_nobody_can_be_told() -> None:
    one = parted([GATHER, BARRIER])
    assert (one.kind, one.culprit_is_certain) == (ORDER, False)
    assert one.is_symmetric


@pytest.mark.parametrize("at", [6, 7], ids=["between two steps", "within a step"])
def test_a_call_that_is_new_to_a_rank_at_another_point_of_its_step_is_extra(at: int) -> None:
    made = rounds(BODY, 3)
    added = replace(OTHER, step=made[at - 1].step, position=9)
    one = parted([*made[:at], added, *made[at:]], others=2)
    assert (one.kind, one.ranks, one.is_new_event) == (EXTRA, (2,), True)
    own = one.event(2)
    assert own is not None
    assert own.place == line(99)


@pytest.mark.parametrize("body", [BODY[:2], BODY, [*BODY, OTHER]], ids=["of two", "of three", "of four"])
def test_the_other_order_looks_like_a_call_left_out_until_the_run_stops_and_neither_is_certain(
    body: list[Made],
) -> None:
    made = rounds(body, 3)
    at = 2 * len(body)
    left_out = run(made, without(at, made)).differences()
    assert left_out == run(made, [*made[:at], made[at + 1], made[at], *made[at + 2 :]]).differences()
    assert not (left_out[0].place_is_certain and left_out[0].culprit_is_certain)


def test_a_call_that_is_new_to_a_rank_at_the_very_point_of_another_is_in_its_place() -> None:
    made = rounds(BODY, 3)
    one = parted([*made[:6], replace(OTHER, step=3), *made[7:]], others=2)
    assert (one.kind, one.ranks, one.is_new_event) == (ORDER, (2,), True)


def test_who_goes_on_as_it_did_before_to_something_else_has_left_a_loop_earlier() -> None:
    """Three times round the inner loop, and in the last step one rank goes round it twice."""
    body = [REDUCE, REDUCE, REDUCE, BARRIER]
    made = rounds(body, 3)
    (one,) = run(made, made, without(10, made)).differences()
    assert (one.kind, one.ranks) == (COUNT, (2,))
    assert one.expected is not None
    assert one.expected.place == line(37)


def test_of_two_that_go_another_way_than_is_due_nobody_keeps_the_routine() -> None:
    made = rounds(BODY, 3)
    (one,) = run([*made[:6], GATHER], [*made[:6], BARRIER]).differences()
    assert (one.kind, one.ranks, one.culprit_is_certain) == (ORDER, (0, 1), False)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"elements": 5}, SHAPE), ({"dtype": "torch.float64"}, DTYPE)],
)
def test_who_gives_another_size_or_type_than_each_time_before_is_told(
    changes: dict[str, Any], kind: DifferenceKind
) -> None:
    made = rounds(BODY, 3)
    one = parted([*made[:6], replace(made[6], **changes), *made[7:]])
    assert (one.kind, one.ranks, one.culprit_is_certain) == (kind, (1,), True)


def test_what_each_would_do_next_by_its_routine_confirms_a_difference_in_the_very_last_event() -> None:
    made = rounds(BODY, 3)
    other = replace(made[6], dtype="torch.float64")
    assert parted([*made[:6], other, *made[7:]]).place_is_certain
    assert not parted([replace(made[0], dtype="torch.float64"), *made[1:]]).place_is_certain, "no round before"


def gathers(*sizes: int) -> Known:
    """A step without them before; all are called from one line."""
    first = call(1, "all_reduce", place=line(50), step=1)
    made = [
        call(number, "all_gather", place=line(12), step=2, position=number, elements=size, entered_s=float(number))
        for number, size in enumerate(sizes, start=2)
    ]
    return board(calls=(first, *made[:-1], replace(made[-1], left_s=None))), ()


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "ranks", "who"),
    [
        ((8, 8, 8), (8, 8, 4), (1,), True),
        ((8, 4, 8), (8, 4, 2), (0, 1), False),
        ((8, 8), (8, 4), (1,), False),
        ((8,), (4,), (0, 1), False),
    ],
    ids=["one size each time before", "sizes change there", "seen once before", "never before"],
)
def test_who_gave_another_size_is_told_by_its_line_before_where_that_had_one_size(
    of_rank_0: tuple[int, ...], of_rank_1: tuple[int, ...], ranks: tuple[int, ...], who: bool
) -> None:
    one = only(gathers(*of_rank_0), gathers(*of_rank_1))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (SHAPE, ranks, who)


def test_sizes_that_change_on_every_rank_accuse_none_of_two() -> None:
    made = rounds([REDUCE], 3)
    (one,) = run([*made[:2], replace(made[2], elements=5)], [*made[:2], replace(made[2], elements=6)]).differences()
    assert (one.kind, one.ranks, one.culprit_is_certain) == (SHAPE, (0, 1), False)


def rooted(*peers: int | None) -> list[Known]:
    step_one = call(1, "broadcast", peer=0)
    return [
        (board(calls=(step_one, call(2, "broadcast", step=2, peer=peer, entered_s=3.0, left_s=None)), rank=rank), ())
        for rank, peer in enumerate(peers)
    ]


def test_another_root_on_one_rank_is_told_by_the_others() -> None:
    one = only(*rooted(1, 2, 1))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (ROOT, (1,), True)


@pytest.mark.parametrize("peers", [(1, 1, 1), (1, None, 1)])
def test_the_same_root_everywhere_and_a_root_that_nobody_named_prove_nothing(peers: tuple[int | None, ...]) -> None:
    assert found(*rooted(*peers)) == ()


# Below Python, by sizes alone.


def order(*sizes: int) -> Known:
    return None, [collective(seq, sizes=((size,),), retired=True) for seq, size in enumerate(sizes, start=1)]


def test_below_python_a_rank_that_entered_what_usually_comes_later_left_something_out() -> None:
    one = only(order(1, 2, 3, 4, 1, 2), order(1, 2, 3, 4, 1, 3))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (MISSING, (1,), False)
    twice = only(order(1, 2, 3, 1, 2, 3, 1, 2), order(1, 2, 3, 1, 2, 3, 1, 3))
    assert (twice.kind, twice.ranks, twice.culprit_is_certain) == (MISSING, (1,), True)


def test_in_the_first_step_below_python_there_is_no_order_to_hold_against() -> None:
    one = only(order(1, 2), order(1, 3))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (SHAPE, (0, 1), False)


def test_where_no_rank_did_what_is_due_nobody_is_told_to_have_left_out_something() -> None:
    one = only(order(1, 2, 3, 4, 1, 4), order(1, 2, 3, 4, 1, 3))
    assert (one.ranks, one.culprit_is_certain) == ((0, 1), False)


# One of them by the recorder, and another one, that was killed, by its calls alone.


def test_a_rank_whose_recorder_is_lost_made_the_same_calls_all_the_same() -> None:
    assert run(MADE, MADE, recorder=[True, False]).differences() == ()
    (one,) = run(MADE, without(6, MADE), recorder=[True, False]).differences()
    assert (one.kind, one.ranks) == (MISSING, (1,))


# A round ahead.


def test_calls_that_pair_of_different_steps_show_who_is_a_round_ahead() -> None:
    """Every call pairs, since they are alike; from the one left out on they are of different steps."""
    made = rounds([REDUCE], 5)
    (one,) = run(made, made, without(2, made)).differences()
    assert (one.kind, one.ranks, one.absent, one.culprit_is_certain) == (MISSING, (2,), (), False)
    assert one.expected is not None
    assert (one.expected.step, one.expected.seq) == (3, 3)


def test_ranks_that_count_their_steps_otherwise_from_the_beginning_are_no_round_apart() -> None:
    made = [replace(one, step=one.step + 3) for one in rounds([REDUCE], 4)]
    lap = [replace(one, collective=None) for one in run(made, rounds([REDUCE], 4)).timelines[0].events]
    assert lap[0].step == 4
    lines = {rank: replace(one, is_complete=False) for rank, one in run(made, rounds([REDUCE], 4)).timelines.items()}
    assert differences(lines, {"0": ((0, 1),)}, {}) == ()


def test_the_steps_of_a_rank_without_an_optimizer_say_nothing_of_those_that_have_one() -> None:
    """An actor, or a parameter server, stays in its first step for ever."""
    made = rounds([REDUCE], 5)
    ran = run(made, [replace(one, step=1) for one in made])
    assert ran.differences() != ()
    boards = {0: replace(ran.boards[0], steps_s=((1, 0.5),)), 1: ran.boards[1]}
    assert differences(ran.timelines, {"0": ((0, 1),)}, boards) == ()


# Who has not come.


def marked(kind: str = "forward", *, step: int, position: int = 0, **changes: Any) -> StatusFile:
    return board(mark(kind, step=step, position=position), **changes)


def waiting(step: int = 1, position: int = 5, **changes: Any) -> StatusFile:
    """It stands in a reduction at that point."""
    made = call(1, step=step, position=position, left_s=None)
    return marked(step=step, position=position, **{"calls": (made,), **changes})


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (marked(step=1, position=4), LATE),
        (marked(step=1, position=5), LATE),
        (marked(step=1, position=6), EXTRA),
        (marked(step=2), EXTRA),
        (board(), LATE),
    ],
    ids=["before it", "at it", "beyond it", "in the next step", "no marks"],
)
def test_who_is_beyond_the_point_of_a_call_has_not_come_to_it_any_more(other: StatusFile, kind: DifferenceKind) -> None:
    """Which nobody ever made before: the one of them that stands in it may as well be wrong."""
    one = only((waiting(), ()), (other, ()))
    assert (one.kind, one.culprit_is_certain, one.absent) == (kind, False, (1,))
    assert one.ranks == ((0,) if kind is EXTRA else (1,))


TRAINS = ForwardMode(training=True, gradients=True)


@pytest.mark.parametrize(
    "evaluates", [ForwardMode(training=False, gradients=True), ForwardMode(training=True, gradients=False)]
)
def test_an_evaluation_is_no_training_and_takes_nobody_past_a_call(evaluates: ForwardMode) -> None:
    waits, beyond = waiting(mode=TRAINS), marked(step=1, position=6, mode=evaluates)
    assert only((waits, ()), (beyond, ())).kind is LATE
    # Where all of them do so it is what they all are at, and nothing is said of a rank that has run no model.
    assert only((waiting(mode=evaluates), ()), (beyond, ())).kind is EXTRA
    assert only((waits, ()), (replace(beyond, mode=TRAINS), ())).kind is EXTRA
    assert only((waits, ()), (replace(beyond, mode=None), ())).kind is EXTRA
    # The next step is one, whatever it runs there.
    assert only((waits, ()), (marked(step=2, mode=evaluates), ())).kind is EXTRA


def test_of_many_ranks_that_are_beyond_a_call_the_one_that_stands_in_it_made_it_alone() -> None:
    one = only((waiting(), ()), *[(marked(step=2), ())] * 3)
    assert (one.kind, one.ranks, one.is_new_event, one.culprit_is_certain) == (EXTRA, (0,), True, True)


def kept(*steps: int, **changes: Any) -> StatusFile:
    """A rank that made the reduction in these steps; it stands in the last one."""
    calls = [call(number, step=step, position=5, entered_s=float(step)) for number, step in enumerate(steps, start=1)]
    return marked(step=steps[-1], position=5, **{"calls": (*calls[:-1], replace(calls[-1], left_s=None)), **changes})


def test_who_made_the_call_in_the_steps_before_and_is_beyond_it_now_left_it_out() -> None:
    came = [call(step, step=step, position=5, entered_s=float(step)) for step in (1, 2)]
    beyond = marked(step=3, position=9, calls=tuple(came))
    one = only((kept(1, 2, 3), ()), (beyond, ()))
    assert (one.kind, one.ranks, one.culprit_is_certain) == (MISSING, (1,), True)
    once = only((kept(1, 2), ()), (marked(step=2, position=9, calls=tuple(came[:1])), ()))
    assert (once.kind, once.ranks, once.culprit_is_certain) == (MISSING, (1,), False)


def test_a_rank_that_makes_more_marks_on_its_way_has_not_passed_a_call_before_its_own_usual_point() -> None:
    """Rank 1 went round a part of the model, came to the call with fewer marks, and rank 0 is still on its way."""
    usual = call(1, "all_gather", step=1, position=37)
    through = marked("backward", step=2, position=33, calls=(
        usual, replace(usual, number=2, step=2, position=33, entered_s=3.0, left_s=None)
    ))  # fmt: skip
    on_its_way = marked("backward", step=2, position=35, calls=(usual,))
    assert [one.kind for one in found((on_its_way, ()), (through, ()))] == [LATE]
    beyond = marked("backward", step=2, position=38, calls=(usual,))
    one = only((beyond, ()), (through, ()))
    assert (one.kind, one.ranks) == (MISSING, (0,))


@pytest.mark.parametrize(("kind", "where"), [("step", False), ("forward", True)])
def test_who_waits_between_its_steps_may_have_had_none_left(kind: str, where: bool) -> None:
    barrier = call(1, "barrier", step=2, position=5, left_s=None)
    waits = marked(kind, step=2, position=5, calls=(barrier,))
    assert only((waits, ()), (marked("backward", step=3, position=2), ())).place_is_certain is where


def test_the_same_operation_on_another_line_is_the_other_half_of_a_condition() -> None:
    """One rank makes the call where it opens a port, the others where they ask for it, and all go on."""
    here = call(1, step=1, position=5)
    there = replace(here, place=line(40))
    one, other = (marked(step=2, calls=(made,)) for made in (here, there))
    assert found((one, ()), (other, ())) == ()
    opened = [marked(step=1, position=5, calls=(replace(made, left_s=None),)) for made in (here, there)]
    assert found((opened[0], ()), (opened[1], ())) == ()
    again = replace(here, number=2, position=6, entered_s=3.0, left_s=None)
    late = only((marked(step=1, position=6, calls=(here, again)), ()), (other, ()))
    assert (late.kind, late.ranks, late.culprit_is_certain) == (MISSING, (1,), False)


def test_the_call_that_is_missing_is_named_and_not_the_first_of_its_kind() -> None:
    first = call(1, position=5)
    second = call(2, position=8, entered_s=3.0, left_s=None)
    one = only((marked(step=1, position=8, calls=(first, second)), ()), (marked(step=2, calls=(first,)), ()))
    assert (one.kind, one.ranks, one.expected and one.expected.position) == (MISSING, (1,), 8)


def test_only_the_members_of_a_group_have_to_make_its_calls() -> None:
    made = call(op="all_gather_single", group="7", place=line(74), position=3, left_s=None)
    inside = marked(step=1, position=9, calls=(made,), groups={"7": (2, 3)})
    outside = marked(step=2, position=9, groups={"8": (0, 1)})
    assert found((outside, ()), (outside, ()), (inside, ()), (inside, ())) == ()
    beyond = marked(step=2, position=9, groups={"7": (2, 3)})
    one = only((outside, ()), (outside, ()), (inside, ()), (beyond, ()))
    assert one.all_ranks == (2, 3)


def test_a_step_whose_calls_were_overwritten_proves_nothing() -> None:
    """The ring may have held the call of step 9 before its oldest entry."""
    stands = marked(step=9, calls=(call(300, step=9, left_s=None),))
    lap = marked(step=10, calls=(call(257, "broadcast", step=9),))
    assert found((stands, ()), (lap, ())) == ()


def test_a_step_after_the_oldest_remembered_one_is_compared() -> None:
    before = [call(300, "broadcast", step=8), call(301, "broadcast", step=9, entered_s=3.0)]
    stands = marked(step=9, position=3, calls=(*before, call(302, step=9, position=3, entered_s=4.0, left_s=None)))
    one = only((stands, ()), (marked(step=10, calls=tuple(before)), ()))
    assert (one.expected and one.expected.op, one.absent) == ("all_reduce", (1,))


# A ring over several groups.


def ring(*known: Known) -> list[tuple[int, str, int, bool]]:
    lines = {rank: timeline(rank, made, entries, "gloo") for rank, (made, entries) in enumerate(known)}
    boards = {rank: made for rank, (made, _) in enumerate(known) if made}
    links = cycle(lines, groups_of(lines, boards))
    return [(link.rank, link.event.group, link.waits_for, link.never_entered) for link in links]


def test_a_ring_over_two_groups_is_a_cycle() -> None:
    known = [
        recorded(*done(1, group="2"), collective(5, group="1")),
        recorded(*done(1, group="1"), collective(2, group="2")),
    ]
    assert ring(*known) == [(0, "1", 1, False), (1, "2", 0, False)]


def test_three_ranks_in_three_groups_are_a_cycle() -> None:
    waits = [("ab", "ca"), ("bc", "ab"), ("ca", "bc")]  # stands in, has been in
    known = [recorded(*done(1, group=was), collective(2, group=stands)) for stands, was in waits]
    assert [link[2] for link in ring(*known)] == [1, 2, 0]


def test_a_member_that_never_entered_a_group_is_told_so() -> None:
    members = {"g1": (0, 1), "g2": (0, 1)}
    known = [recorded(collective(1, group="1"), **members), recorded(collective(1, group="2"), **members)]
    assert ring(*known) == [(0, "1", 1, True), (1, "2", 0, True)]


def test_a_wait_that_leads_to_a_rank_which_waits_for_nobody_is_no_cycle() -> None:
    assert ring(recorded(*done(1, group="2"), collective(5, group="1")), recorded(*done(1, group="1"))) == []


def test_of_ranks_in_a_cycle_the_one_that_took_its_groups_the_other_way_round_before_is_told() -> None:
    def left(*groups: str) -> bool:
        calls = [
            call(at, group=group, step=1 + at // 2, place=line(30 + int(group)), entered_s=float(at))
            for at, group in enumerate(groups)
        ]
        made = timeline(0, board(calls=tuple(calls)), (), "gloo")
        return broke_pattern(made, made.events[-1])

    assert not left("1", "2", "1")
    assert left("1", "2", "1", "2", "2")
    assert not left("1")
    assert not left("1", "2"), "never made before"


# Whatever a program does.

_BODIES = st.lists(
    st.sampled_from(
        [
            Made(),
            Made(op="all_gather", line=41),
            Made(op="broadcast", line=42, root=0),
            Made(op="barrier", line=43, elements=0),
            Made(op="reduce_scatter_tensor", line=44, elements=8),
        ]
    ),
    min_size=2,
    max_size=5,
    unique_by=lambda one: one.op,
)
_COUNTS = st.integers(3, 5)
_RANKS = st.integers(2, 8)
_AT = st.integers(0, 24)
_WHO = st.integers(0, 7)
_LATER = st.booleans()


@st.composite
def programs(draw: st.DrawFn) -> list[list[Made]]:
    """Rounds in which each rank may leave out or change anything."""
    made = rounds(draw(_BODIES), draw(_COUNTS))
    changed: list[list[Made]] = []
    for _ in range(draw(st.integers(2, 4))):
        dropped = draw(st.sets(st.integers(0, len(made) - 1), max_size=2))
        grown = draw(st.sets(st.integers(0, len(made) - 1), max_size=1))
        mine = [replace(one, elements=99) if at in grown else one for at, one in enumerate(made)]
        changed.append([one for at, one in enumerate(mine) if at not in dropped])
    return changed


@settings(deadline=None)
@given(programs(), st.randoms(use_true_random=False), st.booleans())
def test_the_order_in_which_ranks_are_given_changes_nothing(
    made: list[list[Made]], random: Any, recorder: bool
) -> None:
    ran = run(*made, recorder=recorder)
    order_of = list(ran.timelines)
    random.shuffle(order_of)
    assert ran.differences(order_of) == ran.differences()


@settings(deadline=None)
@given(_BODIES, _COUNTS, _RANKS, st.integers(0, 24), st.booleans())
def test_ranks_that_did_the_same_never_part(
    body: list[Made], count: int, ranks: int, came: int, recorder: bool
) -> None:
    made = rounds(body, count)[: came + 1]
    ran = run(*[made] * ranks, recorder=recorder)
    assert ran.differences() == ()
    opened = {rank: _last_open(one) for rank, one in ran.timelines.items()}
    assert Run(timelines=opened, boards=ran.boards, collectives={}).differences() == ()


def _last_open(one: Timeline) -> Timeline:
    return replace(one, events=(*one.events[:-1], replace(one.events[-1], is_done=False)))


@st.composite
def edited(draw: st.DrawFn) -> tuple[list[Made], int, int, int, bool]:
    """The rounds, at which event of the third round or a later one, on which rank of how many."""
    body = draw(_BODIES)
    count = draw(_COUNTS)
    ranks = draw(_RANKS)
    at = 2 * len(body) + draw(_AT) % ((count - 2) * len(body) - 1)  # behind it something is left to do
    return rounds(body, count), at, draw(_WHO) % ranks, ranks, draw(st.booleans())


def of_one(case: tuple[list[Made], int, int, int, bool], mine: Sequence[Made]) -> Difference:
    """One rank goes through `mine`."""
    made, _, who, ranks, recorder = case
    (one,) = run(*[mine if rank == who else made for rank in range(ranks)], recorder=recorder).differences()
    return one


@settings(deadline=None)
@given(edited())
def test_a_call_that_one_rank_leaves_out_is_found_with_its_line_and_step(
    case: tuple[list[Made], int, int, int, bool],
) -> None:
    made, at, who, _, _ = case
    one = of_one(case, without(at, made))
    assert (one.kind, one.ranks) == (MISSING, (who,))
    assert one.culprit_is_certain or made[at + 1].step > made[at].step, (
        "the last call of a round may have been the last of all"
    )
    assert one.expected is not None
    assert (one.expected.place, one.expected.step) == (line(made[at].line), made[at].step)


@settings(deadline=None)
@given(edited())
def test_a_call_that_one_rank_adds_is_found_with_its_line(case: tuple[list[Made], int, int, int, bool]) -> None:
    made, at, who, _, _ = case
    added = replace(OTHER, op="all_to_all", root=None, step=made[at].step, position=made[at].position + 50)
    one = of_one(case, [*made[:at], added, *made[at:]])
    assert (one.kind, one.ranks, one.is_new_event) == (EXTRA, (who,), True)
    own = one.event(who)
    assert own is not None
    assert own.place == line(99)


@settings(deadline=None)
@given(edited(), st.sampled_from([("elements", 77, SHAPE), ("dtype", "torch.float16", DTYPE), ("root", 1, ROOT)]))
def test_a_field_that_one_rank_changes_is_found_with_its_line_and_step(
    case: tuple[list[Made], int, int, int, bool], change: tuple[str, Any, DifferenceKind]
) -> None:
    made, at, who, _, _ = case
    field, changed, kind = change
    applies = made[at].op == "broadcast" if field == "root" else made[at].op not in ("barrier",)
    if not applies:
        return
    one = of_one(case, [*made[:at], replace(made[at], **{field: changed}), *made[at + 1 :]])
    assert (one.kind, one.ranks, one.culprit_is_certain) == (kind, (who,), True)
    own = one.event(who)
    assert own is not None
    assert (own.place, own.step) == (line(made[at].line), made[at].step)


@settings(deadline=None)
@given(edited())
def test_two_calls_that_one_rank_takes_in_the_other_order_are_found_where_it_begins(
    case: tuple[list[Made], int, int, int, bool],
) -> None:
    """The run stops at the first of them, so that a call left out looks alike."""
    made, at, who, _, _ = case
    one = of_one(case, [*made[:at], made[at + 1], made[at], *made[at + 2 :]])
    assert one.kind in (MISSING, ORDER)
    assert one.ranks == (who,)
    assert one.expected is not None
    assert (one.expected.place, one.expected.step) == (line(made[at].line), made[at].step)


@settings(deadline=None)
@given(edited(), st.lists(st.tuples(st.sampled_from(["drop", "swap", "repeat", "grow"]), _AT), min_size=1, max_size=3))
def test_no_rank_that_kept_its_rounds_is_ever_told_to_have_left_them(
    case: tuple[list[Made], int, int, int, bool], changes: list[tuple[str, int]]
) -> None:
    made, _, who, ranks, recorder = case
    mine = list(made)
    for what, at in changes:
        at %= max(1, len(mine))
        if what == "drop":
            mine = without(at, mine)
        elif what == "repeat" and mine:
            mine = [*mine[: at + 1], mine[at], *mine[at + 1 :]]
        elif what == "grow" and mine:
            mine[at] = replace(mine[at], elements=99)
        elif at + 1 < len(mine):
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
    for one in run(*[mine if rank == who else made for rank in range(ranks)], recorder=recorder).differences():
        assert not one.culprit_is_certain or one.ranks == (who,)
