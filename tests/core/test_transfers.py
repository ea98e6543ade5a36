"""What one rank left out or did alone: steps given up, calls that nobody else makes, roots that differ."""

from __future__ import annotations

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
    mark,
    raised,
    rank_evidence,
    rank_snapshot,
    stalled,
)
from nsa_harness.core.divergence.divergence import (
    Divergence,
    Track,
    added,
    analyse,
    changed_order,
    first_departure,
    other_partner,
    went_ahead,
)
from nsa_harness.core.divergence.ledger import AbandonedBatch, OtherPace, abandoned_batch, first_skipped, other_pace
from nsa_harness.core.divergence.mismatch import first_call_mismatch

from nsa_harness.core.diagnosis.engine import Diagnosis, diagnose
from nsa_harness.core.evidence.evidence import Board, Call, CaughtException, Collective, Evidence
from nsa_harness.core.report import Finding, Place, Status
from nsa_harness.core.verdict.verdict import judge


def line(number: int, function: str = "step") -> Place:
    return Place(file=USER, line=number, function=function)


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def main(seen: Evidence) -> Finding:
    return diagnosed(seen).findings[0]


def steps(count: int) -> tuple[tuple[int, float], ...]:
    return tuple((step, float(step)) for step in range(1, count + 1))


ZERO_NS = 10**18
BARRIER = call(1, "barrier", place=line(90, "main"), step=3, position=10, entered_s=6.0, left_s=None)


def through(*marks: int, calls: tuple[Call, ...] = (BARRIER,), **changes: Any) -> Board:
    """A rank that has done a step a number, with so many marks each, and stands in a barrier after the last."""
    done = len(marks)
    facts = {"steps_s": steps(done), "marked": dict(enumerate(marks, start=1)), "calls": calls}
    return board(mark("step", step=done, position=marks[-1], at_s=5.0), **{**facts, **changes})


def training(*marks: int, **changes: Any) -> Board:
    """A rank that has done these steps and is in the backward pass of the next one."""
    done = len(marks)
    facts = {"steps_s": steps(done), "marked": dict(enumerate(marks, start=1))}
    return board(mark("backward", step=done + 1, position=6, at_s=5.0), **{**facts, **changes})


# Steps compared by how much training they hold.


def test_a_step_with_more_marks_than_usual_on_a_rank_that_is_a_batch_short_was_begun_twice() -> None:
    found = abandoned_batch({0: training(10, 10, 10), 1: through(10, 14, 10)})
    assert found == AbandonedBatch(rank=1, step=2, marks=14, usual=10, others=(0,))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (training(10, 10, 10), through(10, 10, 10)),  # nothing unusual
        (training(10, 14, 10), through(10, 14, 10)),  # the others did as much: a longer step of the program
        (training(10, 10, 10), through(10, 20, 10)),  # a whole step more: an evaluation
        (through(10, 10, 10), through(10, 14, 10)),  # no rank has another step to do
        (training(10, 14, 10), through(10, 10, 10)),  # the other one is not short
        (training(10, 10), through(10, 14)),  # too few steps to say what is usual
        (training(10, 10, 10, marked={}), through(10, 14, 10)),  # a board that did not count them
    ],
)
def test_no_step_was_given_up_where_its_marks_or_the_other_ranks_do_not_show_it(first: Board, second: Board) -> None:
    assert abandoned_batch({0: first, 1: second}) is None


def test_a_rank_whose_every_step_holds_more_batches_than_the_others_has_another_pace() -> None:
    boards = {0: training(10, 10, 10, 10), 1: through(15, 15, 15), 2: training(10, 10, 10, 10)}
    assert other_pace(boards) == OtherPace(ranks=(1,), marks=((0, 10), (1, 15), (2, 10)))
    assert other_pace({0: training(10, 10, 10), 1: through(10, 10, 10)}) is None
    assert other_pace({0: training(10, 11, 10), 1: through(15, 15, 15)}) is None
    assert other_pace({0: through(10, 10, 10), 1: through(15, 15, 15)}) is None


