"""When a quiet run may be called HANG, and of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import (
    LIMITS,
    board,
    collective,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    rank_snapshot,
    sample,
    snapshot,
    stack,
    task,
    twice,
)

from nsa_harness.core.evidence.evidence import ChildSample, RankSnapshot, Sample, Snapshot
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import HangKind
from nsa_harness.core.verdict.proof import Proof, loop_lines, prove
from nsa_harness.core.verdict.wait_graph import wait_graph_between

CROSSED = (in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast")))


def proof_of(
    looks: Sequence[Snapshot], samples: Sequence[Sample] = (), quiet_s: float = 10.0, limits: Limits = LIMITS
) -> Proof | None:
    return prove(looks, samples, last_progress_s=looks[-1].at_s - quiet_s, limits=limits, backend="gloo")


def told(proof: Proof | None) -> tuple[HangKind, str] | None:
    return (proof.kind, proof.reason) if proof else None


def test_a_closed_wait_seen_twice_is_a_deadlock_at_once() -> None:
    looks = twice(*CROSSED)
    assert proof_of(looks, quiet_s=5.0) == Proof(
        kind=HangKind.DEADLOCK,
        reason="2 ranks wait, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
        graph=wait_graph_between(*looks, (), "gloo"),
        is_closed=True,
    )


def test_one_rank_alone_may_deadlock() -> None:
    assert told(proof_of(twice(locked_in_backward(0)))) == (
        HangKind.DEADLOCK,
        "one rank waits, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )


def test_one_look_proves_nothing() -> None:
    assert proof_of(twice(*CROSSED)[1:]) is None


@pytest.mark.parametrize(("apart_s", "proven"), [(1.5, True), (1.25, False)])
def test_two_looks_too_close_together_prove_nothing(apart_s: float, proven: bool) -> None:
    assert (proof_of(twice(*CROSSED, apart_s=apart_s)) is not None) is proven


def test_of_many_looks_the_newest_that_is_far_enough_away_is_compared() -> None:
    other = rank_snapshot(0, frame(11))
    looks = [snapshot(number, at_s, *CROSSED) for number, at_s in ((2, 18.0), (3, 19.0), (4, 20.0))]
    assert told(proof_of([snapshot(1, 10.0, other), *looks])) == (
        HangKind.DEADLOCK,
        "2 ranks wait, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )


def test_a_rank_that_moved_between_the_looks_disproves_it() -> None:
    before = replace(CROSSED[0], status_file=board(mark()))
    after = replace(CROSSED[0], status_file=board(replace(mark(), count=2)))
    looks = (snapshot(1, 18.0, before, CROSSED[1]), snapshot(2, 20.0, after, CROSSED[1]))
    assert proof_of(looks, quiet_s=1000.0) is None


def test_nobody_seen_proves_nothing() -> None:
    assert proof_of(twice()) is None


def test_a_stopped_rank_makes_it_stopped_and_not_a_deadlock() -> None:
    stopped = rank_snapshot(1, frame(95), process=process(101, state="T"))
    assert told(proof_of(twice(in_all_reduce(0, collective(6)), stopped))) == (
        HangKind.STOPPED,
        "2 ranks wait, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )


def test_a_rank_that_somebody_else_stopped_is_a_hang_only_after_the_limit_of_open_waits() -> None:
    held = process(101, state="T", tasks=(task(101, syscall="futex"),))
    seen = twice(in_all_reduce(0, collective(6)), rank_snapshot(1, frame(95), process=held))
    assert proof_of(seen, quiet_s=299.0) is None
    assert told(proof_of(seen, quiet_s=300.0)) == (HangKind.STOPPED, "an open wait of 300 s")


def test_a_rank_that_has_left_closes_the_wait_of_the_others() -> None:
    looks = twice(in_all_reduce(0, collective(6)))
    proof = prove(looks, (), last_progress_s=10.0, limits=LIMITS, backend="gloo", exited_ranks=[1])
    assert told(proof) == (
        HangKind.DEADLOCK,
        "2 ranks wait, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )
    assert proof is not None
    assert [root.rank for root in proof.graph.roots] == [1]


# Burning.


def burning(cpu_s: float = 9.0) -> tuple[Snapshot, Snapshot]:
    before = rank_snapshot(0, frame(39))
    return snapshot(1, 18.0, before), snapshot(2, 20.0, replace(before, process=process(cpu_s=cpu_s)))


def looping(*lines: int, count: int = 20) -> list[Sample]:
    return [sample(leaf=frame(lines[number % len(lines)])) for number in range(count)]


def test_the_same_line_in_twenty_samples_after_the_busy_limit_is_a_livelock() -> None:
    looks = burning()
    assert proof_of(looks, looping(39), quiet_s=60.0) == Proof(
        kind=HangKind.LIVELOCK,
        reason="the same line in 20 samples over 60 s",
        graph=wait_graph_between(*looks, (), "gloo"),
    )


def test_two_lines_that_take_turns_are_a_livelock_too() -> None:
    assert told(proof_of(burning(), looping(39, 40), quiet_s=60.0)) == (
        HangKind.LIVELOCK,
        "the same 2 lines in 20 samples over 60 s",
    )


@pytest.mark.parametrize(
    ("samples", "quiet_s"),
    [
        (looping(39), 59.0),
        (looping(39, count=19), 60.0),
        (looping(38, 39, 40), 60.0),
        ([sample() for _ in range(20)], 60.0),
        ([sample(1, leaf=frame(39)) for _ in range(20)], 60.0),
        ([sample(motion="moving", leaf=frame(39)) for _ in range(20)], 60.0),
        ([], 10_000.0),
    ],
    ids=["too early", "too few", "three lines", "no stack", "another rank's", "it moved", "never looked at"],
)
def test_a_rank_that_computes_is_not_a_livelock_before_all_of_it_is_shown(
    samples: list[Sample], quiet_s: float
) -> None:
    assert proof_of(burning(), samples, quiet_s=quiet_s) is None


def turning(*user_lines: int, leaves: int = 8, function: str = "draw", count: int = 60) -> list[Sample]:
    """A loop in one function of the user's, that calls small ones."""
    return [
        sample(
            leaf=frame(300 + number % leaves, file="/usr/lib/python3.11/random.py"),
            user=frame(user_lines[number % len(user_lines)], function=function),
        )
        for number in range(count)
    ]


