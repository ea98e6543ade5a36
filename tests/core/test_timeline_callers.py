"""Which calls belong to a rank's timeline, from when on it is whole, and which call of the program each of them is."""

from __future__ import annotations

from builders import board, call, frame, mark

from nsa_harness.core.collectives.timeline import timeline, with_comparable_callers
from nsa_harness.core.evidence.evidence import Call, CallCount, StatusFile

GLOO = "gloo"
MAIN, HELPER = 100, 101  # threads; the builders' process is 100


def numbers(seen: StatusFile) -> list[int]:
    return [event.call.number for event in timeline(0, seen, (), GLOO).events if event.call]


def both() -> StatusFile:
    """The main thread trains, and newest of all a helper did something."""
    calls = (call(1, tid=MAIN), call(2, tid=HELPER), call(3, tid=MAIN), call(4))
    marks = (mark("data", tid=HELPER, at_s=9.0), mark("backward", tid=MAIN, at_s=8.0))
    return board(*marks, calls=calls)


def test_what_a_helper_thread_calls_is_no_part_of_it_and_what_nobody_is_known_to_call_is() -> None:
    assert numbers(both()) == [1, 3, 4]


def test_the_thread_of_autograd_that_marked_last_does_not_train() -> None:
    marks = (mark("backward", tid=HELPER, at_s=9.0), mark("forward", tid=MAIN, at_s=8.0))
    assert numbers(board(*marks, calls=(call(1, tid=MAIN), call(2, tid=HELPER)))) == [1]


def test_a_thread_that_trains_beside_the_main_one_is_the_one_that_counts() -> None:
    assert numbers(board(mark("step", tid=HELPER), calls=(call(1, tid=MAIN), call(2, tid=HELPER)))) == [2]


def test_without_a_mark_of_training_the_main_thread_counts_if_it_calls_at_all() -> None:
    assert numbers(board(calls=(call(1, tid=MAIN), call(2, tid=HELPER)))) == [1]
    assert numbers(board(calls=(call(1, tid=HELPER), call(2, tid=HELPER)))) == [1, 2]


def whole(*calls: Call, **counts: int) -> bool:
    known = {group[1:]: CallCount(calls=number, hash=1) for group, number in counts.items()}
    return timeline(0, board(calls=calls, counts=known), (), GLOO).is_complete


def test_it_is_whole_where_every_call_that_was_counted_was_kept() -> None:
    kept = (call(7, "new_group"), call(8), call(9, "send"), call(10, "wait all_reduce"), call(11, group="3"))
    assert whole(*kept, _0=2, _3=1)
    assert not whole(*kept, _0=3, _3=1)
    assert not whole(*kept, _0=2, _3=1, _9=1)
    assert not whole(*kept)


def test_one_line_with_two_callers_is_two_calls_where_all_ranks_know_their_callers() -> None:
    inner, one, other = frame(10), frame(20), frame(30)
    known = board(calls=(call(1, chain=(inner, one)), call(2, chain=(inner, other)), call(3, chain=(inner, one))))
    sites = [event.site for event in with_comparable_callers({0: timeline(0, known, (), GLOO)})[0].events]
    assert (sites[0] == sites[2], sites[0] == sites[1]) == (True, False)

    bare = timeline(1, board(calls=(call(1),)), (), GLOO)
    lines = with_comparable_callers({0: timeline(0, known, (), GLOO), 1: bare})
    assert len({event.site for line in lines.values() for event in line.events}) == 1

    elsewhere = timeline(1, board(calls=(call(1, "barrier"),)), (), GLOO)
    lines = with_comparable_callers({0: timeline(0, known, (), GLOO), 1: elsewhere})
    assert len({event.site for line in lines.values() for event in line.events}) == 3