# A batch that was given up.


def swallowed(**changes: Any) -> Evidence:
    boards = (training(10, 10, 10), through(10, 14, 10, rank=1, **changes))
    looks = [replace(in_all_reduce(rank), board=made) for rank, made in enumerate(boards)]
    return stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in enumerate(boards)))


def test_a_rank_that_began_again_in_a_step_and_came_short_of_a_batch_swallowed_something() -> None:
    found = diagnosed(swallowed())
    assert (found.cause, found.findings[0].ranks, found.findings[0].confidence) == ("swallowed_exception", (1,), 0.85)
    assert found.findings[0].claim == (
        "rank 1 gave up a batch in step 2 and began again (14 marks of training there, 10 in its other steps); so it"
        " came to its end while rank 0 had another step to do"
    )
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((1,), 2)


def test_an_exception_that_left_a_forward_in_that_step_makes_it_certain_and_names_the_line() -> None:
    found = main(swallowed(caught=(CaughtException(step=2, type="ValueError", place=line(31, "loss")),)))
    assert (found.code, found.confidence, found.place) == ("swallowed_exception", 0.95, line(31, "loss"))
    assert "ValueError was raised at ada/train.py:31 and caught" in found.claim
    elsewhere = main(swallowed(caught=(CaughtException(step=1, type="ValueError", place=line(31)),)))
    assert (elsewhere.confidence, elsewhere.place) == (0.85, None)


def test_what_the_rank_printed_is_quoted_where_the_exception_itself_was_not_seen() -> None:
    seen = swallowed()
    told = replace(seen.ranks[1], error_lines=("WARNING bad batch left out",))
    assert 'its stderr says "WARNING bad batch left out"' in main(replace(seen, ranks=(seen.ranks[0], told))).claim


def test_a_rank_that_raised_in_the_end_swallowed_nothing() -> None:
    seen = swallowed()
    failed = replace(seen.ranks[1], exit=ended(1, 1, at_s=5.0), raised=raised(1, at_s=4.0))
    assert diagnosed(replace(seen, ranks=(seen.ranks[0], failed))).cause == "exception"


def test_another_pace_on_one_rank_is_a_mismatch_of_accumulation() -> None:
    boards = (training(10, 10, 10, 10), through(15, 15, 15), training(10, 10, 10, 10))
    entered = (collective(9), collective(9, "barrier", sizes=(), dtypes=()), collective(9))
    looks = [replace(in_all_reduce(rank, entered[rank]), board=made) for rank, made in enumerate(boards)]
    ranks = tuple(rank_evidence(rank, board=made, collectives=(entered[rank],)) for rank, made in enumerate(boards))
    found = main(stalled(*looks, ranks=ranks))
    assert (found.code, found.ranks, found.confidence) == ("no_sync_mismatch", (1,), 0.8)
    assert "10 on ranks 0, 2, 15 on rank 1 marks of training in each" in found.claim


# A call that one rank makes alone.


SAVE = call(1, "barrier", place=line(60, "save"), step=2, position=10, entered_s=6.0, left_s=None)


def alone(ranks: int, *calls: Call, caller: int = 0, **changes: Any) -> Evidence:
    """One rank stands in a call after its second step, and the others are in the third."""
    boards = [
        through(10, 10, calls=calls or (SAVE,), **changes) if rank == caller else training(10, 10, rank=rank)
        for rank in range(ranks)
    ]
    looks = [replace(in_all_reduce(rank), board=made) for rank, made in enumerate(boards)]
    return stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in enumerate(boards)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_barrier_of_rank_0_alone_is_named_with_its_line_and_not_the_ranks_that_went_on(ranks: int) -> None:
    found = main(alone(ranks))
    assert (found.code, found.ranks, found.place) == ("rank0_only_collective", (0,), line(60, "save"))
    assert found.claim.startswith("only rank 0 called barrier at ada/train.py:60 in step 2, which rank")
    assert ("; or rank 1 left it out" in found.claim) is (ranks == 2)
    assert found.confidence == 0.75  # it stands between its steps: it may also have had no more of them


