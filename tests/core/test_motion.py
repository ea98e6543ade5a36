"""What one rank did between two looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import BACKWARD, board, frame, mark, process, rank_snapshot, stack, task

from nsa_harness.core.evidence.evidence import RankSnapshot
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.verdict.motion import Motion, cpu_share, motion, only_another_line, rank_stack

STILL = rank_snapshot(0, frame(10), status_file=board(mark()))


def changed(**changes: object) -> object:
    return replace(STILL, **changes)  # type: ignore[arg-type]


def test_a_rank_that_did_nothing_waits() -> None:
    assert motion(STILL, STILL, 2.0) is Motion.WAITING


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_dead_process_is_gone(state: str) -> None:
    assert motion(STILL, replace(STILL, process=process(state=state)), 2.0) is Motion.GONE


def test_a_process_that_cannot_be_read_is_gone() -> None:
    assert motion(STILL, replace(STILL, process=None), 2.0) is Motion.GONE


def test_a_stopped_process_is_stopped_even_at_first_sight() -> None:
    assert motion(None, replace(STILL, process=process(state="T")), 2.0) is Motion.STOPPED


def test_a_process_that_a_debugger_traces_is_not_stopped() -> None:
    assert motion(STILL, replace(STILL, process=process(state="t")), 2.0) is Motion.WAITING


def test_a_process_that_a_debugger_holds_at_both_looks_is_stopped() -> None:
    held = replace(STILL, process=process(state="t"))
    assert motion(held, held, 2.0) is Motion.STOPPED


def test_a_process_whose_control_group_is_frozen_is_stopped() -> None:
    assert motion(STILL, replace(STILL, process=process(state="D", is_frozen=True)), 2.0) is Motion.STOPPED


def connected(acked_bytes: int | None, received_bytes: int | None, **changes: object) -> object:
    facts = {"inode": 9, "local": "a:1", "peer": "b:2", "state": "ESTABLISHED", "retransmits": 0}
    queues = {"unacked_bytes": 0, "unread_bytes": 0}
    one = Socket(**facts, **queues, **{"acked_bytes": acked_bytes, "received_bytes": received_bytes, **changes})
    return replace(STILL, process=process(sockets=(one,)))


@pytest.mark.parametrize("later", [(8, 5), (7, 6)], ids=["acknowledged", "received"])
def test_a_byte_over_a_connection_is_motion_though_the_counts_of_the_process_stand_still(later: tuple) -> None:
    assert motion(connected(7, 5), connected(*later), 2.0) is Motion.MOVING
    assert motion(connected(7, 5), connected(7, 5), 2.0) is Motion.WAITING
    assert motion(connected(7, 5, peer_rank=1, in_job=True), connected(*later, peer_rank=1, in_job=True), 2.0) is (
        Motion.MOVING
    )


def test_bytes_to_the_launchers_store_are_no_motion() -> None:
    assert motion(connected(7, 5, in_job=True), connected(9, 9, in_job=True), 2.0) is Motion.WAITING


@pytest.mark.parametrize("owner", [{}, {"peer_rank": 0, "in_job": True}], ids=["on another host", "in rank 0"])
def test_bytes_to_the_store_are_no_motion_whoever_serves_it(owner: dict[str, object]) -> None:
    earlier, later = (connected(count, 5, is_store=True, **owner) for count in (7, 9))
    assert motion(earlier, later, 2.0) is Motion.WAITING


def test_a_connection_whose_bytes_cannot_be_read_or_that_is_new_is_no_motion() -> None:
    assert motion(connected(None, None), connected(None, None), 2.0) is Motion.WAITING
    assert motion(STILL, connected(7, 5), 2.0) is Motion.WAITING


def test_at_first_sight_a_rank_is_given_the_benefit_of_the_doubt() -> None:
    assert motion(None, STILL, 2.0) is Motion.MOVING
    assert motion(replace(STILL, process=None), STILL, 2.0) is Motion.MOVING


def test_a_new_mark_is_motion() -> None:
    later = replace(STILL, status_file=board(replace(mark(), count=2)))
    assert motion(STILL, later, 2.0) is Motion.MOVING


def test_a_completed_collective_is_motion() -> None:
    assert motion(STILL, replace(STILL, status_file=board(mark(), completed=1)), 2.0) is Motion.MOVING


def test_an_event_that_the_gpu_has_reached_is_motion_while_the_host_waits_for_it() -> None:
    waiting = board(mark(), device_pending=3, device_completed=7)
    reached = replace(waiting, device_pending=2, device_completed=8)
    assert motion(replace(STILL, status_file=waiting), replace(STILL, status_file=reached), 2.0) is Motion.MOVING
    assert motion(replace(STILL, status_file=waiting), replace(STILL, status_file=waiting), 2.0) is Motion.WAITING


def test_a_board_that_appears_is_motion_and_none_at_all_is_not() -> None:
    blind = replace(STILL, status_file=None)
    assert motion(blind, STILL, 2.0) is Motion.MOVING
    assert motion(blind, blind, 2.0) is Motion.WAITING


@pytest.mark.parametrize(("cpu_s", "expected"), [(2.0, Motion.BURNING), (1.98, Motion.WAITING)])
def test_half_a_core_is_burning(cpu_s: float, expected: Motion) -> None:
    assert motion(STILL, replace(STILL, process=process(cpu_s=cpu_s, tasks=(task(),))), 2.0) is expected


@pytest.mark.parametrize(("read", "expected"), [(131072, Motion.MOVING), (131071, Motion.BURNING)])
def test_a_rank_that_computes_while_its_bytes_stream_saves_and_moves(read: int, expected: Motion) -> None:
    """Two seconds at 64 KiB/s; a loop that writes a line now and then is still a loop."""
    before = replace(STILL, process=process())
    assert motion(before, replace(before, process=process(cpu_s=9.0, io_bytes=7 + read)), 2.0) is expected


def test_what_only_changed_its_line_neither_marked_nor_moved_a_byte() -> None:
    elsewhere = replace(STILL, stacks=(stack(frame(11)),))
    assert only_another_line(STILL, elsewhere, 2.0) is True
    assert only_another_line(STILL, replace(elsewhere, process=process(io_bytes=8)), 2.0) is False
    assert only_another_line(STILL, replace(elsewhere, status_file=board(mark(count=2))), 2.0) is False


def napping(until_s: float, **changes: Any) -> RankSnapshot:
    nap = task(syscall="clock_nanosleep", wakes_at_s=until_s)
    return replace(STILL, process=process(tasks=(nap,), **changes))


def polling(until_s: float | None, *, own_bytes: int = 7, thread_bytes: int = 0, line: int = 331) -> RankSnapshot:
    """In a wait for an event or a queue that ends at `until_s`, with another thread and torch's worker server."""
    wait = task(timed=True, wakes_at_s=until_s, io_bytes=own_bytes)
    others = task(200, io_bytes=thread_bytes), task(300, comm="pt_workerserver", io_bytes=int(until_s or 0))
    total = process(io_bytes=own_bytes + thread_bytes, tasks=(wait, *others))
    return replace(STILL, process=total, stacks=(stack(frame(line, file="/usr/lib/python3.11/threading.py")),))


