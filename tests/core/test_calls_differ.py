"""Where ranks part: in the recorders, in the calls from Python, and the cause that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    USER,
    board,
    call,
    collective,
    ended,
    evidence,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    raised,
    rank_evidence,
    stalled,
)
from hypothesis import given
from hypothesis import strategies as st
from nsa_harness.core.divergence.divergence import Analysis, DivergenceKind, Track, analyse, minority
from nsa_harness.core.divergence.mismatch import CallMismatch, first_call_mismatch

from nsa_harness.core.diagnosis.engine import RULES, Diagnosis, diagnose
from nsa_harness.core.diagnosis.entries import classes
from nsa_harness.core.diagnosis.rules import call_mismatch
from nsa_harness.core.evidence.evidence import (
    Board,
    Call,
    Collective,
    Ending,
    Evidence,
    Frame,
    RankEvidence,
    RankSnapshot,
    StepRow,
    Tally,
)
from nsa_harness.core.report import CollectiveRef, Finding, Place
from nsa_harness.core.verdict.verdict import judge

ZERO_NS = 1_800_000_000_000_000_000
NOTHING = Analysis(divergences=(), cycle=(), never_entered=())


def track(*collectives: Collective, **groups: tuple[int, ...]) -> Track:
    """A rank's recorder; `g1=(0, 1)` is what its board says about the members of group 1."""
    told = {name[1:]: members for name, members in groups.items()}
    return Track(collectives=collectives, board=board(groups=told) if told else None)


def done(*numbers: int, **changes: Any) -> list[Collective]:
    return [collective(seq, retired=True, **changes) for seq in numbers]


def analysed(*tracks: Track, backend: str = "gloo") -> Analysis:
    return analyse(dict(enumerate(tracks)), backend)


def parted(found: Analysis) -> tuple[Any, ...]:
    (one,) = found.divergences
    return one.kind, one.group, one.seq, one.differ, one.missing


# The recorders.


def test_the_first_number_that_ranks_entered_otherwise_is_named() -> None:
    found = analysed(
        track(*done(1), collective(2), collective(3, "barrier")),
        track(*done(1), collective(2, "all_gather"), collective(3)),
    )
    assert parted(found) == (DivergenceKind.OPERATION, "0", 2, (0, 1), ())


def test_with_three_ranks_the_one_that_differs_is_named() -> None:
    odd = track(collective(1, "broadcast"))
    assert parted(analysed(track(collective(1)), odd, track(collective(1)))) == (
        DivergenceKind.OPERATION,
        "0",
        1,
        (1,),
        (),
    )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"sizes": ((5,),)}, DivergenceKind.SHAPE),
        ({"sizes": ((4,), (1,))}, DivergenceKind.SHAPE),
        ({"dtypes": ("Double",)}, DivergenceKind.DTYPE),
    ],
)
def test_other_sizes_and_types_are_told_apart(changes: dict[str, Any], kind: DivergenceKind) -> None:
    assert parted(analysed(track(collective(1)), track(collective(1, **changes)))) == (kind, "0", 1, (0, 1), ())


def test_another_shape_of_as_many_elements_is_the_same_payload() -> None:
    found = analysed(track(*done(1)), track(*done(1, sizes=((2, 2),))))
    assert found == NOTHING


@pytest.mark.parametrize("op", ["scatter", "gather", "all_to_all", "coalesced", "sparse_all_reduce"])
def test_operations_whose_sizes_rightly_differ_do_not_part_the_ranks(op: str) -> None:
    rooted = track(*done(1, op=op, sizes=((2, 3),)))
    assert analysed(rooted, track(*done(1, op=op, sizes=(), dtypes=()))) == NOTHING


@pytest.mark.parametrize(("backend", "kinds"), [("gloo", [DivergenceKind.SHAPE]), ("nccl", [])])
def test_an_uneven_all_gather_is_wrong_on_gloo_only(backend: str, kinds: list[DivergenceKind]) -> None:
    uneven = track(*done(1, op="all_gather", sizes=((9,),)))
    found = analysed(track(*done(1, op="all_gather")), uneven, backend=backend)
    assert [one.kind for one in found.divergences] == kinds