def test_a_loop_with_a_longer_body_is_a_livelock_after_more_samples_and_twice_the_time() -> None:
    assert told(proof_of(burning(), turning(32, 33, 34), quiet_s=120.0)) == (
        HangKind.LIVELOCK,
        "the same 8 lines in 60 samples over 120 s",
    )


@pytest.mark.parametrize(
    ("samples", "quiet_s"),
    [
        (turning(32, 33, 34), 119.0),
        (turning(32, 33, 34, count=59), 120.0),
        (turning(32, 33, 34, leaves=17), 120.0),
        (turning(*range(30, 39)), 120.0),
        ([*turning(32, function="load"), *turning(33, count=30)], 120.0),
        ([sample(leaf=frame(39 + number % 4)) for number in range(60)], 120.0),
    ],
    ids=["too early", "too few", "many lines below", "many lines", "two functions", "none of the user's"],
)
def test_a_computation_that_goes_through_more_than_one_loop_is_no_livelock(
    samples: list[Sample], quiet_s: float
) -> None:
    assert proof_of(burning(), samples, quiet_s=quiet_s) is None


def test_only_the_last_twenty_samples_say_which_lines_the_loop_has() -> None:
    samples = [*looping(1, 2, 3), *looping(39)]
    proof = proof_of(burning(), samples, quiet_s=60.0)
    assert proof is not None
    (root,) = proof.graph.roots
    assert loop_lines(root, samples) == {(frame().file, 39)}
    assert loop_lines(replace(root, rank=1), samples) == set()


# A process below a rank that computes.


def computing_below(*pids: int) -> tuple[Snapshot, Snapshot]:
    """Rank 0 waits for children, each of which computes."""
    looks = []
    for cpu_s in (1.0, 9.0):
        waiting = process(tasks=(task(100, syscall="wait4", held_by=pids),))
        below = tuple(process(pid, parent=100, cpu_s=cpu_s) for pid in pids)
        stacks = {pid: (stack(frame(50), tid=pid),) for pid in pids}
        looks.append(rank_snapshot(0, frame(39), process=waiting, children=below, child_stacks=stacks))
    return snapshot(1, 18.0, looks[0]), snapshot(2, 20.0, looks[1])


def below(*lines: int, pids: tuple[int, ...] = (300,), count: int = 20, user: int = 50) -> list[Sample]:
    """The rank stands on one line, and each child on these in turn."""
    seen = (frame(lines[number % len(lines)]) for number in range(count))
    return [
        replace(
            sample(leaf=frame(39), user=frame(39)),
            child_samples=tuple(ChildSample(pid=pid, leaf=leaf, user_frame=frame(user)) for pid in pids),
        )
        for leaf in seen
    ]


def test_a_child_on_the_same_line_in_twenty_samples_is_a_livelock_of_the_rank_that_waits_for_it() -> None:
    assert told(proof_of(computing_below(300), below(50), quiet_s=60.0)) == (
        HangKind.LIVELOCK,
        "the same line in 20 samples over 60 s",
    )
    assert told(proof_of(computing_below(300, 301), below(50, 51, pids=(300, 301)), quiet_s=60.0)) == (
        HangKind.LIVELOCK,
        "the same 2 lines in 20 samples over 60 s",
    )
    assert told(proof_of(computing_below(300), below(*range(50, 58), count=60), quiet_s=120.0)) == (
        HangKind.LIVELOCK,
        "the same 8 lines in 60 samples over 120 s",
    )