def test_within_a_step_a_call_of_one_among_many_is_certain_and_of_one_among_two_is_not() -> None:
    within = {"marks": (mark("forward", step=2, position=10),)}
    inside = [replace(alone(ranks), ranks=_with(alone(ranks), **within)) for ranks in (4, 2)]
    assert [(main(seen).code, main(seen).confidence) for seen in inside] == [
        ("rank0_only_collective", 0.95),
        ("rank0_only_collective", 0.75),
    ]


def _with(seen: Evidence, **changes: Any) -> tuple[Any, ...]:
    first = seen.ranks[0]
    assert first.board is not None
    return (replace(first, board=replace(first.board, **changes)), *seen.ranks[1:])


def test_a_call_that_the_others_made_in_an_earlier_step_was_left_out_by_them() -> None:
    before = replace(SAVE, step=1, left_s=5.0)
    boards = [through(10, 10, calls=(before, replace(SAVE, number=2))), training(10, 10, rank=1, calls=(before,))]
    looks = [replace(in_all_reduce(rank), board=made) for rank, made in enumerate(boards)]
    seen = stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in enumerate(boards)))
    assert (main(seen).code, main(seen).ranks) == ("rank_conditional_collective", (1,))


def test_of_two_ranks_another_one_than_the_first_may_well_be_right_and_nothing_is_certain() -> None:
    found = main(alone(2, caller=1))
    assert (found.code, found.ranks, found.confidence) == ("rank_conditional_collective", (0,), 0.75)


def test_taking_down_ones_groups_is_no_call_that_the_others_left_out() -> None:
    gone = call(1, "destroy_process_group", step=2, position=10)
    assert first_skipped({0: through(10, 10, calls=(gone,)), 1: training(10, 10)}) is None


# The order of a rank's own steps before, below Python.


def order(*sizes: int) -> tuple[Collective, ...]:
    return tuple(collective(seq, sizes=((size,),), retired=True) for seq, size in enumerate(sizes, start=1))


def parted(*tracks: tuple[Collective, ...]) -> tuple[Divergence, dict[int, Track]]:
    known = {rank: Track(collectives=made, board=None) for rank, made in enumerate(tracks)}
    return analyse(known, "gloo").divergences[0], known


def test_a_rank_that_entered_what_usually_comes_later_left_something_out() -> None:
    assert went_ahead(*parted(order(1, 2, 3, 4, 1, 2), order(1, 2, 3, 4, 1, 3))) == (1,)


def test_a_size_that_was_never_entered_before_is_no_leap_ahead_but_something_new() -> None:
    found = parted(order(1, 2, 3, 4, 1, 2), order(1, 2, 3, 4, 1, 9))
    assert (went_ahead(*found), added(*found)) == ((), (1,))


def test_in_the_first_step_there_is_no_order_to_hold_against() -> None:
    found = parted(order(1, 2), order(1, 3))
    assert (went_ahead(*found), added(*found)) == ((), ())


def test_where_no_rank_did_what_is_due_nobody_is_told_to_have_left_out_something() -> None:
    found = parted(order(1, 2, 3, 4, 1, 4), order(1, 2, 3, 4, 1, 3))
    assert went_ahead(*found) == ()


def below_python(*tracks: tuple[Collective, ...], first: str = "forward") -> Evidence:
    marks = [mark(first, step=2, position=3), mark("forward", step=3, position=3)]
    boards = [board(marks[rank], rank=rank) for rank in range(2)]
    opened = [(*made[:-1], replace(made[-1], retired=False)) for made in tracks]
    looks = [replace(in_all_reduce(rank, *opened[rank]), board=made) for rank, made in enumerate(boards)]
    ranks = tuple(rank_evidence(rank, board=boards[rank], collectives=opened[rank]) for rank in range(2))
    return stalled(*looks, ranks=ranks)