def test_a_member_that_has_not_come_to_an_open_collective_is_missing() -> None:
    assert parted(analysed(track(*done(1), collective(2)), track(*done(1)))) == (
        DivergenceKind.MISSING,
        "0",
        2,
        (1,),
        (1,),
    )


def test_a_number_that_only_one_rank_still_remembers_is_no_missing_one() -> None:
    assert analysed(track(collective(2), *done(9)), track(*done(8, 9))).divergences == ()


def test_ranks_without_a_recorder_are_not_compared() -> None:
    assert analysed(track(collective(1)), track()).divergences == ()


def test_who_belongs_to_a_group_is_what_the_boards_say() -> None:
    outside = track(*done(1))
    members = [track(*done(1), collective(1, group="3"), g3=(0, 1)), track(*done(1), g3=(0, 1))]
    found = analysed(*members, outside)
    assert parted(found) == (DivergenceKind.MISSING, "3", 1, (1,), (1,))
    assert found.never_entered == (("3", (1,)),)


def test_without_boards_the_members_of_a_group_are_those_that_entered_it() -> None:
    assert analysed(track(*done(1), collective(1, group="3")), track(*done(1))).divergences == ()


def test_two_groups_of_one_name_on_different_ranks_are_two() -> None:
    first = [track(collective(1, group="tp"), gtp=(0, 1)) for _ in range(2)]
    other = [track(collective(1, "barrier", group="tp"), gtp=(2, 3)) for _ in range(2)]
    assert analysed(*first, *other).divergences == ()


def test_ranks_that_all_have_the_same_open_have_not_parted() -> None:
    assert analysed(track(collective(7)), track(collective(7))) == NOTHING


def test_a_ring_over_two_groups_is_a_cycle() -> None:
    found = analysed(
        track(*done(1, group="2"), collective(5, group="1")), track(*done(1, group="1"), collective(2, group="2"))
    )
    assert [(link.entry.rank, link.entry.collective.group, link.waits_for) for link in found.cycle] == [
        (0, "1", 1),
        (1, "2", 0),
    ]


def test_three_ranks_in_three_groups_are_a_cycle() -> None:
    waits = [("ab", "ca"), ("bc", "ab"), ("ca", "bc")]  # stands in, has been in
    tracks = [track(*done(1, group=was), collective(2, group=stands)) for stands, was in waits]
    assert [link.waits_for for link in analysed(*tracks).cycle] == [1, 2, 0]


def test_a_wait_that_leads_to_a_rank_which_waits_for_nobody_is_no_cycle() -> None:
    assert analysed(track(*done(1, group="2"), collective(5, group="1")), track(*done(1, group="1"))).cycle == ()


