"""What is said of a suspected run before anything is proven of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from builders import (
    ALL_REDUCE,
    LIMITS,
    collective,
    frame,
    in_all_reduce,
    process,
    rank_snapshot,
    snapshot,
    stack,
    task,
    twice,
)

from nsa_harness.core.diagnosis.stall_note import StallNote, first_snapshot, stall_note
from nsa_harness.core.evidence.evidence import RankSnapshot, Snapshot
from nsa_harness.core.evidence.live import FirstSnapshot
from nsa_harness.texts.sentences import stall_text
from nsa_harness.texts.words import duration

READING = rank_snapshot(
    1,
    process=process(tasks=(task(syscall="read", target="/job/data.fifo"),)),
    stacks=(stack(frame(13, file="/job/loader.py", function="load")),),
)


def word_of(looks: Sequence[Snapshot], quiet_s: float = 8.0) -> StallNote | None:
    return stall_note(looks, (), last_progress_s=looks[-1].at_s - quiet_s, limits=LIMITS, backend="gloo")


def test_an_open_wait_says_who_is_blocked_in_what_and_when_it_would_be_a_hang() -> None:
    waiting = [in_all_reduce(rank, collective(3)) for rank in (0, 2)]
    word = word_of(twice(*waiting, READING))
    assert word is not None
    assert stall_text(word) == (
        "ranks 0, 2 are blocked in all_reduce #3 (train.py:40), waiting for rank 1;"
        " rank 1 is blocked in read in load (loader.py:13) on /job/data.fifo;"
        " the data that it reads or writes may still arrive; HANG in 4 min 52 s unless the run makes progress"
    )


def test_a_rank_that_somebody_else_stopped_may_be_resumed() -> None:
    held = process(101, state="T", tasks=(task(101, syscall="futex"),))
    stopped = rank_snapshot(1, process=held, stacks=(stack(frame(13, file="/job/loader.py", function="load")),))
    word = word_of(twice(in_all_reduce(0, collective(3)), stopped))
    assert word is not None
    assert stall_text(word) == (
        "rank 0 is blocked in all_reduce #3 (train.py:40), waiting for rank 1;"
        " rank 1 is stopped by a signal (loader.py:13);"
        " nothing in this job will resume the stopped process, but whoever stopped it may (`kill -CONT PID`);"
        " HANG in 4 min 52 s unless the run makes progress"
    )


def test_a_debuggers_prompt_is_named_at_once_and_no_end_is_foretold_where_somebody_may_sit_at_it() -> None:
    pdb = frame(433, file="/usr/lib/python3.11/pdb.py", function="Pdb.interaction")
    waiting = rank_snapshot(
        1,
        process=process(tasks=(task(syscall="read", target="/dev/pts/3"),)),
        stacks=(stack(pdb, frame(13, file="/job/loader.py", function="load")),),
    )
    word, attended = (
        stall_note(twice(waiting), (), last_progress_s=12.0, limits=LIMITS, backend="gloo", attended=attended)
        for attended in (False, True)
    )
    assert word is not None
    assert attended is not None
    assert word.stalled_ranks == attended.stalled_ranks
    assert (word.stalled_ranks[0].blocked_in, word.stalled_ranks[0].target) == (
        "the debugger pdb in load",
        "/dev/pts/3",
    )
    assert (word.left_s, attended.left_s) == (292.0, None)


def test_the_time_that_is_left_counts_down_to_the_limit() -> None:
    looks = twice(READING)
    left = [word.left_s for quiet_s in (8.0, 100.0, 299.0, 400.0) if (word := word_of(looks, quiet_s))]
    assert left == [292.0, 200.0, 1.0, 0.0]


def test_a_rank_that_moves_is_said_to_move_and_no_end_is_foretold() -> None:
    moved = replace(READING, process=process(tasks=(task(syscall="read"),), io_bytes=10**6))
    word = word_of((snapshot(1, 18.0, READING), snapshot(2, 20.0, moved)))
    assert word is not None
    assert (word.moving_ranks, word.left_s) == ((1,), None)
    assert "blocked" not in stall_text(word)


def test_nothing_is_said_of_a_single_look() -> None:
    assert word_of((snapshot(1, 18.0, READING),)) is None


def asleep(until_s: float) -> RankSnapshot:
    nap = task(syscall="clock_nanosleep", wakes_at_s=until_s)
    return rank_snapshot(0, process=process(tasks=(nap,)), stacks=(stack(frame(5)),))


def test_a_sleep_that_ends_in_time_has_no_date() -> None:
    word = word_of(twice(asleep(40.0)))
    assert word is not None
    assert (word.open_waits, word.left_s) == (("sleep",), None)


def test_a_duration_is_in_minutes_and_seconds() -> None:
    assert [duration(seconds) for seconds in (4.4, 59.6, 292.0)] == ["4 s", "1 min 0 s", "4 min 52 s"]


def stands(rank: int, line: int, idle_s: float | None, cpu_s: float = 1.0, **facts: Any) -> RankSnapshot:
    own = task(100 + rank, idle_s=idle_s, **facts)
    return rank_snapshot(rank, ALL_REDUCE, frame(line), process=process(100 + rank, tasks=(own,), cpu_s=cpu_s))


def test_the_first_look_says_where_each_rank_stands_and_since_when() -> None:
    runs = stands(3, 50, 0.0, state="R")
    rows = first_snapshot(
        snapshot(1, 60.0, stands(0, 40, 30.0), stands(1, 40, 20.0, 2.0), stands(2, 41, None), runs), ""
    )
    assert rows == (
        FirstSnapshot(
            ranks=(0, 1),
            blocked_in="all_reduce",
            place="train.py:40",
            function="step",
            idle_s=20.0,
            cpu_s=2.0,
            age_s=60.0,
        ),
        FirstSnapshot(
            ranks=(2,),
            blocked_in="all_reduce",
            place="train.py:41",
            function="step",
            idle_s=None,
            cpu_s=1.0,
            age_s=60.0,
        ),
        FirstSnapshot(
            ranks=(3,), blocked_in="running", place="train.py:50", function="step", idle_s=0.0, cpu_s=1.0, age_s=60.0
        ),
    )


def test_a_rank_that_has_left_and_one_without_a_stack_have_a_row_too() -> None:
    bare = rank_snapshot(1, process=process(101, tasks=(task(101, syscall="read", target="/job/data.fifo"),)))
    rows = first_snapshot(snapshot(1, 60.0, stands(0, 40, 30.0), bare), "", exited_ranks=(0,))
    assert [(row.ranks, row.blocked_in, row.place) for row in rows] == [((0,), "has left", ""), ((1,), "read", "")]