def test_a_layer_that_one_rank_went_round_is_no_mismatch_of_shapes() -> None:
    found = main(below_python(order(1, 2, 3, 4, 1, 2), order(1, 2, 3, 4, 1, 3)))
    assert (found.code, found.ranks, found.confidence) == ("rank_conditional_collective", (1,), 0.9)
    assert "rank 1 went on to what comes later in the steps before" in found.claim


def test_a_gather_that_rank_0_adds_between_its_steps_is_its_own() -> None:
    seen = below_python(order(1, 2, 3, 4, 1, 9), order(1, 2, 3, 4, 1, 2), first="step")
    assert (main(seen).code, main(seen).ranks, main(seen).confidence) == ("rank0_only_collective", (0,), 0.85)
    inside = below_python(order(1, 2, 3, 4, 1, 9), order(1, 2, 3, 4, 1, 2))
    assert main(inside).code == "shape_mismatch"


# Roots.


def rooted(*peers: int | None) -> dict[int, Board]:
    step_one = call(1, "broadcast", peer=0)
    return {
        rank: board(calls=(step_one, call(2, "broadcast", step=2, peer=peer, left_s=None)), rank=rank)
        for rank, peer in enumerate(peers)
    }


def hung_in_broadcast(*peers: int | None) -> Evidence:
    boards = rooted(*peers)
    looks = [
        rank_snapshot(rank, frame(3000, file="/x/torch/distributed/distributed_c10d.py"), frame(40), board=made,
                      collectives=(collective(2, "broadcast"),))
        for rank, made in boards.items()
    ]  # fmt: skip
    return stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in boards.items()))


def test_ranks_of_one_broadcast_that_name_other_roots_wait_for_each_other_for_ever() -> None:
    seen = hung_in_broadcast(1, 2, 1)
    assert judge(seen).status is Status.HANG
    found = diagnosed(seen)
    assert (found.cause, found.findings[0].ranks) == ("root_mismatch", (1,))
    assert found.findings[0].claim == (
        "broadcast (group 0) in step 2 has another root: rank 1 at ada/train.py:37 on ranks 0, 2, rank 2 at"
        " ada/train.py:37 on rank 1"
    )
    assert found.culprit is not None
    assert (found.culprit.step, found.culprit.place) == (2, line(37))


def test_the_same_root_everywhere_and_a_root_that_nobody_named_prove_nothing() -> None:
    assert first_call_mismatch(rooted(1, 1, 1), "gloo") is None
    assert first_call_mismatch(rooted(1, None, 1), "gloo") is None
    assert judge(hung_in_broadcast(1, 1, 1)).status is not Status.HANG


# Which backend a recorder is of.


def shapes(started: bool | None, backend: str) -> str | None:
    """Unequal all_gathers, which gloo refuses and NCCL may be given."""
    made = [call(1, "all_gather", elements=elements, left_s=None) for elements in (4, 2)]
    recorded = collective(1, "all_gather", started=started)
    aborted = rank_evidence(
        1,
        board=board(calls=(made[1],), rank=1),
        exit=ended(1, -6),
        error_lines=("op.preamble.length <= op.nbytes",),
        collectives=(recorded,),
    )
    lost = raised(0, message="Connection reset by peer")
    other = rank_evidence(0, board=board(calls=(made[0],)), exit=ended(0, 1), raised=lost, collectives=(recorded,))
    return diagnosed(evidence(other, aborted, backend=backend)).cause


def test_a_program_that_was_not_asked_for_its_backend_is_told_by_its_recorder() -> None:
    assert shapes(None, "any") == "shape_mismatch"
    assert shapes(True, "any") != "shape_mismatch"
    assert shapes(None, "nccl") != "shape_mismatch"


# Rounds of transfers.

SEND = ("send", 30)
RECV = ("recv", 31)
MEET = ("barrier", 32)