_TRACKS = st.lists(
    st.lists(
        st.builds(
            lambda seq, group, op, retired: collective(seq, op, group=group, retired=retired),
            st.integers(1, 4),
            st.sampled_from(["0", "1"]),
            st.sampled_from(["all_reduce", "barrier"]),
            st.booleans(),
        ),
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@given(_TRACKS)
def test_the_order_in_which_ranks_and_entries_are_given_changes_nothing(tracks: list[list[Collective]]) -> None:
    unique = [list({(one.group, one.seq): one for one in entries}.values()) for entries in tracks]
    forward = analyse({rank: track(*entries) for rank, entries in enumerate(unique)}, "gloo")
    backward = {rank: track(*reversed(unique[rank])) for rank in reversed(range(len(unique)))}
    assert analyse(backward, "gloo") == forward


@given(_TRACKS.filter(lambda tracks: len(tracks[0]) > 0))
def test_ranks_that_entered_the_same_never_part(tracks: list[list[Collective]]) -> None:
    found = analysed(*[track(*tracks[0])] * 3)
    assert (found.divergences, found.cycle, found.never_entered) == ((), (), ())


def test_the_majority_is_right_and_between_equally_many_nobody_is() -> None:
    assert minority({0: "a", 1: "b", 2: "a"}) == (1,)
    assert minority({0: "a", 1: "b"}) == (0, 1)
    assert minority({0: "a", 1: "a"}) == ()


def test_ranks_that_did_the_same_are_told_together_and_of_many_kinds_the_rest_is_counted() -> None:
    assert classes([(1, "a"), (0, "a"), (2, "b")]) == [("ranks 0, 1", "a"), ("rank 2", "b")]
    told = classes([(rank, str(rank)) for rank in range(1000)])
    assert (len(told), told[-1]) == (5, ("996 more ranks", "something else"))


# The calls from Python.


def line(number: int) -> Place:
    return Place(file=USER, line=number, function="step")


def steps_of(*steps: Sequence[tuple[str, dict[str, Any]]], **changes: Any) -> Board:
    """A rank that made these calls, a list a step; the very last one is still open."""
    made = [(step, op, facts) for step, calls in enumerate(steps, start=1) for op, facts in calls]
    calls = [call(number, op, **{"step": step, **facts}) for number, (step, op, facts) in enumerate(made, start=1)]
    return board(calls=(*calls[:-1], replace(calls[-1], left_s=None)), **changes)


REDUCE: tuple[str, dict[str, Any]] = ("all_reduce", {})
GATHER: tuple[str, dict[str, Any]] = ("all_gather", {"place": line(41)})
OTHER_GATHER: tuple[str, dict[str, Any]] = ("all_gather", {"place": line(50)})
LARGE: tuple[str, dict[str, Any]] = ("all_reduce", {"elements": 5})
DOUBLE: tuple[str, dict[str, Any]] = ("all_reduce", {"dtype": "torch.float64"})


def side_by_side(*boards: Board, backend: str = "gloo") -> CallMismatch | None:
    return first_call_mismatch(dict(enumerate(boards)), backend)


@pytest.mark.parametrize(
    ("other", "kind"),
    [(OTHER_GATHER, DivergenceKind.OPERATION), (LARGE, DivergenceKind.SHAPE), (DOUBLE, DivergenceKind.DTYPE)],
)
def test_the_rank_that_departs_from_what_it_did_before_is_named(
    other: tuple[str, dict[str, Any]], kind: DivergenceKind
) -> None:
    found = side_by_side(steps_of([REDUCE], [REDUCE]), steps_of([REDUCE], [other]))
    assert found is not None
    assert (found.kind, found.step, found.differ) == (kind, 2, (1,))
    assert found.call(1).op == other[0]


def test_in_the_first_step_of_two_ranks_both_are_named() -> None:
    found = side_by_side(steps_of([REDUCE]), steps_of([LARGE]))
    assert found is not None
    assert found.differ == (0, 1)


def test_sizes_that_change_on_every_rank_accuse_none_of_two() -> None:
    found = side_by_side(steps_of([REDUCE], [LARGE]), steps_of([REDUCE], [("all_reduce", {"elements": 6})]))
    assert found is not None
    assert found.differ == (0, 1)


def test_calls_that_are_alike_are_not_unlike() -> None:
    both = steps_of([REDUCE, GATHER], [REDUCE])
    assert side_by_side(both, both) is None
    assert side_by_side(both) is None


def test_the_same_call_on_another_line_is_a_branch_and_no_difference() -> None:
    assert side_by_side(steps_of([REDUCE]), steps_of([("all_reduce", {"place": line(60)})])) is None


def test_a_call_that_the_rank_usually_makes_later_shows_that_one_was_left_out() -> None:
    usual = [REDUCE, GATHER]
    found = side_by_side(steps_of(usual, [REDUCE]), steps_of(usual, [GATHER]))
    assert found is not None
    assert (found.skipped, found.differ) == (True, (1,))
    both_depart = side_by_side(steps_of(usual, [GATHER]), steps_of([GATHER, REDUCE], [REDUCE]))
    assert both_depart is None
    one_skips_and_one_is_new = side_by_side(steps_of(usual, [GATHER]), steps_of(usual, [("barrier", {})]))
    assert one_skips_and_one_is_new is None


def test_a_rank_that_goes_round_a_layer_left_it_out_although_it_has_made_fewer_marks() -> None:
    """As under FSDP2: a gather for each layer, and the backward begins with a call that usually comes later."""
    later = {"place": line(41)}
    usual = [REDUCE, ("all_reduce", {"position": 3}), ("barrier", {"position": 6, **later})]
    kept = steps_of(usual, usual[:2], zero_ns=ZERO_NS)
    left = steps_of(usual, [usual[0], ("barrier", {"position": 4, **later})], zero_ns=ZERO_NS)
    found = diagnosed(hung(kept, left, collectives=[[entered(18)], [entered(18, op="barrier")]]))
    assert (found.cause, found.findings[0].ranks) == ("rank_conditional_collective", (1,))
    assert found.findings[0].claim == (
        "rank 1 skipped all_reduce at ada/train.py:37 in step 2 (#18 of group 0), which rank 0 called, and went on to"
        " barrier at ada/train.py:41, which comes later in other steps; or it makes both in another order"
    )
    assert found.culprit is not None
    assert found.culprit.collective == CollectiveRef(group="0", seq=18, op="all_reduce")


def in_turn(*below: tuple[Frame, ...]) -> Evidence:
    """Rank 1 makes first what it usually makes second; each stands in these frames of the program."""
    usual = [REDUCE, GATHER]
    kept, other = (steps_of(usual, [one], zero_ns=ZERO_NS) for one in usual)
    seen = hung(kept, other, collectives=[[entered(18)], [entered(18, op="all_gather")]])
    looks = tuple(
        replace(look, ranks=tuple(standing(rank, *frames) for rank, frames in zip(look.ranks, below, strict=True)))
        for look in seen.snapshots
    )
    return replace(seen, snapshots=looks)


def standing(rank: RankSnapshot, *frames: Frame) -> RankSnapshot:
    return replace(rank, stacks=(replace(rank.stacks[0], frames=(rank.stacks[0].frames[0], *frames)),))


def test_calls_made_from_one_line_above_are_gone_through_in_another_order() -> None:
    loop, main = frame(46, function="sync"), frame(66, function="run")
    apart = ((frame(22, function="mean"), loop, main), (frame(35, function="histogram"), loop, main))
    found = diagnosed(in_turn(*apart))
    assert (found.cause, found.findings[0].ranks, found.findings[0].confidence) == (
        "collective_order_mismatch",
        (1,),
        0.75,
    )
    assert found.culprit is not None
    assert found.culprit.place == Place(file=USER, line=46, function="sync")
    assert "all from one line above at ada/train.py:46" in found.findings[0].claim


@pytest.mark.parametrize(
    "apart",
    [
        ((frame(30, function="sync"), frame(66)), (frame(32, function="sync"), frame(66))),
        ((frame(22, function="mean"), frame(66)), (frame(35, function="histogram"), frame(67))),
        ((frame(22),), (frame(35),)),
    ],
    ids=["two lines of one function", "called from two lines", "nothing above"],
)
def test_calls_made_from_different_lines_leave_one_of_them_out(apart: tuple[tuple[Frame, ...], ...]) -> None:
    assert diagnosed(in_turn(*apart)).cause == "rank_conditional_collective"


def test_ranks_at_different_points_of_the_program_are_not_compared() -> None:
    assert side_by_side(steps_of([REDUCE]), steps_of([("all_gather", {"position": 3})])) is None


def test_a_difference_that_the_run_went_on_from_ended_nothing() -> None:
    later = ("barrier", {"place": line(70)})
    assert side_by_side(steps_of([REDUCE, later]), steps_of([LARGE, later])) is None


def test_objects_and_scattered_tensors_rightly_differ_in_size() -> None:
    assert side_by_side(steps_of([("scatter", {})]), steps_of([("scatter", {"elements": 0})])) is None
    assert side_by_side(steps_of([("all_gather", {})]), steps_of([("all_gather", {"elements": 9})])) is not None
    assert (
        side_by_side(steps_of([("all_gather", {})]), steps_of([("all_gather", {"elements": 9})]), backend="nccl")
        is None
    )


def test_transfers_waits_and_setup_are_no_collectives() -> None:
    assert side_by_side(steps_of([("send", {})]), steps_of([("recv", {})])) is None
    assert side_by_side(steps_of([("wait barrier", {})]), steps_of([("new_group", {})])) is None


def test_steps_that_are_not_remembered_whole_are_not_compared() -> None:
    lap = board(calls=(call(257, step=4), call(258, "all_gather", step=5, left_s=None)))
    assert side_by_side(lap, board(calls=(call(1, step=5), call(2, step=5, left_s=None)))) is not None
    lap = board(calls=(call(257, "all_gather", step=5, left_s=None),))
    assert side_by_side(lap, board(calls=(call(1, step=5, left_s=None),))) is None


# The causes.


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def main(seen: Evidence) -> Finding:
    return diagnosed(seen).findings[0]


def hung(*boards: Board, collectives: Sequence[Sequence[Collective]], ledgers: Any = ((), ())) -> Evidence:
    """Ranks that stand in their newest collective, seen twice and ended as a stall."""
    looks = [in_all_reduce(rank, *entered) for rank, entered in enumerate(collectives)]
    looks = [replace(look, board=made) for look, made in zip(looks, boards, strict=True)]
    known = [
        rank_evidence(rank, board=made, collectives=tuple(entered), ledger=tuple(ledger))
        for rank, (made, entered, ledger) in enumerate(zip(boards, collectives, ledgers, strict=True))
    ]
    return stalled(*looks, ranks=tuple(known))


def entered(seq: int, at_s: float = 2.05, op: str = "all_reduce", **changes: Any) -> Collective:
    """Within the calls that the builders make, unless another time is given."""
    return collective(seq, op, created_ns=ZERO_NS + round(at_s * 1e9), **changes)


def calling(*made: Call, **changes: Any) -> Board:
    return board(mark("step", step=made[-1].step if made else 1), calls=made, zero_ns=ZERO_NS, **changes)


def test_the_step_of_crossed_groups_is_told_by_the_lines_before_the_optimizer() -> None:
    """Without a forward that is marked, what precedes the optimizer's line is counted to the step before."""
    seen = groups_crossed()
    loop = frame(60, function="main")
    known = [
        replace(rank, board=replace(rank.board, steps_s=((3, 1.0),), stepped_from=(loop,)))
        for rank in seen.ranks
        if rank.board
    ]

    def step_at(line_number: int) -> int | None:
        above = frame(line_number, function="main")
        looks = tuple(
            replace(look, ranks=tuple(standing(rank, frame(40), above) for rank in look.ranks))
            for look in seen.snapshots
        )
        culprit = diagnosed(replace(seen, ranks=tuple(known), snapshots=looks)).culprit
        return culprit.step if culprit else None

    assert (step_at(51), step_at(70)) == (4, 3)


def test_a_rank_that_turned_the_order_is_placed_where_it_parts_from_one_that_kept_it() -> None:
    """The line of the program's own function, not the one of a helper that both call sooner or later."""
    seen = groups_crossed()
    first, second = (call(number, group=str(number), step=2) for number in (1, 2))
    now = replace(first, number=3, step=3, left_s=None)
    boards = [calling(first, second, now), calling(first, second, replace(now, group="2"))]
    known = tuple(replace(rank, board=made) for rank, made in zip(seen.ranks, boards, strict=True))
    parts = (
        (frame(23, function="norm"), frame(35, function="sync")),
        (frame(27, function="average"), frame(33, function="sync")),
    )
    looks = tuple(
        replace(look, ranks=tuple(standing(rank, *above) for rank, above in zip(look.ranks, parts, strict=True)))
        for look in seen.snapshots
    )
    found = diagnosed(replace(seen, ranks=known, snapshots=looks))
    assert found.cause == "cross_group_deadlock"
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.place) == ((1,), Place(file=USER, line=33, function="sync"))


def groups_crossed(**second: Any) -> Evidence:
    open_call = call(1, group="1", step=3, left_s=None)
    boards = [calling(open_call), calling(replace(open_call, group="2", **second))]
    first = [*done(1, group="2"), entered(2, group="1")]
    return hung(*boards, collectives=[first, [*done(1, group="1"), entered(2, group="2")]])


def test_groups_taken_in_opposite_order_are_a_deadlock_of_both_ranks() -> None:
    found = diagnosed(groups_crossed())
    assert found.cause == "cross_group_deadlock"
    assert found.findings[0].claim == (
        "2 ranks wait for each other in different groups in step 3: rank 0 waits in all_reduce #2 of group 1"
        " (4 elements) at ada/train.py:37 for rank 1, rank 1 waits in all_reduce #2 of group 2 (4 elements) at"
        " ada/train.py:37 for rank 0; which of them is wrong the run does not show"
    )
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((0, 1), 3)
    assert found.culprit.collective == CollectiveRef(group="1", seq=2, op="all_reduce")


def test_a_ring_in_which_one_rank_is_further_on_is_a_skipped_collective() -> None:
    ahead = groups_crossed(position=7)
    boards = [one.board for one in ahead.ranks]
    assert boards[1] is not None
    members = {"1": (0, 1), "2": (0, 1)}
    moved = replace(boards[1], marks=(mark("forward", step=3, position=7),), groups=members)
    ranks = (ahead.ranks[0], replace(ahead.ranks[1], board=moved))
    assert main(replace(ahead, ranks=ranks)).code == "rank_conditional_collective"


def order_mismatch() -> Evidence:
    first, other = steps_of([REDUCE], [REDUCE], zero_ns=ZERO_NS), steps_of([REDUCE], [OTHER_GATHER], zero_ns=ZERO_NS)
    return hung(first, other, collectives=[[entered(13)], [entered(13, op="all_gather")]])


def test_another_collective_at_the_same_point_is_an_order_mismatch_with_both_lines() -> None:
    found = diagnosed(order_mismatch())
    assert found.cause == "collective_order_mismatch"
    assert found.findings[0].claim == (
        "the ranks call different collectives at the same point of step 2 (#13 of group 0): rank 0 called all_reduce"
        " at ada/train.py:37, rank 1 called all_gather at ada/train.py:50"
    )
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step, found.culprit.place) == ((1,), 2, line(50))
    assert found.culprit.collective == CollectiveRef(group="0", seq=13, op="all_gather")