def test_a_loop_that_waits_with_a_time_limit_and_says_each_time_that_nothing_came_waits() -> None:
    assert motion(polling(18.5), polling(20.5, own_bytes=90), 2.0) is Motion.WAITING


@pytest.mark.parametrize(
    "later",
    [
        polling(18.5, own_bytes=90),
        polling(None, own_bytes=90),
        polling(20.5, thread_bytes=90),
        polling(20.5, own_bytes=90, line=340),
        polling(20.5, own_bytes=7 + 131072),
    ],
    ids=["the same wait", "a wait without an end", "another thread's bytes", "on another line", "a stream"],
)
def test_other_bytes_during_a_wait_with_a_time_limit_are_motion(later: RankSnapshot) -> None:
    assert motion(polling(18.5), later, 2.0) is Motion.MOVING


def selecting(own_bytes: int = 7, read_bytes: int | None = 3, line: int = 20, **changes: Any) -> RankSnapshot:
    """In a select with a time limit on a pipe of which only the rank and its child hold the other end."""
    facts = {"target": "pipe:[8]", "fd": 5, "held_by": (100, 300), "syscall": "pselect6", "timed": True, **changes}
    poll = task(io_bytes=own_bytes, read_bytes=read_bytes, **facts)
    total = process(io_bytes=own_bytes, tasks=(poll, task(200), task(201, syscall="read")), sockets=(PEER,))
    return replace(STILL, process=total, stacks=(stack(frame(line)),), children=(process(300, parent=100),))


PEER = Socket(
    inode=9, local="a:1", peer="b:2", state="ESTABLISHED", retransmits=0, unacked_bytes=0, unread_bytes=0,
    acked_bytes=7, received_bytes=5, peer_rank=1, in_job=True,
)  # fmt: skip
FROM_PEER = {"target": "socket:[9]", "held_by": None}