def rounds(*made: tuple[str, int], **changes: Any) -> Board:
    """A rank that made these calls one after the other; the last one is still open."""
    calls = [
        call(number, op, place=line(at), peer=None if op == "barrier" else changes.get("peer", 0))
        for number, (op, at) in enumerate(made, start=1)
    ]
    return board(calls=(*calls[:-1], replace(calls[-1], left_s=None)), rank=changes.get("rank", 0))


def test_the_call_that_a_rank_left_out_is_the_one_that_was_due_in_its_round() -> None:
    found = first_departure(rounds(SEND, MEET, SEND, MEET, MEET))
    assert found is not None
    assert (found.due.op, found.due.place, found.after.number) == ("send", line(30), 4)


def test_a_rank_that_keeps_its_rounds_or_leaves_the_loop_did_not_depart() -> None:
    assert first_departure(rounds(SEND, MEET, SEND, MEET, SEND)) is None
    assert first_departure(rounds(SEND, MEET, SEND, MEET, ("barrier", 80))) is None
    assert first_departure(rounds(SEND, MEET)) is None


def unmatched(*made: tuple[str, int]) -> Evidence:
    """Rank 1 waits in a receive of its third round; rank 0 stands in the last of these calls."""
    waits = rounds(RECV, MEET, RECV, MEET, RECV, rank=1)
    stands = rounds(*made, peer=1)
    wait = rank_snapshot(1, frame(3000, file="/x/torch/distributed/distributed_c10d.py"), frame(31), board=waits)
    looks = (in_all_reduce(0, collective(3, "barrier"), board=stands), wait)
    return stalled(*looks, ranks=(rank_evidence(0, board=stands), rank_evidence(1, board=waits)))


def test_the_rank_that_left_out_its_half_of_a_transfer_is_blamed_and_not_the_one_that_waits() -> None:
    found = main(unmatched(SEND, MEET, SEND, MEET, MEET))
    assert (found.code, found.ranks, found.place, found.confidence) == ("p2p_unmatched", (0,), line(30), 0.9)
    assert found.claim.endswith("; rank 0 left out send at ada/train.py:30 in its round")