def aborted(other: tuple[str, dict[str, Any]]) -> Evidence:
    """gloo ends the rank that receives too much; it leaves no recorder behind."""
    victim = rank_evidence(
        0, board=steps_of([REDUCE], [REDUCE]), exit=ended(0, -6), error_lines=("op.preamble.length <= op.nbytes",)
    )
    lost = raised(1, message="Connection reset by peer")
    return evidence(victim, rank_evidence(1, board=steps_of([REDUCE], [other]), exit=ended(1, 1), raised=lost))


@pytest.mark.parametrize(
    ("other", "code", "sizes"),
    [(LARGE, "shape_mismatch", ("4 elements", "5 elements")), (DOUBLE, "dtype_mismatch", ("float32", "float64"))],
)
def test_the_rank_that_changed_its_payload_is_blamed_and_not_the_one_that_gloo_ended(
    other: tuple[str, dict[str, Any]], code: str, sizes: tuple[str, str]
) -> None:
    found = main(aborted(other))
    assert (found.code, found.ranks, found.proof) == (code, (1,), ("rank0/calls.txt", "rank1/calls.txt"))
    for rank, size in enumerate(sizes):
        assert f"{size} at ada/train.py:37 on rank {rank}" in found.claim


def test_below_python_the_recorder_shows_the_mismatch_and_says_that_it_cannot_tell_who_is_wrong() -> None:
    seen = hung(calling(), calling(), collectives=[[entered(9)], [entered(9, sizes=((6,),))]])
    found = main(seen)
    assert (found.code, found.ranks) == ("shape_mismatch", (0, 1))
    assert found.claim == (
        "all_reduce #9 of group 0, below DDP or FSDP, has 4 elements at ada/train.py:40 on rank 0, 6 elements at"
        " ada/train.py:40 on rank 1; which of them is wrong the run does not show"
    )


