"""What one look says of each rank in short."""

from __future__ import annotations

from dataclasses import replace

from builders import frame as line
from builders import in_all_reduce, locked_in_backward, process, rank_snapshot, snapshot, twice

from nsa_harness.core.verdict.wait_graph import rank_samples

LOOPING = rank_snapshot(0, line(40))


def test_a_first_look_says_where_a_rank_stands_and_not_whether_it_moves() -> None:
    (one,) = rank_samples(None, snapshot(1, 5.0, LOOPING), (), "gloo")
    assert (one.rank, one.at_s, one.motion, one.leaf, one.user_frame) == (0, 5.0, "unseen", line(40), line(40))


def test_a_rank_in_a_collective_waits_and_one_that_computes_burns() -> None:
    before, after = twice(in_all_reduce(1), LOOPING, apart_s=2.0)
    spun = replace(after, ranks=(after.ranks[0], replace(LOOPING, process=process(cpu_s=3.0))))
    told = {one.rank: (one.motion, one.cpu_s) for one in rank_samples(before, spun, (), "gloo")}
    assert told == {1: ("waiting", 1.0), 0: ("burning", 3.0)}


def test_another_line_alone_is_said_to_be_no_more_than_that() -> None:
    before, after = twice(locked_in_backward(1), LOOPING)
    moved = replace(after, ranks=(after.ranks[0], rank_snapshot(0, line(41))))
    told = {one.rank: (one.motion, one.only_line_changed) for one in rank_samples(before, moved, (), "gloo")}
    assert told == {1: ("waiting", False), 0: ("moving", True)}