@pytest.mark.parametrize("changes", [{}, FROM_PEER, {"target": "", "fd": None}], ids=["pipe", "connection", "nothing"])
def test_a_loop_that_polls_what_only_the_job_can_send_and_reads_nothing_waits(changes: dict[str, Any]) -> None:
    before, later = selecting(**changes), selecting(own_bytes=90, **changes)
    assert motion(before, later, 2.0) is Motion.WAITING
    assert only_another_line(before, selecting(own_bytes=90, line=21, **changes), 2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"read_bytes": 9},
        {"read_bytes": None},
        {"held_by": (100, 999)},
        {"held_by": None},
        {"target": "socket:[10]"},
        {"target": "/dev/stdin"},
        {"timed": False},
        {"syscall": "read"},
    ],
    ids=str,
)
def test_a_poll_that_reads_or_that_somebody_outside_can_answer_is_motion(changes: dict[str, Any]) -> None:
    later = selecting(own_bytes=90, **changes)
    before = selecting(**{**changes, "read_bytes": None if changes.get("read_bytes", 3) is None else 3})
    assert motion(before, later, 2.0) is Motion.MOVING
    assert not only_another_line(before, replace(later, stacks=(stack(frame(21)),)), 2.0)


def test_a_pipe_to_which_another_thread_may_write_is_motion_and_an_idle_thread_writes_nothing() -> None:
    for tid, expected in ((200, Motion.WAITING), (201, Motion.MOVING)):
        looks = [selecting(own_bytes=number) for number in (7, 90)]
        looks = [replace(look, stacks=(*look.stacks, stack(frame(60), tid=tid, thread="writer"))) for look in looks]
        assert motion(looks[0], looks[1], 2.0) is expected


def test_a_loop_that_sleeps_and_says_each_time_that_it_tries_again_waits() -> None:
    assert motion(napping(18.5), napping(20.5, io_bytes=90), 2.0) is Motion.WAITING
    assert motion(napping(18.5), napping(18.5, io_bytes=90), 2.0) is Motion.MOVING, "the same sleep: another thread"
    assert motion(napping(18.5), napping(20.5, io_bytes=7 + 131072), 2.0) is Motion.MOVING, "it loads in portions"
    elsewhere = replace(napping(20.5, io_bytes=90), stacks=(stack(frame(11)),))
    assert motion(napping(18.5), elsewhere, 2.0) is Motion.MOVING


def test_the_line_that_a_sleeping_loop_prints_is_only_another_line() -> None:
    printing = replace(STILL, process=process(io_bytes=90), stacks=(stack(frame(11)),))
    assert only_another_line(napping(18.5), printing, 2.0) is True
    assert only_another_line(napping(18.5), replace(printing, process=process(io_bytes=7 + 131072)), 2.0) is False


def test_burning_on_changing_lines_is_still_burning() -> None:
    later = replace(STILL, process=process(cpu_s=5.0), stacks=(stack(frame(11)),))
    assert motion(STILL, later, 2.0) is Motion.BURNING


@pytest.mark.parametrize(("cpu_s", "expected"), [(1.1, Motion.BURNING), (1.09, Motion.WAITING)])
def test_a_rank_that_gets_little_of_a_crowded_machine_computes_all_the_same(cpu_s: float, expected: Motion) -> None:
    """Two seconds later; a thread that waits for a lock would have used nothing."""
    before = replace(STILL, process=process(tasks=(task(),)))
    after = replace(STILL, process=process(tasks=(task(cpu_s=cpu_s),)))
    assert motion(before, after, 2.0) is expected


def test_another_thread_that_computes_says_nothing_of_the_one_that_trains() -> None:
    before = replace(STILL, process=process(tasks=(task(), task(200))))
    after = replace(STILL, process=process(tasks=(task(), task(200, cpu_s=1.9))))
    assert motion(before, after, 2.0) is Motion.WAITING


def beside_a_watchdog(io_bytes: int, its_bytes: int, line: int = 60, **connection: Any) -> RankSnapshot:
    """The rank waits; a thread beside it sleeps on this line, and has moved so many of the bytes."""
    beat = task(101, timed=True, wakes_at_s=20.4, io_bytes=its_bytes)
    known = process(tasks=(task(io_bytes=0), beat), io_bytes=io_bytes, **connection)
    return replace(STILL, process=known, stacks=(*STILL.stacks, stack(frame(line), tid=101, thread="watchdog")))