def ledger(*counts: int, gradients: int = 6, op: str = "all_reduce") -> list[StepRow]:
    return [
        StepRow(
            step=step,
            until=step,
            done_s=float(step),
            gradients=gradients if count else 6 * (gradients == 6),
            tallies=(Tally(group="0", op=op, called=False, count=count),) if count else (),
        )
        for step, count in enumerate(counts, start=1)
    ]


def fewer(**changes: Any) -> Evidence:
    ended_in = [[entered(9)], [entered(9, op="barrier", sizes=(), dtypes=())]]
    ledgers = (ledger(1, 1, 1), ledger(1, 0, 1, **changes))
    return hung(calling(), calling(), collectives=ended_in, ledgers=ledgers)


def test_a_step_without_a_reduction_is_a_no_sync_mismatch_and_names_that_step() -> None:
    found = diagnosed(fewer())
    assert found.cause == "no_sync_mismatch"
    assert found.findings[0].claim == (
        "rank 1 reduced gradients otherwise than the rest in step 2 (all_reduce of group 0: rank 0 x1 · rank 1 x0);"
        " from there on reductions of different steps were paired; it showed when rank 0 entered all_reduce #9 of"
        " group 0 (4 elements) at ada/train.py:40, rank 1 entered barrier #9 of group 0 at ada/train.py:40"
    )
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((1,), 2)
    assert found.findings[0].proof == ("step_ledger.txt",)