def test_the_step_of_a_transfer_that_was_left_out_is_that_of_the_last_call_in_order() -> None:
    seen = unmatched(SEND, MEET, SEND, MEET, MEET)

    def step_of(**changes: Any) -> int | None:
        boards = [replace(rank.board, **changes) for rank in seen.ranks if rank.board]
        known = [
            replace(one, calls=tuple(replace(made, step=1 + number // 2) for number, made in enumerate(one.calls)))
            for one in boards
        ]
        ranks = tuple(replace(rank, board=one) for rank, one in zip(seen.ranks, known, strict=True))
        found = diagnosed(replace(seen, ranks=ranks))
        assert (found.cause, found.culprit is not None) == ("p2p_unmatched", True)
        return found.culprit.step if found.culprit else None

    assert step_of(steps_s=((1, 1.0), (2, 3.0), (3, 4.0), (4, 9.0))) == 2
    assert step_of(steps_s=((1, 1.0), (2, 1.5), (3, 4.0), (4, 9.0))) == 1, "that call was made between two steps"


def partners(*peers: int, rank: int) -> Board:
    calls = [call(number, "recv", place=line(31), peer=peer) for number, peer in enumerate(peers, start=1)]
    return board(calls=(*calls[:-1], replace(calls[-1], left_s=None)), rank=rank)


def test_the_rank_whose_transfer_turned_to_another_partner_is_blamed() -> None:
    boards = (partners(2, 2, 2, rank=0), partners(0, 0, 0, rank=1), partners(1, 1, 0, rank=2))
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = tuple(rank_snapshot(rank, leaf, frame(31), board=one) for rank, one in enumerate(boards))
    found = main(stalled(*looks, ranks=tuple(rank_evidence(rank, board=one) for rank, one in enumerate(boards))))
    assert (found.code, found.ranks, found.place, found.confidence) == ("p2p_unmatched", (2,), line(31), 0.9)
    assert found.claim.endswith("; rank 2 had another partner each time before in recv at ada/train.py:31")


@pytest.mark.parametrize("peers", [(1, 1, 1), (1, 0, 2), (1, 0)], ids=["the same", "each round another", "only once"])
def test_a_partner_that_was_never_the_usual_one_proves_nothing(peers: tuple[int, ...]) -> None:
    assert other_partner(partners(*peers, rank=2)) is None


def gathers(*sizes: int) -> Board:
    """A step without them before; all are called from one line."""
    first = call(1, "all_reduce", place=line(50), step=1)
    made = [
        call(number, "all_gather", place=line(12), step=2, position=number, elements=size)
        for number, size in enumerate(sizes, start=2)
    ]
    return board(calls=(first, *made[:-1], replace(made[-1], left_s=None)))


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "differ"),
    [((8, 8, 8), (8, 8, 4), (1,)), ((8, 4, 8), (8, 4, 2), (0, 1)), ((8, 8), (8, 4), (0, 1))],
    ids=["one size each time before", "sizes change there", "seen once before"],
)
def test_who_gave_another_size_is_told_by_its_line_before_where_that_had_one_size(
    of_rank_0: tuple[int, ...], of_rank_1: tuple[int, ...], differ: tuple[int, ...]
) -> None:
    found = first_call_mismatch({0: gathers(*of_rank_0), 1: gathers(*of_rank_1)}, "gloo")
    assert found is not None
    assert (found.kind, found.differ) == ("shape", differ)


def test_a_rank_that_caught_an_exception_and_passed_a_call_in_that_step_swallowed_it() -> None:
    def hung(*of_rank_0: CaughtException) -> Finding:
        error = CaughtException(step=2, type="ValueError", place=line(31, "loss"))
        sync = call(1, "all_reduce", place=line(48), step=2, position=5, left_s=None)
        other = call(1, "all_reduce", place=line(48), step=3, position=5, left_s=None)
        boards = (
            board(mark("backward", step=2, position=5), calls=(sync,), caught=of_rank_0),
            board(mark("backward", step=3, position=5), calls=(other,), caught=(error,)),
        )
        looks = [
            replace(in_all_reduce(rank, collective(6, ("all_reduce", "broadcast")[rank])), board=one)
            for rank, one in enumerate(boards)
        ]
        return main(stalled(*looks, ranks=tuple(rank_evidence(rank, board=one) for rank, one in enumerate(boards))))

    found = hung()
    assert (found.code, found.ranks, found.place, found.confidence) == (
        "swallowed_exception",
        (1,),
        line(31, "loss"),
        0.85,
    )
    assert found.claim.startswith(
        "rank 1 raised ValueError at ada/train.py:31 in step 2, caught it and went on without"
    )
    assert hung(CaughtException(step=1, type="ValueError", place=line(31))).code == "rank_conditional_collective"


def test_without_rounds_before_the_rank_that_waits_is_named_as_likely() -> None:
    found = main(unmatched(MEET))
    assert (found.code, found.ranks, found.confidence) == ("p2p_unmatched", (1,), 0.8)


def sending(rank: int, *posted: Call) -> Any:
    made = board(calls=(*posted, call(9, "send", peer=1 - rank, left_s=None)), rank=rank)
    return rank_snapshot(rank, frame(3000, file="/x/torch/distributed/distributed_c10d.py"), frame(40), board=made)


def test_two_sends_to_each_other_never_end_unless_a_receive_was_posted_before() -> None:
    assert main(stalled(sending(0), sending(1))).code == "p2p_unmatched"
    posted = [call(8, "irecv", peer=1 - rank) for rank in range(2)]
    assert judge(stalled(*(sending(rank, posted[rank]) for rank in range(2)))).status is not Status.HANG


# Groups that only some made.


def test_the_group_that_some_ranks_did_not_make_is_named_and_not_the_later_one_in_which_it_shows() -> None:
    first, second = (call(number, "new_group", place=line(15 + number), left_s=None) for number in (1, 2))
    late = replace(second, number=1, key="/default_pg/1//cpu//1/0")  # it waits for rank 0 under another number
    boards = (board(calls=(replace(first, left_s=2.1), second)), board(calls=(late,), rank=1))
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = [rank_snapshot(rank, c10d, frame(17), board=made) for rank, made in enumerate(boards)]
    found = main(stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in enumerate(boards))))
    assert (found.code, found.ranks, found.place) == ("group_creation_subset", (1,), line(16))
    assert "never called new_group at ada/train.py:16, so that new_group at ada/train.py:17 makes" in found.claim


