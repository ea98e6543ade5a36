"""Waits in torch.distributed.rpc: whether an answer can still come, and who holds which lock meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    IN_LOCK,
    SITE,
    case,
    collective,
    diagnose,
    frame,
    process,
    rank_snapshot,
    snapshot,
    stack,
    stalled,
    task,
    twice,
)

from nsa_harness.core.evidence.evidence import RankSnapshot, Source, Stack
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.rpc_waits import remote_call
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import wait_graph_between

RPC_SYNC = frame(842, file=f"{SITE}/torch/distributed/rpc/api.py", function="rpc_sync")
SHUTDOWN = frame(360, file=f"{SITE}/torch/distributed/rpc/api.py", function="shutdown")
SERVICE = frame(209, file=f"{SITE}/torch/distributed/rpc/internal.py", function="_run_function")
FUTURE = (
    "std::condition_variable::wait (libstdc++.so.6)",
    "torch::jit::PythonFutureWrapper::wait (libtorch_python.so)",
)
ASKS = frame(13, function="ask")
ADDS = frame(9, function="add")
SOURCES = (
    Source(file=ADDS.file, first=8, text="def add(x):\n    with lock:\n        return x + 1\n"),
    Source(file=ASKS.file, first=11, text="def ask(peer):\n    with lock:\n        return rpc.rpc_sync(peer, add)\n"),
)


def handler(tid: int, *frames: Any, native: tuple[str, ...] = IN_LOCK) -> Stack:
    return replace(stack(*(frames or (ADDS,)), SERVICE, tid=tid, thread=""), native=native)


def member(rank: int, *others: Stack, main: tuple[Any, ...] = (RPC_SYNC, ASKS), **of_handler: Any) -> RankSnapshot:
    """A rank whose training thread stands in `main`, with these other threads; all in a futex without a timeout."""
    pid = 100 + rank
    tasks = (task(pid), *(task(one.tid or 0, **of_handler) for one in others), task(pid + 50, comm="TP_SHM_reactor"))
    training = replace(stack(*main, tid=pid), native=FUTURE if main[0] == RPC_SYNC else ())
    return rank_snapshot(rank, process=process(pid, tasks=tasks), stacks=(training, *others))


CROSSED = (member(0, handler(201)), member(1, handler(202)))


def waits(*ranks: RankSnapshot, before: tuple[RankSnapshot, ...] = ()) -> tuple[Wait, ...]:
    looks = (snapshot(1, 18.0, *before), snapshot(2, 20.0, *ranks)) if before else twice(*ranks)
    return wait_graph_between(*looks, (), "gloo").waits


TO_HERE = (
    "std::condition_variable::wait (libstdc++.so.6)",
    "torch::distributed::rpc::PyRRef::toHere (libtorch_python.so)",
)
CALL = frame(21, function="call")


@pytest.mark.parametrize(("native", "call"), [(FUTURE, "Future.wait"), (TO_HERE, "to_here")])
def test_a_future_and_a_remote_reference_are_waited_for_like_the_answer_of_rpc_sync(
    native: tuple[str, ...], call: str
) -> None:
    ranks = [
        replace(one, stacks=(replace(stack(CALL, ASKS, tid=one.pid), native=native), *one.stacks[1:]))
        for one in CROSSED
    ]
    assert [(one.kind, one.peers, one.is_closed, one.blocked_in) for one in waits(*ranks)] == [
        (WaitKind.RPC, (1,), True, call),
        (WaitKind.RPC, (0,), True, call),
    ]
    seen = stalled(*ranks, sources=SOURCES)
    found = diagnose(seen, judge(seen)).findings[0]
    assert (found.code, found.facts["callers"][0]["call"]) == ("rpc_deadlock", call)


def test_a_future_is_no_remote_call_without_rpc_or_while_a_collective_is_pending() -> None:
    (training,) = member(0).stacks
    waiting = replace(member(0), stacks=(replace(training, frames=(CALL,)),))
    assert remote_call(waiting, waiting.stacks[0]) == "Future.wait"
    pending = replace(waiting, collectives=(collective(),))
    assert remote_call(pending, waiting.stacks[0]) == ""
    without_rpc = replace(waiting, process=process())
    assert remote_call(without_rpc, waiting.stacks[0]) == ""


def test_the_end_of_the_sleep_of_a_handler_is_waited_for() -> None:
    sleeping = {"syscall": "clock_nanosleep", "timed": True, "wakes_at_s": 44.0}
    assert waits(member(0), member(1, handler(202, native=()), main=(SHUTDOWN,), **sleeping))[0].until_s == 44.0


def test_a_handler_that_reads_is_not_said_to_wait_for_a_lock() -> None:
    reads = member(1, handler(202, native=()), main=(SHUTDOWN,), syscall="read", target="/data")
    seen = stalled(member(0), reads, at_s=400.0)
    assert judge(seen).status is Status.HANG
    assert all(one.code != "rpc_deadlock" for one in diagnose(seen, judge(seen)).findings)


def test_ranks_whose_handlers_wait_for_locks_of_waiting_callers_wait_for_each_other_for_ever() -> None:
    assert [(one.kind, one.peers, one.is_closed) for one in waits(*CROSSED)] == [
        (WaitKind.RPC, (1,), True),
        (WaitKind.RPC, (0,), True),
    ]


def test_an_answer_may_come_while_a_handler_sleeps_or_nobody_serves_the_call() -> None:
    asleep = member(1, handler(202, native=()), main=(SHUTDOWN,), syscall="clock_nanosleep", timed=True)
    caller = waits(member(0), asleep)[0]
    assert (caller.kind, caller.is_closed, caller.peers) == (WaitKind.RPC, False, (1,))
    assert waits(member(0), member(1, main=(SHUTDOWN,)))[0].is_closed is False


def test_an_answer_may_come_while_another_thread_may_release_the_lock_of_the_handler() -> None:
    owner = stack(frame(70), tid=203, thread="owner")
    serving = member(1, handler(202), owner, main=(SHUTDOWN,))
    may_act = replace(
        serving, process=process(101, tasks=(task(101), task(202), task(203, syscall="clock_nanosleep", timed=True)))
    )
    assert waits(member(0), serving)[0].is_closed
    assert waits(member(0), may_act)[0].is_closed is False


def test_a_handler_that_computes_makes_progress() -> None:
    before, after = (
        member(1, handler(202, native=()), main=(SHUTDOWN,), cpu_s=cpu_s, syscall="running") for cpu_s in (1.0, 3.0)
    )
    assert waits(member(0), after, before=(member(0), before))[0].motion is Motion.MOVING


def test_threads_of_rpc_that_spin_are_no_progress_of_a_rank_that_waits() -> None:
    def spinning(comm: str, cpu_s: float) -> RankSnapshot:
        tasks = (task(timed=True), task(150, comm=comm, cpu_s=cpu_s, state="R", syscall="running"))
        polls = stack(frame(320, file="/usr/lib/python3.11/threading.py", function="Condition.wait"), frame(26))
        return rank_snapshot(0, process=process(tasks=tasks, cpu_s=cpu_s), stacks=(polls,))

    def motion(comm: str) -> Motion:
        return waits(spinning(comm, 9.0), before=(spinning(comm, 1.0),))[0].motion

    assert (motion("TP_SHM_reactor"), motion("python")) == (Motion.WAITING, Motion.MOVING)


def test_the_story_names_the_locks_their_owners_and_the_lines() -> None:
    seen = stalled(*CROSSED, sources=SOURCES)
    found = diagnose(seen, judge(seen)).findings[0]
    assert (found.code, found.ranks, found.confidence) == ("rpc_deadlock", (0, 1), 0.9)
    assert found.place is not None
    assert found.place.line == ASKS.line
    (only,) = found.facts["handlers"]
    assert (only["ranks"], only["function"], only["thread"], only["calls"]) == ([0, 1], "add", "", "")
    assert (only["line"]["line"], only["lock_taken_at"]["line"]) == (9, 12)


def test_an_owner_that_no_source_shows_leaves_the_cause_likely() -> None:
    seen = stalled(*CROSSED)
    found = diagnose(seen, judge(seen)).findings[0]
    assert (found.code, found.confidence, found.facts["handlers"][0]["lock_taken_at"]) == ("rpc_deadlock", 0.85, None)


def test_handlers_that_call_back_are_told_as_callers() -> None:
    nested = (RPC_SYNC, frame(15, function="nested"))
    seen = stalled(member(0, handler(201, *nested, native=FUTURE)), member(1, handler(202, *nested, native=FUTURE)))
    found = diagnose(seen, judge(seen)).findings[0]
    assert (found.code, found.facts["handlers"][0]["calls"]) == ("rpc_deadlock", "rpc_sync")


@pytest.mark.parametrize("ranks", [(member(0), member(1)), (member(0, main=(SHUTDOWN,)), member(1, main=(SHUTDOWN,)))])
def test_without_a_handler_or_a_call_nothing_is_told_of_rpc(ranks: tuple[RankSnapshot, ...]) -> None:
    seen = stalled(*ranks)
    assert case(seen).last_snapshot
    assert all(one.code != "rpc_deadlock" for one in diagnose(seen, judge(seen)).findings)