def test_a_step_without_gradients_is_a_backward_that_did_not_run() -> None:
    found = main(fewer(gradients=0))
    assert (found.code, found.ranks) == ("rank_conditional_collective", (1,))
    assert "in step 2 otherwise than the rest (rank 0 x1 · rank 1 x0): fewer gradients there" in found.claim


def test_fewer_gathers_are_no_matter_of_no_sync() -> None:
    seen = fewer()
    ledgers = (ledger(1, 1, 1, op="all_gather"), ledger(1, 0, 1, op="all_gather"))
    ranks = tuple(replace(rank, ledger=tuple(rows)) for rank, rows in zip(seen.ranks, ledgers, strict=True))
    assert main(replace(seen, ranks=ranks)).code == "rank_conditional_collective"


def uneven(**changes: Any) -> Evidence:
    two = ((1, 1.0), (2, 2.0))
    trains = board(mark("backward", step=3), steps_s=two, zero_ns=ZERO_NS)
    barrier = call(1, "barrier", place=line(105), step=3, entered_s=6.0, left_s=None)
    fetch = mark("data", "fetch", step=3, at_s=5.0)
    finished = board(fetch, steps_s=two, calls=(barrier,), zero_ns=ZERO_NS)
    collectives = [[entered(9)], [entered(9, 6.1, "barrier", sizes=(), dtypes=())]]
    return hung(trains, finished, collectives=collectives, **changes)