def test_of_ranks_that_all_wait_in_making_a_group_the_one_that_made_fewer_left_one_out() -> None:
    first, second = (call(number, "new_group", place=line(15 + number), left_s=None) for number in (1, 2))
    boards = [board(calls=(replace(first, left_s=2.1), second), rank=rank, world_size=3) for rank in (1, 2)]
    boards = [board(calls=(replace(second, number=1),), world_size=3), *boards]
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = [rank_snapshot(rank, c10d, frame(17), board=made) for rank, made in enumerate(boards)]
    found = main(stalled(*looks, ranks=tuple(rank_evidence(rank, board=made) for rank, made in enumerate(boards))))
    assert (found.code, found.ranks, found.place) == ("group_creation_subset", (0,), line(16))
    assert "in which ranks 1-2 wait" in found.claim or "in which ranks 1, 2 wait" in found.claim


# Who left, and when.


@pytest.mark.parametrize(("destroyed_s", "cause"), [(4.0, "early_exit"), (None, "unknown")])
def test_a_rank_is_gone_when_it_takes_down_its_groups_and_not_only_when_its_process_ends(
    destroyed_s: float | None, cause: str
) -> None:
    calls = () if destroyed_s is None else (call(1, "destroy_process_group", entered_s=destroyed_s),)
    gone = rank_evidence(1, board=board(calls=calls, rank=1), exit=ended(1, 0, at_s=8.0))
    lost = raised(0, message="Connection closed by peer", at_s=4.2)
    assert diagnosed(evidence(rank_evidence(0, exit=ended(0, 1), raised=lost), gone)).cause == cause


def test_two_halves_that_pass_each_other_by_are_unmatched_as_likely() -> None:
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    halves = (call(9, "wait isend", peer=1, left_s=None), call(9, "recv", peer=0, left_s=None))
    looks = [
        rank_snapshot(rank, c10d, frame(40), board=board(calls=(half,), rank=rank)) for rank, half in enumerate(halves)
    ]
    found = main(stalled(*looks, at_s=400.0))
    assert (found.code, found.ranks, found.confidence) == ("p2p_unmatched", (0, 1), 0.75)


def test_a_rank_in_a_transfer_at_the_same_point_may_still_come_to_the_call() -> None:
    setup = call(1, "init_process_group", position=0)
    meets = board(calls=(setup, call(2, "barrier", left_s=None)))
    waits = board(calls=(setup, call(2, "recv", peer=0, left_s=None)), rank=1)
    elsewhere = board(calls=(setup, call(2, "all_gather", left_s=None)), rank=1)
    assert first_skipped({0: meets, 1: waits}) is None
    assert first_skipped({0: meets, 1: elsewhere}) is not None


# A loop that went round again without a step.


def went_round(**of_rank_1: Any) -> Evidence:
    """Both ranks broadcast at the start of each step; rank 1 does it again, while rank 0 trains in the next step."""
    sync = [call(step + 1, "broadcast", place=line(48), step=step, position=0, entered_s=1.0 + step) for step in (0, 1)]
    again = replace(sync[-1], number=3, entered_s=2.5, left_s=None)
    boards = {
        0: board(mark("backward", step=2, position=6, at_s=3.0), calls=tuple(sync), steps_s=steps(1)),
        1: board(mark("step", step=1, at_s=2.0), calls=(*sync, again), steps_s=steps(1), **of_rank_1),
    }
    looks = [
        replace(in_all_reduce(0, collective(9)), board=boards[0]),
        replace(in_all_reduce(1, collective(9, op="broadcast")), board=boards[1]),
    ]
    return stalled(*looks, ranks=[rank_evidence(rank, board=made) for rank, made in boards.items()])