def test_what_a_thread_writes_that_sleeps_and_writes_and_sleeps_again_is_no_motion() -> None:
    before = beside_a_watchdog(7, 0)
    assert motion(before, beside_a_watchdog(4007, 4000), 2.0) is Motion.WAITING
    assert motion(before, beside_a_watchdog(4008, 4000), 2.0) is Motion.MOVING, "somebody else moved a byte"
    assert motion(before, beside_a_watchdog(4007, 4000, line=61), 2.0) is Motion.MOVING, "it stands elsewhere"
    assert motion(before, beside_a_watchdog(7 + 131072, 131072), 2.0) is Motion.MOVING, "it loads in portions"


def test_what_such_a_thread_sends_is_no_motion_while_nobody_stands_at_a_connection() -> None:
    facts: dict[str, Any] = {"local": "a:1", "peer": "b:2", "state": "ESTABLISHED"}
    queues: dict[str, Any] = {"unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    first, later = (Socket(inode=5, acked_bytes=sent, received_bytes=0, **facts, **queues) for sent in (10, 90))
    before, after = beside_a_watchdog(7, 0, sockets=(first,)), beside_a_watchdog(7, 0, sockets=(later,))
    assert motion(before, after, 2.0) is Motion.WAITING
    loads = task(102, syscall="recvfrom", target="socket:[5]")
    loading = replace(after, process=replace(after.process, tasks=(*after.process.tasks, loads)))
    assert motion(before, loading, 2.0) is Motion.MOVING


def test_moved_bytes_are_motion() -> None:
    assert motion(STILL, replace(STILL, process=process(io_bytes=8)), 2.0) is Motion.MOVING


def test_bytes_that_our_own_questions_cost_are_not_motion() -> None:
    asked = replace(STILL, process=process(io_bytes=1007), query_bytes=1000)
    assert motion(STILL, asked, 2.0) is Motion.WAITING
    moved = replace(STILL, process=process(io_bytes=1008), query_bytes=1000)
    assert motion(STILL, moved, 2.0) is Motion.MOVING


def test_unreadable_bytes_say_nothing() -> None:
    unreadable = replace(STILL, process=process(io_bytes=None))
    assert motion(unreadable, STILL, 2.0) is Motion.WAITING
    assert motion(STILL, unreadable, 2.0) is Motion.WAITING


def test_another_innermost_line_is_motion() -> None:
    assert motion(STILL, replace(STILL, stacks=(stack(frame(11)),)), 2.0) is Motion.MOVING


def test_another_line_further_out_is_not_motion() -> None:
    before = replace(STILL, stacks=(stack(frame(10), frame(1)),))
    after = replace(STILL, stacks=(stack(frame(10), frame(2)),))
    assert motion(before, after, 2.0) is Motion.WAITING


def test_cpu_is_counted_in_cores() -> None:
    assert cpu_share(process(cpu_s=1.0), process(cpu_s=4.0), 2.0) == 1.5


def test_the_stack_of_a_rank_is_the_one_of_the_thread_that_marks() -> None:
    engine = stack(frame(5), tid=101, thread="autograd")
    rank = rank_snapshot(0, status_file=board(mark(tid=101)), stacks=(stack(BACKWARD), engine))
    assert rank_stack(rank) == engine
    assert rank_stack(replace(rank, status_file=None)) == stack(BACKWARD)
    assert rank_stack(replace(rank, stacks=())) is None


@pytest.mark.parametrize(
    ("comm", "asked_bytes", "moved"),
    [
        ("pt_workerserver", 0, Motion.WAITING),  # it closes seconds after it was asked
        ("pt_workerserver", 4, Motion.WAITING),  # within the question, which counted its bytes already
        ("pt_tcpstore_uv", 0, Motion.WAITING),  # a rank that hangs still asks the store that this rank serves
        ("pt_data_worker", 0, Motion.MOVING),
    ],
)
def test_what_the_server_that_answers_us_moves_is_no_motion_of_the_rank(
    comm: str, asked_bytes: int, moved: Motion
) -> None:
    def at(io_bytes: int) -> RankSnapshot:
        tasks = (task(), task(101, comm=comm, io_bytes=io_bytes))
        return replace(
            STILL, process=process(io_bytes=7 + io_bytes, tasks=tasks), query_bytes=asked_bytes * io_bytes // 4
        )

    assert motion(at(0), at(4), 2.0) is moved