def test_a_rank_that_ran_out_of_batches_is_blamed_and_not_the_one_that_had_more() -> None:
    found = diagnosed(uneven())
    assert found.cause == "uneven_inputs"
    assert found.findings[0].claim == (
        "rank 1 ran out of batches after step 2 and entered barrier at ada/train.py:105; rank 0 went on to step 3:"
        " rank 0 entered all_reduce #9 of group 0 (4 elements) at ada/train.py:40"
    )
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step, found.culprit.place) == ((1,), 3, line(105))


def test_a_difference_in_an_earlier_step_explains_the_uneven_end() -> None:
    assert main(uneven(ledgers=(ledger(1, 1), ledger(1, 0)))).code == "no_sync_mismatch"
    gathers = (ledger(1, 1, op="all_gather"), ledger(1, 0, op="all_gather"))
    assert main(uneven(ledgers=gathers)).code == "rank_conditional_collective"


def test_a_rank_that_ran_out_and_left_is_uneven_and_not_an_early_exit() -> None:
    fetch = mark("data", "fetch", step=3, at_s=5.0)
    two = ((1, 1.0), (2, 2.0))
    gone = rank_evidence(1, board=board(fetch, steps_s=two, exit_s=8.0), exit=ended(1, 0, at_s=8.5))
    lost = raised(0, message="Connection closed by peer")
    left = rank_evidence(0, board=board(mark("backward", step=3), steps_s=two), exit=ended(0, 1), raised=lost)
    found = main(evidence(left, gone))
    assert (found.code, found.ranks) == ("uneven_inputs", (1,))
    assert found.claim == "rank 1 ran out of batches after step 2 and ended; rank 0 went on to step 3"