@pytest.mark.parametrize(
    ("pids", "samples", "quiet_s"),
    [
        ((300,), below(50), 59.0),
        ((300,), below(50, count=19), 60.0),
        ((300,), below(50, 51, 52), 60.0),
        ((300,), looping(39), 60.0),
        ((300, 301), below(50), 60.0),
        ((300, 301), [*below(50, pids=(300, 301), count=19), *below(50)], 60.0),
        ((300,), [replace(one, motion="moving") for one in below(50)], 60.0),
    ],
    ids=["too early", "too few", "three lines", "the rank's own", "another child's", "one too few", "it moved"],
)
def test_a_child_that_computes_is_no_livelock_before_all_of_it_is_shown(
    pids: tuple[int, ...], samples: list[Sample], quiet_s: float
) -> None:
    assert proof_of(computing_below(*pids), samples, quiet_s=quiet_s) is None


def test_what_its_child_computed_does_not_show_a_loop_of_the_rank() -> None:
    assert proof_of(burning(), below(50), quiet_s=60.0) is None


# Open waits.


def asleep(until_s: float | None, rank: int = 0) -> RankSnapshot:
    facts = task(100 + rank, syscall="clock_nanosleep", wakes_at_s=until_s, timed=True)
    return rank_snapshot(rank, frame(5), process=process(100 + rank, tasks=(facts,)))


def reading(rank: int = 0) -> RankSnapshot:
    return rank_snapshot(rank, frame(6), process=process(100 + rank, tasks=(task(100 + rank, syscall="read"),)))


@pytest.mark.parametrize(("quiet_s", "proven"), [(299.0, False), (300.0, True)])
def test_an_open_wait_is_a_hang_only_after_the_open_limit(quiet_s: float, proven: bool) -> None:
    expected = (HangKind.STARVED, "an open wait of 300 s") if proven else None
    assert told(proof_of(twice(reading()), quiet_s=quiet_s)) == expected


def test_an_open_root_keeps_a_closed_one_from_being_a_deadlock() -> None:
    apart = replace(reading(1), collectives=())
    assert proof_of(twice(locked_in_backward(0), apart)) is None


