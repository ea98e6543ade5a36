"""Who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    ALL_REDUCE,
    BACKWARD,
    C10D,
    SITE,
    board,
    call,
    collective,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    rank_snapshot,
    snapshot,
    stack,
    task,
    twice,
)
from hypothesis import given
from hypothesis import strategies as st
from lockstep import ZERO_NS, entered

from nsa_harness.core.evidence.evidence import Frame, RankSnapshot
from nsa_harness.core.verdict.group_waits import missing_rank
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import WaitGraph, wait_graph_between

STEP = frame(10)


def closed(graph: WaitGraph) -> bool:
    """Every root waits for something that cannot come."""
    return bool(graph.roots) and all(root.is_closed for root in graph.roots)


def graph(*ranks: RankSnapshot, gone: tuple[int, ...] = ()) -> WaitGraph:
    return wait_graph_between(*twice(*ranks), gone, "gloo")


def only(*ranks: RankSnapshot, gone: tuple[int, ...] = ()) -> Wait:
    return graph(*ranks, gone=gone).waits[0]


def roots(*ranks: RankSnapshot, gone: tuple[int, ...] = ()) -> list[int]:
    return sorted(root.rank for root in graph(*ranks, gone=gone).roots)


def host(syscall: str, *others: Any, line: Frame = STEP, timed: bool | None = False, **changes: Any) -> RankSnapshot:
    """A rank whose main thread stands in this system call; `others` are further threads: (stack, task) pairs."""
    tasks = (task(100, syscall=syscall, timed=timed, **changes), *(one for _, one in others if one))
    stacks = (stack(line), *(one for one, _ in others if one))
    return rank_snapshot(0, process=process(tasks=tasks), stacks=stacks)


# What one rank stands in.


@pytest.mark.parametrize(("zero_ns", "text"), [(ZERO_NS, "reduce_scatter #2"), (None, "all_reduce #2")])
def test_a_collective_has_the_name_of_the_call_from_python_and_not_that_of_gloos_record(
    zero_ns: int | None, text: str
) -> None:
    """Without a common clock, nothing shows which call made the record."""
    made = call(2, "reduce_scatter", entered_s=2.0, left_s=None)
    ranks = [
        in_all_reduce(rank, *entries, status_file=board(calls=(made,), zero_ns=zero_ns))
        for rank, entries in enumerate([[entered(1, 1.0, retired=True), entered(2)], [entered(1, 1.0, retired=True)]])
    ]
    assert only(*ranks).blocked_in == text


def test_a_call_of_a_subgroup_is_told_with_its_group() -> None:
    """Each group counts its calls from 1, so a number alone says nothing."""
    pending = collective(3, "barrier", group="5")
    board_of_both = board(groups={"5": (0, 1)})
    ranks = [in_all_reduce(rank, *entries, status_file=board_of_both) for rank, entries in enumerate(([pending], []))]
    assert graph(*ranks).waits[0].blocked_in == "barrier #3 of group 5"


def test_a_rank_that_moves_waits_for_nothing() -> None:
    before = rank_snapshot(0, frame(10), status_file=board(mark()))
    after = replace(before, status_file=board(replace(mark(), count=2)))
    seen = wait_graph_between(snapshot(1, 18.0, before), snapshot(2, 20.0, after), (), "gloo")
    assert seen.waits == (
        Wait(
            rank=0,
            motion=Motion.MOVING,
            kind=WaitKind.NOTHING,
            blocked_in="moving in step",
            peers=(),
            is_closed=False,
            until_s=None,
            leaf=frame(10),
            user_frame=frame(10),
            collective=None,
            call=None,
            in_backward=False,
        ),
    )
    assert (seen.has_progress, closed(seen)) == (True, False)


def test_a_rank_that_has_left_is_a_closed_end() -> None:
    seen = wait_graph_between(*twice(rank_snapshot(1, frame(10))), [1], "gloo")
    assert seen.waits == seen.roots
    assert seen.waits == (
        Wait(
            rank=1,
            motion=Motion.GONE,
            kind=WaitKind.GONE,
            blocked_in="has left",
            peers=(),
            is_closed=True,
            until_s=None,
            leaf=None,
            user_frame=None,
            collective=None,
            call=None,
            in_backward=False,
        ),
    )


def test_a_process_that_cannot_be_read_has_gone_too() -> None:
    wait = only(rank_snapshot(0, process=None))
    assert (wait.kind, wait.is_closed, wait.blocked_in) == (WaitKind.GONE, True, "has left")


@pytest.mark.parametrize(
    ("changes", "closed"),
    [
        ({"state": "T"}, True),
        ({"state": "T", "tasks": (task(syscall="futex"), task(101, syscall="tgkill"))}, True),
        ({"state": "T", "tasks": (task(syscall="futex"),)}, False),  # somebody else stopped it, and may resume it
        ({"is_frozen": True}, False),  # as docker pause and schedulers do
    ],
)
def test_a_stopped_rank_is_a_closed_wait_if_it_stopped_itself(changes: dict[str, Any], closed: bool) -> None:
    wait = only(rank_snapshot(0, frame(10), process=process(**changes)))
    assert (wait.kind, wait.is_closed, wait.blocked_in) == (WaitKind.STOPPED, closed, "stopped by a signal in step")


def test_a_rank_that_computes_is_an_open_end() -> None:
    before, after = (rank_snapshot(0, frame(10), process=process(cpu_s=cpu_s)) for cpu_s in (1.0, 3.0))
    wait = wait_graph_between(snapshot(1, 18.0, before), snapshot(2, 20.0, after), (), "gloo").waits[0]
    assert (wait.motion, wait.kind, wait.is_closed) == (Motion.BURNING, WaitKind.COMPUTE, False)
    assert wait.blocked_in == "a computation in step"


@pytest.mark.parametrize(
    ("syscall", "kind", "words"),
    [
        ("clock_nanosleep", WaitKind.SLEEP, "a sleep in step"),
        ("nanosleep", WaitKind.SLEEP, "a sleep in step"),
        ("wait4", WaitKind.CHILD, "a wait for a child process in step"),
        ("waitid", WaitKind.CHILD, "a wait for a child process in step"),
        ("futex", WaitKind.LOCK, "a lock in step"),
        ("read", WaitKind.IO, "read in step"),
        ("epoll_wait", WaitKind.IO, "epoll_wait in step"),
        ("running", WaitKind.UNKNOWN, "a wait of unknown kind in step"),
        ("", WaitKind.UNKNOWN, "a wait of unknown kind in step"),
    ],
)
def test_the_system_call_says_what_a_rank_waits_for(syscall: str, kind: WaitKind, words: str) -> None:
    wait = only(host(syscall))
    assert (wait.kind, wait.blocked_in) == (kind, words)
    assert wait.is_closed is (kind is WaitKind.LOCK)


def test_a_wait_outside_the_users_code_names_no_function() -> None:
    assert only(host("read", line=frame(1, file=f"{SITE}/torch/x.py"))).blocked_in == "read"


def test_without_a_readable_task_the_wait_is_of_unknown_kind() -> None:
    wait = only(rank_snapshot(0, frame(10), process=process(tasks=())))
    assert (wait.kind, wait.is_closed) == (WaitKind.UNKNOWN, False)


def test_without_a_thread_number_the_main_thread_tells_and_a_lock_without_a_stack_stays_open() -> None:
    nameless = rank_snapshot(0, stacks=(stack(frame(10), tid=None),))
    assert only(nameless).kind is WaitKind.LOCK
    blind = only(rank_snapshot(0))
    assert (blind.kind, blind.is_closed, blind.leaf) == (WaitKind.LOCK, False, None)


def test_the_end_of_a_sleep_is_kept_and_of_another_wait_it_is_not() -> None:
    assert only(host("clock_nanosleep", wakes_at_s=99.0)).until_s == 99.0
    assert only(host("futex", wakes_at_s=99.0, timed=True)).until_s is None


def test_a_wait_under_autograds_engine_is_inside_the_backward_pass() -> None:
    assert only(locked_in_backward(0)).in_backward is True
    assert only(host("futex")).in_backward is False


# A lock: closed only when nobody is left to release it.


def test_a_lock_that_no_thread_could_release_is_closed() -> None:
    assert only(host("futex")).is_closed is True


@pytest.mark.parametrize("timed", [True, None])
def test_a_lock_with_a_timeout_or_an_unreadable_one_stays_open(timed: bool | None) -> None:
    assert only(host("futex", timed=timed)).is_closed is False


@pytest.mark.parametrize(
    ("syscall", "timed", "closed"), [("futex", False, True), ("futex", True, False), ("read", False, False)]
)
def test_another_python_thread_may_release_it_unless_it_waits_for_a_lock_itself(
    syscall: str, timed: bool, closed: bool
) -> None:
    other = (stack(frame(50), tid=101, thread="worker"), task(101, syscall=syscall, timed=timed))
    assert only(host("futex", other)).is_closed is closed


def test_another_python_thread_that_cannot_be_read_may_release_it() -> None:
    assert only(host("futex", (stack(frame(50), tid=101), None))).is_closed is False
    assert only(host("futex", (stack(frame(50), tid=None), None))).is_closed is False


@pytest.mark.parametrize(
    "file",
    ["/src/harness/probe/heartbeat.py", f"{SITE}/tqdm/_monitor.py", f"{SITE}/torch/utils/data/_utils/pin_memory.py"],
)
def test_a_librarys_own_poller_releases_nothing(file: str) -> None:
    poller = (
        stack(frame(1, file="/usr/lib/python3.11/threading.py"), frame(9, file=file), tid=101),
        task(101, timed=True),
    )
    assert only(host("futex", poller)).is_closed is True


def test_a_lock_that_other_processes_share_may_be_released_by_them() -> None:
    inner = frame(94, file="/usr/lib/python3.11/multiprocessing/synchronize.py", function="__enter__")
    shared = rank_snapshot(0, inner, frame(10))
    assert only(shared).is_closed is False


@pytest.mark.parametrize(
    ("native", "closed"),
    [
        ({"state": "R"}, False),
        ({"state": "D"}, False),
        ({"syscall": "recvmsg"}, False),
        ({"syscall": "epoll_wait", "timed": True}, True),
        ({"syscall": "futex"}, True),
        ({"syscall": "read", "comm": "gloo_tcp_loop"}, True),
        ({"state": "R", "comm": "pt_autograd_0"}, True),
    ],
)
def test_a_native_thread_may_release_it_only_while_it_is_busy(native: dict[str, Any], closed: bool) -> None:
    assert only(host("futex", (None, task(102, **native)))).is_closed is closed


# A collective.


def test_two_ranks_in_different_collectives_wait_for_each_other() -> None:
    ranks = (in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast")))
    seen = graph(*ranks)
    assert [(one.kind, one.peers, one.blocked_in, one.is_closed) for one in seen.waits] == [
        (WaitKind.COLLECTIVE, (1,), "all_reduce #6", True),
        (WaitKind.COLLECTIVE, (0,), "broadcast #6", True),
    ]
    assert (roots(*ranks), closed(seen), seen.has_progress) == ([0, 1], True, False)


@pytest.mark.parametrize("difference", [{"sizes": ((8,),)}, {"dtypes": ("float16",)}])
def test_the_same_operation_on_another_shape_or_type_is_another_collective(difference: dict[str, Any]) -> None:
    seen = graph(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, **difference)))
    assert [(one.kind, one.is_closed) for one in seen.waits] == [(WaitKind.COLLECTIVE, True)] * 2


def test_a_rank_behind_in_sequence_is_waited_for() -> None:
    ahead, behind = in_all_reduce(0, collective(7)), locked_in_backward(1)
    behind = replace(behind, collectives=(collective(6, retired=True),))
    assert only(ahead, behind).peers == (1,)
    assert roots(ahead, behind) == [1], "the rank that holds the others up is the root, not its victim"


def test_a_rank_that_is_beyond_the_collective_is_not_waited_for() -> None:
    beyond = in_all_reduce(1, collective(7, retired=True), collective(8))
    wait = only(in_all_reduce(0, collective(7)), beyond)
    assert (wait.kind, wait.peers) == (WaitKind.TRANSPORT, (1,))


def test_all_ranks_in_the_same_collective_wait_for_the_network() -> None:
    seen = graph(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6)))
    assert [(one.kind, one.peers, one.is_closed) for one in seen.waits] == [
        (WaitKind.TRANSPORT, (1,), False),
        (WaitKind.TRANSPORT, (0,), False),
    ]
    assert closed(seen) is False


def test_a_rank_that_has_left_is_missing_in_every_collective() -> None:
    alone = only(in_all_reduce(0, collective(6)), gone=(1,))
    assert (alone.kind, alone.peers, alone.is_closed) == (WaitKind.COLLECTIVE, (1,), True)
    done = in_all_reduce(1, collective(6))
    assert only(in_all_reduce(0, collective(6)), done, gone=(1,)).peers == (1,)


def test_a_rank_outside_the_process_group_is_not_waited_for() -> None:
    member = in_all_reduce(0, collective(3, group="1"))
    peer = in_all_reduce(1, collective(2, group="1", retired=True))
    stranger = rank_snapshot(2, frame(10), collectives=(collective(9, retired=True),))
    assert only(member, peer, stranger).peers == (1,)
    unheard = rank_snapshot(2, frame(10))
    assert only(member, peer, unheard).peers == (1, 2), "without a record it may be a member"
    outside = in_all_reduce(0, collective(3))
    assert only(outside, peer, unheard).peers == (1, 2), "everyone is a member of the default group"


def test_the_oldest_pending_collective_is_the_one_waited_in() -> None:
    wait = only(in_all_reduce(0, collective(5, retired=True), collective(6), collective(7)), locked_in_backward(1))
    assert wait.collective == collective(6)


def test_without_a_flight_recorder_a_rank_in_a_collective_waits_for_all_others() -> None:
    wait = only(in_all_reduce(1), locked_in_backward(2), gone=(0,))
    assert (wait.kind, wait.peers, wait.collective) == (WaitKind.COLLECTIVE, (0, 2), None)
    assert wait.blocked_in == "all_reduce", "the frame says it"


def test_the_board_names_the_open_call_where_nothing_else_does() -> None:
    calls = (call(1, left_s=None, op="barrier"), call(2))
    wait = only(in_all_reduce(0, calls=calls), locked_in_backward(1))
    assert (wait.call, wait.blocked_in) == (calls[0], "barrier")
    blind = rank_snapshot(0, status_file=board(calls=calls))
    assert (only(blind, locked_in_backward(1)).kind, only(blind).blocked_in) == (WaitKind.COLLECTIVE, "barrier")


def test_a_finished_call_is_not_waited_in() -> None:
    assert only(rank_snapshot(0, status_file=board(calls=(call(),))), locked_in_backward(1)).kind is WaitKind.LOCK


def test_a_users_own_wait_for_a_handle_is_a_collective_when_somebody_is_missing() -> None:
    handle = rank_snapshot(0, frame(40), collectives=(collective(6),))
    assert only(handle, locked_in_backward(1)).kind is WaitKind.COLLECTIVE
    assert only(handle, in_all_reduce(1, collective(6))).kind is WaitKind.LOCK, "nobody is missing: something else"


def test_a_wait_under_the_autograd_engine_for_a_pending_collective_is_a_collective() -> None:
    ddp = rank_snapshot(0, BACKWARD, frame(40), collectives=(collective(6),))
    assert only(ddp, in_all_reduce(1, collective(6))).kind is WaitKind.TRANSPORT
    idle = rank_snapshot(0, BACKWARD, frame(40), status_file=board())
    assert only(idle, locked_in_backward(1)).kind is WaitKind.LOCK, "nothing is pending: no collective"


def test_without_a_probe_an_idle_backward_waits_for_the_other_ranks_and_alone_for_nobody_knows_what() -> None:
    idle = rank_snapshot(0, BACKWARD, frame(40))
    wait = only(idle, locked_in_backward(1))
    assert (wait.kind, wait.peers, wait.is_closed) == (WaitKind.COLLECTIVE, (1,), True)
    assert only(idle).is_closed is False


def spinning(*collectives: Any, leaf: Any = ALL_REDUCE) -> tuple[RankSnapshot, RankSnapshot]:
    before = rank_snapshot(0, leaf, frame(40), collectives=collectives)
    return before, replace(before, process=process(cpu_s=9.0))


SYNCHRONIZE = frame(1040, file=f"{SITE}/torch/cuda/__init__.py", function="synchronize")


@pytest.mark.parametrize("leaf", [ALL_REDUCE, BACKWARD, SYNCHRONIZE, frame(40)], ids=["in it", "DDP", "sync", "item"])
@pytest.mark.parametrize(("backend", "waits"), [("nccl", True), ("gloo", False)])
def test_a_rank_that_spins_for_a_device_waits_and_on_gloo_a_spinning_thread_computes(
    leaf: Frame, backend: str, waits: bool
) -> None:
    before, after = spinning(collective(6), leaf=leaf)
    late = locked_in_backward(1)
    wait = wait_graph_between(snapshot(1, 18.0, before, late), snapshot(2, 20.0, after, late), (), backend).waits[0]
    expected = (Motion.WAITING, WaitKind.COLLECTIVE, (1,)) if waits else (Motion.BURNING, WaitKind.COMPUTE, ())
    assert (wait.motion, wait.kind, wait.peers) == expected


def test_a_program_of_unknown_backend_is_on_a_device_where_its_recorder_says_what_has_started() -> None:
    for started, motion in ((True, Motion.WAITING), (None, Motion.BURNING)):
        before, after = spinning(collective(6, started=started))
        late = locked_in_backward(1)
        seen = wait_graph_between(snapshot(1, 18.0, before, late), snapshot(2, 20.0, after, late), (), "any")
        assert seen.waits[0].motion is motion


def test_a_rank_that_holds_the_interpreters_lock_or_changes_its_line_computes_on_nccl_too() -> None:
    before, after = spinning(collective(6), leaf=frame(40))
    late = locked_in_backward(1)
    holding = replace(after, stacks=(replace(after.stacks[0], gil=True),))
    elsewhere = replace(after, stacks=(stack(frame(41)),))
    for now in (holding, elsewhere):
        wait = wait_graph_between(snapshot(1, 18.0, before, late), snapshot(2, 20.0, now, late), (), "nccl").waits[0]
        assert wait.kind is WaitKind.COMPUTE


def test_a_thread_beside_the_one_in_a_collective_may_spin_on_gloo() -> None:
    before = in_all_reduce(0, collective(6))
    after = replace(before, process=process(cpu_s=9.0, tasks=(task(100),)))
    late = locked_in_backward(1)
    wait = wait_graph_between(snapshot(1, 18.0, before, late), snapshot(2, 20.0, after, late), (), "gloo").waits[0]
    assert (wait.motion, wait.kind, wait.peers) == (Motion.WAITING, WaitKind.COLLECTIVE, (1,))


def test_a_rank_that_computes_beside_a_pending_collective_is_computing() -> None:
    before, after = spinning(collective(6), leaf=frame(40))
    late = locked_in_backward(1)
    wait = wait_graph_between(snapshot(1, 18.0, before, late), snapshot(2, 20.0, after, late), (), "gloo").waits[0]
    assert (wait.motion, wait.kind, wait.peers) == (Motion.BURNING, WaitKind.COMPUTE, ())


@pytest.mark.parametrize("rank_count", [1, 2])
def test_ranks_that_write_a_checkpoint_to_slow_storage_are_not_in_a_collective(rank_count: int) -> None:
    writer = frame(300, file=f"{SITE}/torch/distributed/checkpoint/filesystem.py", function="_write_item")
    ranks = [
        rank_snapshot(rank, writer, frame(70), process=process(100 + rank, tasks=(task(100 + rank, syscall="fsync"),)))
        for rank in range(rank_count)
    ]
    seen = graph(*ranks)
    assert [one.kind for one in seen.waits] == [WaitKind.IO] * rank_count
    assert closed(seen) is False


# Members of groups.


def member(rank: int, *collectives: Any, group: str = "1", members: tuple[int, ...] = (0, 1)) -> RankSnapshot:
    return in_all_reduce(rank, *collectives, status_file=board(world_size=3, groups={group: members}))


def test_a_member_of_a_group_without_any_record_of_it_is_waited_for_and_a_stranger_is_not() -> None:
    waiting = member(0, collective(3, group="1"))
    elsewhere = [in_all_reduce(rank, collective(9, retired=True), status_file=board(world_size=3)) for rank in (1, 2)]
    assert only(waiting, *elsewhere).peers == (1,)
    assert only(waiting, elsewhere[0], gone=(2,)).peers == (1,), "who has left was no member"


def test_a_member_on_another_node_leaves_the_wait_open() -> None:
    wait = only(member(0, collective(3, group="1"), members=(0, 7)), locked_in_backward(1))
    assert (wait.kind, wait.peers, wait.is_closed) == (WaitKind.COLLECTIVE, (7,), False)


@pytest.mark.parametrize(("op", "kind"), [("all_gather", WaitKind.TRANSPORT), ("all_reduce", WaitKind.COLLECTIVE)])
def test_sizes_that_may_rightly_differ_between_ranks_are_no_other_collective(op: str, kind: WaitKind) -> None:
    sizes = [in_all_reduce(rank, collective(6, op, sizes=((4 + rank,),))) for rank in (0, 1)]
    assert only(*sizes).kind is kind


# Transfers, keys, the making of groups.


def calling(rank: int, op: str, *earlier: Any, leaf: Frame | None = None, **facts: Any) -> RankSnapshot:
    nothing = {"elements": 0} if op == "init_process_group" else {}
    now = call(len(earlier) + 1, op, left_s=None, **{**nothing, **facts})
    inner = leaf or frame(2000, file=C10D, function=op)
    return rank_snapshot(rank, inner, frame(40), status_file=board(rank=rank, calls=(*earlier, now)))


def test_two_ranks_that_receive_from_each_other_are_a_closed_wait() -> None:
    seen = graph(calling(0, "recv", peer=1), calling(1, "recv", peer=0))
    assert [(one.kind, one.peers, one.is_closed) for one in seen.waits] == [
        (WaitKind.POINT_TO_POINT, (1,), True),
        (WaitKind.POINT_TO_POINT, (0,), True),
    ]
    assert closed(seen) is True
    assert seen.waits[0].blocked_in == "recv with rank 1"


@pytest.mark.parametrize("partner", ["send", "wait isend", "batch_isend_irecv"])
def test_a_transfer_that_both_partners_are_in_waits_for_the_network(partner: str) -> None:
    wait = only(calling(0, "recv", peer=1), calling(1, partner, peer=0))
    assert (wait.kind, wait.peers, wait.is_closed) == (WaitKind.TRANSPORT, (1,), False)


def test_a_receive_waits_for_its_partner_alone_and_one_from_anybody_for_all() -> None:
    others = (locked_in_backward(1), locked_in_backward(2))
    assert only(calling(0, "wait irecv", peer=2), *others).peers == (2,)
    assert only(calling(0, "recv", peer=None), *others).peers == (1, 2)


def test_the_probes_own_frame_around_a_wait_hides_nothing() -> None:
    covered = calling(0, "wait irecv", peer=1, leaf=frame(70, file="/src/harness/probe/waits.py", function="during"))
    assert only(covered, locked_in_backward(1)).kind is WaitKind.POINT_TO_POINT


def test_a_key_that_all_others_wait_for_too_is_closed_and_alone_or_across_nodes_it_is_open() -> None:
    waiting = calling(0, "wait store.get", key="mine")
    assert [(one.kind, one.peers, one.is_closed) for one in graph(waiting, in_all_reduce(1)).waits[:1]] == [
        (WaitKind.STORE, (1,), True)
    ]
    assert only(waiting, in_all_reduce(1)).blocked_in == "wait store.get of the store key mine"
    assert closed(graph(waiting)) is False
    apart = replace(waiting, status_file=replace(waiting.status_file, world_size=4)) if waiting.status_file else waiting
    assert (only(apart, in_all_reduce(1)).peers, only(apart, in_all_reduce(1)).is_closed) == ((), False)


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("/default_pg/0//cpu//0/1", 1),
        ("mine", None),
        ("wait timeout, keys: /default_pg/0//cpu//3/12", 12),
        ("a/1/2", None),
    ],
)
def test_a_key_of_torchs_rendezvous_names_the_rank_that_is_missing(key: str, missing: int | None) -> None:
    assert missing_rank(key) == missing


def test_a_rendezvous_waits_for_the_named_rank_and_never_ends_for_a_number_outside_the_job() -> None:
    waiting = calling(0, "wait store.get", key="/default_pg/0//cpu//0/1")
    wait = only(waiting, locked_in_backward(1), locked_in_backward(2))
    assert (wait.kind, wait.peers) == (WaitKind.GROUP_CREATION, (1,))
    beyond = calling(0, "init_process_group", key="/default_pg/0//cpu//0/2")
    seen = only(beyond, calling(1, "init_process_group"))
    assert (seen.peers, seen.is_closed) == ((2,), True)


def test_the_entrance_waits_for_the_ranks_that_have_not_come_to_it() -> None:
    early, late = calling(0, "init_process_group"), rank_snapshot(1, frame(12), status_file=board(rank=1))
    assert (only(early, late).kind, only(early, late).peers) == (WaitKind.GROUP_CREATION, (1,))
    assert only(early, calling(1, "init_process_group")).kind is WaitKind.TRANSPORT
    passed = calling(1, "all_reduce", call(1, "init_process_group"))
    assert only(early, passed).kind is WaitKind.TRANSPORT


def test_an_entrance_that_was_told_of_more_ranks_than_were_started_never_ends() -> None:
    of_three = [calling(rank, "init_process_group", elements=3) for rank in (0, 1)]
    assert (only(*of_three).kind, only(*of_three).peers, only(*of_three).is_closed) == (
        WaitKind.GROUP_CREATION,
        (2,),
        True,
    )
    of_two = [calling(rank, "init_process_group", elements=2) for rank in (0, 1)]
    assert (only(*of_two).kind, only(*of_two).is_closed) == (WaitKind.TRANSPORT, False)


def test_a_rank_that_has_not_started_leaves_the_entrance_open() -> None:
    early = calling(0, "init_process_group")
    assert early.status_file is not None
    alone = replace(early, status_file=replace(early.status_file, world_size=2))
    assert (only(alone).peers, only(alone).is_closed) == ((1,), False)


def test_a_new_group_waits_for_the_ranks_that_made_fewer() -> None:
    making = calling(0, "new_group", call(1, "new_group"))
    behind = calling(1, "all_reduce", call(1, "new_group"))
    level = calling(1, "all_reduce", call(1, "new_group"), call(2, "new_group"))
    assert (only(making, behind).kind, only(making, behind).peers) == (WaitKind.GROUP_CREATION, (1,))
    assert only(making, level).kind is WaitKind.TRANSPORT
    ahead = calling(1, "new_group", call(1, "new_group"), call(2, "new_group"))
    assert (only(making, ahead).kind, only(making, ahead).peers) == (WaitKind.GROUP_CREATION, (1,)), "another number"
    forgetful = calling(1, "all_reduce", call(300, "all_reduce"))
    assert only(making, forgetful).peers == (1,), "it has forgotten how many it made, and stands elsewhere"
    within = calling(1, "new_group", call(300, "all_reduce"))
    assert only(making, within).kind is WaitKind.TRANSPORT, "it has forgotten how many it made, and is in one"


# Roots.


def test_a_rank_on_which_others_hang_is_the_only_root() -> None:
    waiting = [in_all_reduce(rank, collective(6)) for rank in (0, 2)]
    assert roots(waiting[0], locked_in_backward(1), waiting[1]) == [1]


def test_a_victim_that_hangs_on_a_cycle_is_no_root_of_it() -> None:
    victim = in_all_reduce(0, collective(3, group="1"))
    crossed = [
        in_all_reduce(1, collective(2, group="1", retired=True), collective(6, group="2")),
        in_all_reduce(2, collective(6, "broadcast", group="2")),
    ]
    assert only(victim, *crossed).peers == (1,)
    assert roots(victim, *crossed) == [1, 2]


def test_a_cycle_beside_an_end_is_a_root_of_its_own() -> None:
    crossed = [in_all_reduce(0, collective(6, group="1")), in_all_reduce(1, collective(6, "broadcast", group="1"))]
    apart = replace(locked_in_backward(2), collectives=(collective(1, retired=True),))
    assert roots(*crossed, apart) == [0, 1, 2]


def test_nothing_seen_has_no_roots_and_proves_nothing() -> None:
    seen = wait_graph_between(snapshot(1, 1.0), snapshot(2, 3.0), (), "gloo")
    assert (seen.waits, seen.roots, closed(seen), seen.has_progress) == ((), (), False, False)


_STANDS = st.sampled_from(["lock", "sleep", "all_reduce", "broadcast", "behind", "blind", "gone"])


def standing(rank: int, what: str, seq: int) -> RankSnapshot:
    if what == "lock":
        return locked_in_backward(rank)
    if what == "sleep":
        asleep = process(100 + rank, tasks=(task(100 + rank, syscall="clock_nanosleep"),))
        return rank_snapshot(rank, frame(5), process=asleep)
    if what == "blind":
        return rank_snapshot(rank, frame(1, file=C10D, function="barrier"))
    if what == "gone":
        return rank_snapshot(rank, process=None)
    if what == "behind":
        return rank_snapshot(rank, frame(5), collectives=(collective(seq, retired=True),))
    return in_all_reduce(rank, collective(seq, what))


@given(st.lists(st.tuples(_STANDS, st.integers(1, 3)), max_size=5), st.sets(st.integers(0, 4), max_size=2))
def test_every_wait_reaches_a_root_and_every_root_is_reached_back(
    stands: list[tuple[str, int]], gone: set[int]
) -> None:
    ranks = [standing(rank, what, seq) for rank, (what, seq) in enumerate(stands)]
    seen = graph(*ranks, gone=tuple(gone))
    peers = {wait.rank: set(wait.peers) for wait in seen.waits}
    assert sorted(peers) == sorted({*range(len(ranks)), *gone})
    reached = {rank: _reached(rank, peers) for rank in peers}
    found = {root.rank for root in seen.roots}
    assert all(reached[rank] & found for rank in peers)
    assert all(root in reached[other] for root in found for other in reached[root])


def _reached(rank: int, peers: dict[int, set[int]]) -> set[int]:
    found = {rank}
    while more := {peer for one in found for peer in peers[one]} - found:
        found |= more
    return found


def test_a_peer_whose_recorder_could_not_be_read_is_not_said_to_be_absent() -> None:
    """It may stand in the same collective, over a slow network: that wait is open."""
    unread = in_all_reduce(1)
    silent = replace(unread, status_file=board(enqueued=7, rank=1))
    graph = wait_graph_between(*twice(in_all_reduce(0, collective(7)), silent), (), "gloo")
    assert not closed(graph)
    never = replace(unread, status_file=board(enqueued=0, rank=1))
    assert closed(wait_graph_between(*twice(in_all_reduce(0, collective(7)), never), (), "gloo"))