def test_a_call_once_more_without_a_step_between_is_a_batch_given_up_by_the_rank_that_made_it() -> None:
    found = diagnosed(went_round())
    assert (found.cause, found.findings[0].ranks, found.findings[0].confidence) == ("swallowed_exception", (1,), 0.8)
    assert (
        "it called broadcast at ada/train.py:48 once more, without an optimizer step between"
        in main(went_round()).claim
    )
    caught = CaughtException(step=1, type="ValueError", place=line(31))
    assert (main(went_round(caught=(caught,))).confidence, main(went_round(caught=(caught,))).place) == (0.9, line(31))


@pytest.mark.parametrize("step", [1, 2])
def test_a_call_once_more_by_a_rank_that_did_its_step_is_no_batch_given_up(step: int) -> None:
    seen = went_round()
    other = seen.ranks[0].board
    assert other is not None
    if step == 1:  # the other rank is in the same step still: it may come to the call
        moved = replace(other, marks=(mark("backward", step=1, position=6, at_s=3.0),))
        seen = replace(seen, ranks=(replace(seen.ranks[0], board=moved), seen.ranks[1]))
    else:  # the rank itself is in the next step
        mine = seen.ranks[1].board
        assert mine is not None
        moved = replace(mine, marks=(mark("forward", step=2, at_s=2.6),))
        seen = replace(seen, ranks=(seen.ranks[0], replace(seen.ranks[1], board=moved)))
    assert diagnosed(seen).cause != "swallowed_exception"


# The backward pass that one rank left and the others did not.


def left_early(position: int = 9) -> Evidence:
    """Rank 1 gathers after its backward pass, as in each step before; rank 0 waits in its own for a bucket."""
    usual = call(1, "all_gather", place=line(70), step=1, position=9, entered_s=1.5, left_s=1.6)
    now = replace(usual, number=2, step=2, position=position, entered_s=2.0, left_s=None)
    facts = {"steps_s": steps(1), "zero_ns": ZERO_NS}
    boards = {
        0: board(mark("backward", step=2, position=9, at_s=2.0), calls=(usual,), **facts),
        1: board(mark("backward", step=2, position=position, at_s=2.0), calls=(usual, now), **facts),
    }
    at_ns = ZERO_NS + 2_050_000_000
    waiting = {0: collective(5, created_ns=at_ns), 1: collective(5, op="all_gather", created_ns=at_ns)}
    looks = [replace(in_all_reduce(rank, waiting[rank]), board=boards[rank]) for rank in boards]
    known = [rank_evidence(rank, board=boards[rank], collectives=(waiting[rank],)) for rank in boards]
    return stalled(*looks, ranks=known)


def test_who_leaves_the_backward_pass_early_with_less_of_the_model_left_parameters_out() -> None:
    found = main(left_early(position=7))
    assert (found.code, found.ranks, found.confidence) == ("rank_conditional_unused_params", (1,), 0.8)
    assert "rank 1 came out of the backward pass of step 2 and entered all_gather" in found.claim
    assert "while rank 0 still waits in it for gradients" in found.claim


def test_who_leaves_it_early_with_all_of_the_model_reduced_nothing() -> None:
    found = main(left_early())
    assert (found.code, found.ranks, found.confidence) == ("no_sync_mismatch", (1,), 0.8)


def test_of_ranks_in_a_cycle_the_one_that_took_its_groups_the_other_way_round_before_is_named() -> None:
    first, second = call(1, group="1", step=1), call(2, group="2", step=1, place=line(40))
    kept = board(calls=(first, second, replace(first, number=3, step=2)))
    assert changed_order(kept) is False
    assert changed_order(board(calls=(first, second, replace(second, number=3, step=2)))) is True
    assert changed_order(board(calls=())) is False
    assert changed_order(board(calls=(first, replace(second, step=2)))) is False, "never made before"