def test_a_sleep_past_the_deadline_is_closed_and_one_before_it_is_waited_for() -> None:
    assert told(proof_of(twice(asleep(601.0)))) == (
        HangKind.STARVED,
        "one rank waits, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )
    assert proof_of(twice(asleep(600.0)), quiet_s=5000.0) is None


def test_a_sleep_without_a_readable_end_or_without_a_deadline_is_an_open_wait() -> None:
    assert proof_of(twice(asleep(None)), quiet_s=299.0) is None
    assert told(proof_of(twice(asleep(None)), quiet_s=300.0)) == (HangKind.STARVED, "an open wait of 300 s")
    endless = replace(LIMITS, deadline_s=None)
    assert proof_of(twice(asleep(1e9)), quiet_s=5000.0, limits=endless) is None


def test_a_sleep_after_a_sleep_on_the_same_line_is_a_loop_that_polls_and_no_readable_end() -> None:
    first, *looks = snapshot(1, 10.0, asleep(11.0)), *twice(asleep(21.0))
    assert proof_of([first, *looks], quiet_s=299.0) is None
    said = "a polling loop on one line, for 300 s"
    assert told(proof_of([first, *looks], quiet_s=300.0)) == (HangKind.LIVELOCK, said)
    elsewhere = snapshot(1, 10.0, replace(asleep(11.0), stacks=(stack(frame(77)),)))
    assert proof_of([elsewhere, *looks], quiet_s=5000.0) is None, "another sleep, on another line"


def selecting(timeout_s: float | None) -> RankSnapshot:
    poll = task(syscall="pselect6", timed=True, timeout_s=timeout_s)
    return rank_snapshot(0, frame(5), process=process(tasks=(poll,)))


@pytest.mark.parametrize(("timeout_s", "kind"), [(0.5, HangKind.LIVELOCK), (20.0, HangKind.STARVED)])
def test_a_poll_that_has_outlasted_its_time_limit_is_a_loop_that_polls(timeout_s: float, kind: HangKind) -> None:
    looks = [snapshot(1, 10.0, selecting(timeout_s)), *twice(selecting(timeout_s))]
    assert proof_of(looks, quiet_s=299.0) is None
    assert told(proof_of(looks, quiet_s=300.0))[0] is kind


@pytest.mark.parametrize(("until_s", "kind"), [(601.0, HangKind.STARVED), (500.0, None)])
def test_the_sleep_of_a_child_is_judged_as_that_of_the_rank_that_waits_for_it(
    until_s: float, kind: HangKind | None
) -> None:
    facts = task(300, syscall="clock_nanosleep", wakes_at_s=until_s, timed=True)
    sleeper = process(300, parent=100, tasks=(facts,))
    waiting = process(tasks=(task(100, syscall="wait4", held_by=(300,)),))
    parent = rank_snapshot(0, frame(5), process=waiting, children=(sleeper,))
    proof = proof_of(twice(parent), quiet_s=5000.0)
    assert (proof.kind if proof else None) is kind


def trickling(*motions: str, another_line: bool = False) -> list[Sample]:
    return [
        replace(sample(motion=motion), at_s=float(at_s), only_line_changed=another_line)
        for at_s, motion in enumerate(motions, start=15)
    ]


@pytest.mark.parametrize("moved", ["moving", "burning"])
def test_a_byte_now_and_then_begins_the_open_wait_anew(moved: str) -> None:
    looks = twice(reading())
    assert proof_of(looks, trickling("waiting", moved, "waiting"), quiet_s=5000.0) is None
    assert proof_of(looks, trickling("waiting", "waiting"), quiet_s=5000.0) is not None
    poll = trickling("waiting", "moving", another_line=True)
    assert proof_of(looks, poll, quiet_s=5000.0) is not None, "only its line had changed: nothing moved"


def test_a_rank_that_moves_bytes_between_its_computations_is_no_loop() -> None:
    packing = [*looping(39), replace(sample(motion="moving"), at_s=-100.0), *looping(39, count=19)]
    assert proof_of(burning(), packing, quiet_s=5000.0) is None
    assert proof_of(burning(), [*packing, *looping(39, count=1)], quiet_s=5000.0) is not None


def test_a_compilation_is_open_until_the_long_limit() -> None:
    compiler = frame(700, file="/site-packages/torch/_inductor/compile_fx.py", function="compile_fx_inner")
    before = rank_snapshot(0, frame(39), compiler)
    looks = snapshot(1, 18.0, before), snapshot(2, 20.0, replace(before, process=process(cpu_s=9.0)))
    assert proof_of(looks, looping(39), quiet_s=299.0) is None
    assert proof_of(looks, looping(39), quiet_s=300.0) is not None


def test_a_stopped_child_makes_it_stopped() -> None:
    child = process(300, parent=100, state="T")
    waiting = process(tasks=(task(100, syscall="wait4", held_by=(300,)),))
    assert told(proof_of(twice(rank_snapshot(0, frame(5), process=waiting, children=(child,))))) == (
        HangKind.STOPPED,
        "one rank waits, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart",
    )


def test_one_sleeper_that_wakes_in_time_is_enough_to_wait() -> None:
    assert proof_of(twice(asleep(500.0), reading(1)), quiet_s=5000.0) is None
    assert told(proof_of(twice(asleep(None), reading(1)), quiet_s=5000.0)) == (
        HangKind.STARVED,
        "an open wait of 5000 s",
    )


def computing_beside_a_reader(lines: int) -> tuple[Sequence[Snapshot], list[Sample]]:
    before, after = burning()
    looks = (replace(before, ranks=(*before.ranks, reading(1))), replace(after, ranks=(*after.ranks, reading(1))))
    return looks, looping(*range(lines))


def test_a_rank_that_computes_on_changing_lines_keeps_an_open_wait_beside_it_from_being_a_hang() -> None:
    assert proof_of(*computing_beside_a_reader(lines=9), quiet_s=5000.0) is None


def test_an_endless_loop_beside_an_open_wait_is_a_livelock_after_both_limits() -> None:
    looks, samples = computing_beside_a_reader(lines=1)
    assert proof_of(looks, samples, quiet_s=299.0) is None
    assert told(proof_of(looks, samples, quiet_s=300.0)) == (
        HangKind.LIVELOCK,
        "the same line in 20 samples over 300 s",
    )


def test_a_loop_beside_a_loop_needs_both_to_be_shown() -> None:
    still = [rank_snapshot(rank, stacks=(stack(frame(39), tid=100 + rank),)) for rank in (0, 1)]
    spun = [replace(one, process=process(one.pid, cpu_s=9.0)) for one in still]
    looks = (snapshot(1, 18.0, *still), snapshot(2, 20.0, *spun))
    assert proof_of(looks, looping(39), quiet_s=60.0) is None
    both = [*looping(39), *[replace(one, rank=1) for one in looping(39)]]
    assert told(proof_of(looks, both, quiet_s=60.0)) == (HangKind.LIVELOCK, "the same line in 20 samples over 60 s")