def test_what_is_not_called_from_python_parts_the_ranks_too() -> None:
    found = main(stalled(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast"))))
    assert (found.code, found.ranks) == ("rank_conditional_collective", (0, 1))
    assert found.claim == (
        "the ranks parted at collective #6 of group 0: rank 0 entered all_reduce #6 of group 0 (4 elements) at"
        " ada/train.py:40, rank 1 entered broadcast #6 of group 0 (4 elements) at ada/train.py:40; which of them is"
        " wrong the run does not show"
    )


def between_steps(kind: str) -> Evidence:
    """Rank 0 stands in a barrier after step 2, and rank 1 is in step 3."""
    barrier = call(1, "barrier", step=2, position=5, left_s=None)
    waits = board(mark(kind, step=2, position=5), calls=(barrier,))
    trains = board(mark("backward", step=3, position=2), rank=1)
    return hung(waits, trains, collectives=[(), ()])


def test_a_rank_in_a_barrier_between_its_steps_may_also_have_had_none_left() -> None:
    found = main(between_steps("step"))
    assert (found.code, found.ranks, found.confidence) == ("rank_conditional_collective", (1,), 0.75)
    assert found.claim.endswith("(rank 0 x1 · rank 1 x0); or rank 0 had no step left to do")
    within = main(between_steps("forward"))
    assert "left to do" not in within.claim


ALL = {
    "cross_group_deadlock": groups_crossed,
    "collective_order_mismatch": order_mismatch,
    "no_sync_mismatch": fewer,
    "uneven_inputs": uneven,
    "rank_conditional_collective": lambda: fewer(gradients=0),
    "shape_mismatch": lambda: aborted(LARGE),
    "dtype_mismatch": lambda: aborted(DOUBLE),
}


def test_every_rule_of_divergence_has_a_run_that_it_answers() -> None:
    module = call_mismatch.__name__
    rules = [rule for rule in RULES if rule.explain.__module__ == module]
    assert len(rules) == len(ALL)
    assert {code: diagnosed(seen()).cause for code, seen in ALL.items()} == {code: code for code in ALL}


def with_failure(seen: Evidence, **changes: Any) -> Evidence:
    first: RankEvidence = replace(seen.ranks[0], **changes)
    return replace(seen, ranks=(first, *seen.ranks[1:]))


@pytest.mark.parametrize("code", ALL)
def test_no_rule_of_divergence_answers_where_something_else_ended_the_run(code: str) -> None:
    seen = ALL[code]()
    raising = with_failure(seen, exit=ended(0, 1, at_s=5.0), raised=raised(0, at_s=4.0))
    killed = with_failure(seen, exit=ended(0, -9, at_s=5.0), raised=None, error_lines=())
    assert diagnosed(raising).cause == "exception"
    assert main(killed).code not in {*ALL} - {"rank_conditional_collective"}


@pytest.mark.parametrize("code", [code for code in ALL if not code.endswith(("shape_mismatch", "dtype_mismatch"))])
def test_a_rank_that_waits_for_no_rank_is_the_cause_and_a_run_at_its_deadline_is_slow(code: str) -> None:
    seen = ALL[code]()
    assert diagnosed(replace(seen, ending=Ending.DEADLINE)).cause == "slow"
    looks = [replace(look, ranks=(locked_in_backward(0), *look.ranks[1:])) for look in seen.snapshots]
    ranks = (replace(seen.ranks[0], board=None), *seen.ranks[1:])
    assert diagnosed(replace(seen, snapshots=tuple(looks), ranks=ranks)).cause == "backward_function_blocked"


def test_the_same_collective_on_every_rank_is_the_networks_whatever_a_ledger_says() -> None:
    seen = hung(calling(), calling(), collectives=[[entered(9)], [entered(9)]], ledgers=(ledger(1, 1), ledger(1, 0)))
    assert diagnosed(seen).cause not in ALL
