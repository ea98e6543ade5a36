"""Waits for the host: who holds what a rank waits for, and whether any of them can still act."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import SITE, board, frame, in_all_reduce, process, rank_snapshot, snapshot, stack, task, twice

from nsa_harness.core.evidence.evidence import ChildSample, Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import rank_samples, wait_graph_between

STEP = frame(10)
LOADER = frame(
    1291, file=f"{SITE}/torch/utils/data/dataloader.py", function="_MultiProcessingDataLoaderIter._try_get_data"
)
WORKER = frame(374, file=f"{SITE}/torch/utils/data/_utils/worker.py", function="_worker_loop")
FETCH = frame(54, file=f"{SITE}/torch/utils/data/_utils/fetch.py", function="fetch")
INDICES = frame(113, file="/usr/lib/python3.11/multiprocessing/queues.py", function="Queue.get")


def child(pid: int = 300, syscall: str = "futex", **changes: Any) -> Process:
    facts = {"timed": False, "target": "", "held_by": None, "wakes_at_s": None}
    facts |= {name: changes.pop(name) for name in list(changes) if name in facts}
    cpu_s = changes.get("cpu_s", 1.0)
    waiting = task(pid, syscall=syscall, cpu_s=cpu_s, **facts)
    return process(pid, **{"parent": 100, "command": "python train.py", "tasks": (waiting,), **changes})


def rank(syscall: str, *children: Process, line: Frame = STEP, lines: Any = None, **facts: Any) -> RankSnapshot:
    """Rank 0, whose main thread stands in this call; `lines` are the frames of each child."""
    waiting = process(tasks=(task(100, syscall=syscall, **facts),))
    stacks = {one.pid: (stack(*(lines or {}).get(one.pid, (frame(50),)), tid=one.pid),) for one in children}
    return rank_snapshot(0, process=waiting, stacks=(stack(line),), children=children, child_stacks=stacks)


def stands(*ranks: RankSnapshot, before: RankSnapshot | None = None) -> Wait:
    if before is None:
        return wait_graph_between(*twice(*ranks), (), "gloo").waits[0]
    return wait_graph_between(snapshot(1, 18.0, before, *ranks[1:]), snapshot(2, 20.0, *ranks), (), "gloo").waits[0]


# Pipes.


def test_a_write_to_a_pipe_that_only_the_writer_itself_could_read_is_closed() -> None:
    wait = stands(rank("write", target="pipe:[7]", held_by=(100,)))
    assert (wait.kind, wait.is_closed, wait.blocked_in) == (WaitKind.PIPE, True, "a write to a full pipe in step")


def test_a_read_of_a_pipe_that_only_the_reader_itself_could_write_to_is_closed_too() -> None:
    wait = stands(rank("read", target="pipe:[7]", held_by=(100,)))
    assert (wait.kind, wait.is_closed) == (WaitKind.IO, True)


def test_a_fifo_whose_name_is_gone_is_a_pipe() -> None:
    wait = stands(rank("read", target="/tmp/fifo (deleted)", held_by=(100,)))
    assert (wait.kind, wait.is_closed) == (WaitKind.IO, True)


LOOKS = "while not flag.raised_:\n    time.sleep(0.01)"
REPORTS = "while not stop.wait(0.5):\n    log.write(f'{time.time()}')"


def polling(loop: str = LOOKS, woke: int = 2, *others: Stack, children: Any = ()) -> RankSnapshot:
    """Rank 0 sleeps in this loop, seen before in so many other sleeps of it."""
    nap = task(100, syscall="clock_nanosleep", timed=True, wakes_at_s=20.01, wake_count=woke)
    known = (nap, *(task(one.tid or 0, syscall="read") for one in others))
    stacks = (replace(stack(STEP), loop=loop), *others)
    return rank_snapshot(0, process=process(tasks=known), stacks=stacks, children=children)


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        (polling(), True),
        (polling(woke=1), False),
        (polling("while not os.path.exists(path):\n    time.sleep(0.01)"), False),
        (polling(LOOKS, 2, stack(frame(60), tid=101)), False),
        (polling(children=(child(),)), False),
    ],
    ids=["alone", "woke once", "a file", "another thread", "a child"],
)
def test_a_loop_that_reads_only_its_own_objects_is_closed_while_nobody_else_can_run(
    seen: RankSnapshot, closed: bool
) -> None:
    wait = stands(seen)
    assert (wait.kind, wait.is_closed) == (WaitKind.SLEEP, closed)


@pytest.mark.parametrize(
    ("loop", "woke", "closed"),
    [(REPORTS, 2, True), (REPORTS, 1, False), ("while True:\n    poll()\n    time.sleep(1)", 9, False)],
    ids=["it reports", "woke once", "it may do anything"],
)
def test_a_thread_that_wakes_and_reports_and_sleeps_again_releases_no_lock(loop: str, woke: int, closed: bool) -> None:
    beat = replace(stack(frame(60), tid=101, thread="watchdog"), loop=loop)
    tasks = (task(), task(101, timed=True, wakes_at_s=20.4, wake_count=woke))
    wait = stands(rank_snapshot(0, process=process(tasks=tasks), stacks=(stack(STEP), beat)))
    assert (wait.kind, wait.is_closed) == (WaitKind.LOCK, closed)


def test_another_thread_of_the_process_may_still_empty_the_pipe() -> None:
    seen = rank("write", target="pipe:[7]", held_by=(100,))
    busy = (stack(frame(60), tid=101, thread="reader"),)
    drained = replace(
        seen,
        stacks=(*seen.stacks, *busy),
        process=process(tasks=(*seen.process.tasks, task(101, syscall="clock_nanosleep", timed=True))),
    )
    assert stands(drained).is_closed is False


@pytest.mark.parametrize(
    "facts",
    [
        {"target": "pipe:[7]", "held_by": (100, 999)},
        {"target": "pipe:[7]", "held_by": None},
        {"target": "pipe:[7]", "held_by": (100,) * 16},
        {"target": "/tmp/fifo", "held_by": (100,)},
    ],
    ids=["a stranger", "nobody could be seen", "too many to name all", "a name that others may open"],
)
def test_a_pipe_that_somebody_else_may_act_on_is_open(facts: dict[str, Any]) -> None:
    wait = stands(rank("write", **facts))
    assert (wait.kind, wait.is_closed, wait.peers) == (WaitKind.IO, False, ())


def test_a_poll_watches_other_descriptors_too_and_is_never_closed() -> None:
    assert stands(rank("poll", target="pipe:[7]", held_by=(100,))).is_closed is False


def test_a_pipe_held_by_another_rank_waits_for_that_rank() -> None:
    waiting, other = rank("read", target="pipe:[7]", held_by=(101,)), in_all_reduce(1)
    wait = stands(waiting, other)
    assert (wait.peers, wait.is_closed) == ((1,), True)
    seen = wait_graph_between(*twice(waiting, other), (), "gloo")
    assert sorted(root.rank for root in seen.roots) == [0, 1], "each waits for the other"


# Children.


def test_a_child_that_fills_a_pipe_nobody_reads_closes_the_wait_of_its_parent() -> None:
    writer = child(300, "write", target="pipe:[7]", held_by=(100,))
    wait = stands(rank("wait4", writer, held_by=(300,)))
    assert (wait.kind, wait.is_closed) == (WaitKind.CHILD, True)
    assert wait.child is not None
    assert (wait.child.pid, wait.child.kind, wait.child.user_frame) == (300, WaitKind.PIPE, frame(50))


def test_a_stopped_child_closes_the_wait_of_its_parent() -> None:
    for stopped, closes in ((child(syscall="kill", state="T"), True), (child(syscall="read", state="T"), False)):
        wait = stands(rank("wait4", stopped, held_by=(300,)))
        assert wait.is_closed is closes
        assert wait.child is not None
        assert wait.child.kind is WaitKind.STOPPED


def test_a_child_that_its_own_rank_stopped_closes_the_wait_too() -> None:
    seen = rank("wait4", child(syscall="read", state="T"), held_by=(300,))
    assert stands(replace(seen, status_file=board(stopped={300: (frame(8),)}))).is_closed is True
    assert stands(replace(seen, status_file=board(stopped={301: (frame(8),)}))).is_closed is False


def test_a_child_with_a_lock_that_no_thread_of_it_holds_closes_the_wait_of_its_parent() -> None:
    wait = stands(rank("wait4", child(), held_by=(300,)))
    assert (wait.is_closed, wait.child and wait.child.kind) == (True, WaitKind.LOCK)


NATIVE = {"cpu_s": 9.0, "tasks": (task(300), task(301, cpu_s=9.0))}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"io_bytes": 8}, (frame(50),)),
        ({"cpu_s": 9.0, "io_bytes": 8}, (frame(50),)),
        ({"cpu_s": 1.2}, ()),
        (NATIVE, (frame(50),)),
        ({"cpu_s": 9.0, "command": "python -m compiler step.py"}, (frame(50),)),
        ({"cpu_s": 9.0}, (frame(50, file=f"{SITE}/triton/compiler/compiler.py"), frame(50))),
    ],
    ids=[
        "bytes",
        "CPU and bytes",
        "CPU of no Python program",
        "CPU of another thread",
        "CPU of another program",
        "CPU of a compiler in a fork",
    ],
)
def test_a_child_that_moves_is_waited_for_however_long(changes: dict[str, Any], lines: tuple[Frame, ...]) -> None:
    before, after = (rank("wait4", one, held_by=(300,), lines={300: lines}) for one in (child(), child(**changes)))
    wait = stands(after, before=before)
    assert (wait.motion, wait.is_closed, wait.computing) == (Motion.MOVING, False, ())


def test_a_child_that_only_computes_is_told_with_the_lines_that_its_samples_show() -> None:
    shell = child(299, "wait4", held_by=(300,))
    before, after = (rank("wait4", shell, one, held_by=(299,)) for one in (child(), child(cpu_s=1.2)))
    looks = snapshot(1, 18.0, before), snapshot(2, 20.0, after)
    wait = wait_graph_between(*looks, (), "gloo").waits[0]
    assert (wait.motion, wait.kind, wait.is_closed) == (Motion.BURNING, WaitKind.CHILD, False)
    assert wait.child is not None
    assert wait.computing == (wait.child.deepest,)
    (seen,) = rank_samples(*looks, (), "gloo")
    assert (seen.motion, seen.leaf) == ("burning", STEP)
    assert seen.child_samples == (ChildSample(pid=300, leaf=frame(50), user_frame=frame(50)),)


SPAWNED = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5) --multiprocessing-fork"


@pytest.mark.parametrize(
    ("between", "command", "motion"),
    [
        ("python train.py", "python train.py", Motion.BURNING),
        ("python train.py", SPAWNED, Motion.BURNING),
        ("python -m compile_worker", "python -m compile_worker", Motion.MOVING),
        ("python -m compile_worker", SPAWNED, Motion.MOVING),
    ],
    ids=["a fork of a fork", "spawned by a fork", "a fork of another program", "spawned by another program"],
)
def test_a_process_that_computes_may_loop_only_if_the_program_itself_started_it(
    between: str, command: str, motion: Motion
) -> None:
    parent = child(299, "wait4", held_by=(300,), command=between)
    before, after = (
        rank("wait4", parent, child(parent=299, command=command, cpu_s=cpu_s), held_by=(299,)) for cpu_s in (1.0, 9.0)
    )
    assert stands(after, before=before).motion is motion


def test_a_child_that_polls_has_no_end_that_can_be_read() -> None:
    napping = {"syscall": "clock_nanosleep", "timed": True, "wakes_at_s": 21.0}
    seen = child(300)
    for woke, until_s in ((1, 21.0), (2, None)):
        polls = replace(seen, tasks=(task(300, wake_count=woke, **napping),))
        assert stands(rank("wait4", polls, held_by=(300,))).until_s == until_s


def test_a_child_that_somebody_else_could_release_leaves_the_wait_open() -> None:
    assert stands(rank("wait4", child(300, "read", target="/data"), held_by=(300,))).is_closed is False
    assert stands(rank("wait4", child(), held_by=(300, 301))).is_closed is False, "one of them was not seen"
    assert stands(rank("wait4")).is_closed is False, "no child was seen"


def test_the_end_of_a_childs_sleep_is_known_through_a_shell_that_waits_for_it() -> None:
    shell = child(300, "wait4", held_by=(301,))
    sleeper = child(301, "clock_nanosleep", wakes_at_s=44.0, parent=300, timed=True)
    wait = stands(rank("wait4", shell, sleeper, held_by=(300,)))
    assert (wait.until_s, wait.is_closed) == (44.0, False)
    assert wait.child is not None
    assert wait.child.deepest.pid == 301


def test_a_compiler_below_a_rank_that_waits_for_a_lock_is_what_it_waits_for() -> None:
    released = rank("futex", child(cpu_s=1.0), timed=True)
    assert stands(released).motion is Motion.WAITING
    compiling = rank("futex", child(cpu_s=3.0), timed=True)
    assert stands(compiling, before=released).motion is Motion.MOVING


# Workers of a data loader.


def loading(*workers: tuple[Process, tuple[Frame, ...]]) -> RankSnapshot:
    children = tuple(worker for worker, _ in workers)
    return rank("poll", *children, line=LOADER, lines={worker.pid: lines for worker, lines in workers}, timed=True)


def test_a_worker_that_stands_in_a_closed_wait_closes_the_loop_that_loads() -> None:
    idle = child(301, "read", target="pipe:[8]", held_by=(999,))
    wait = stands(loading((idle, (INDICES, WORKER)), (child(300), (frame(85), FETCH, WORKER))))
    assert (wait.kind, wait.is_closed) == (WaitKind.LOADER, True)
    assert wait.child is not None
    assert (wait.child.pid, wait.child.user_frame) == (300, frame(85))


def test_a_worker_that_reads_leaves_the_loop_open_and_one_that_receives_bytes_moves() -> None:
    reader, lines = child(300, "recvfrom", target="socket:[5]"), (frame(85), FETCH, WORKER)
    assert stands(loading((reader, lines))).is_closed is False
    later = loading((replace(reader, io_bytes=9), lines))
    assert stands(later, before=loading((reader, lines))).motion is Motion.MOVING


def test_workers_that_all_wait_for_indices_explain_nothing() -> None:
    wait = stands(loading((child(300), (INDICES, WORKER))))
    assert (wait.kind, wait.is_closed, wait.child) == (WaitKind.LOADER, False, None)


@pytest.mark.parametrize(
    ("other", "lines", "computing"),
    [
        (child(301, "read", target="pipe:[8]", held_by=(999,)), (INDICES, WORKER), (300,)),
        (child(301, cpu_s=9.0), (frame(85), FETCH, WORKER), (300, 301)),
        (child(301), (frame(85), FETCH, WORKER), (300,)),
        (child(301, "recvfrom", target="socket:[5]"), (frame(85), FETCH, WORKER), ()),
        (child(301, cpu_s=9.0), (), ()),
    ],
    ids=["idle", "computes too", "in a closed wait", "in an open wait", "computes unseen"],
)
def test_a_worker_that_only_computes_is_what_the_loop_waits_for_unless_another_one_may_end_it(
    other: Process, lines: tuple[Frame, ...], computing: tuple[int, ...]
) -> None:
    at_work = (frame(85), FETCH, WORKER)
    before = loading((child(300), at_work), (replace(other, cpu_s=1.0, tasks=(task(301),)), lines))
    wait = stands(loading((child(300, cpu_s=9.0), at_work), (other, lines)), before=before)
    assert tuple(one.pid for one in wait.computing) == computing
    assert wait.motion is (Motion.BURNING if computing else Motion.MOVING)


# Pools of processes.

POOL = "/usr/lib/python3.11/multiprocessing/pool.py"
FUTURES = "/usr/lib/python3.11/concurrent/futures"
MAP = (frame(327, file="/usr/lib/python3.11/threading.py", function="wait"), frame(774, file=POOL, function="get"))
RESULT = (frame(327, file="/usr/lib/python3.11/threading.py", function="wait"),)
RESULT += (frame(451, file=f"{FUTURES}/_base.py", function="Future.result"),)
POOL_WORKER = frame(125, file=POOL, function="worker")
TASK_WORKER = frame(246, file=f"{FUTURES}/process.py", function="_process_worker")
HANDLER = stack(frame(502, file=POOL, function="Pool._handle_workers"), tid=101)
CALLED = stack(frame(70), frame(592, file=POOL, function="Pool._handle_results"), tid=101)


def pooled(
    *workers: tuple[Process, tuple[Frame, ...]], awaits: tuple[Frame, ...] = MAP, beside: Stack = HANDLER
) -> RankSnapshot:
    """Rank 0 waits for a result of its pool; a thread beside it waits with a limit."""
    children = tuple(worker for worker, _ in workers)
    seen = rank("futex", *children, lines={worker.pid: lines for worker, lines in workers})
    tasks = (task(100), task(101, timed=True, syscall="poll"))
    return replace(seen, process=process(tasks=tasks), stacks=(stack(*awaits, STEP), beside))


LOCKED = (child(300), (frame(85), POOL_WORKER))
RESTS = (child(301, "read", target="pipe:[8]", held_by=(999,)), (INDICES, POOL_WORKER))
PUTS = (child(301, "write", target="pipe:[8]", held_by=(999,)), (replace(INDICES, function="put"), POOL_WORKER))
UNREAD = (child(301), ())


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        (pooled(LOCKED), True),
        (pooled(LOCKED, RESTS), True),
        (pooled((child(300), (frame(85), TASK_WORKER)), awaits=RESULT), True),
        (pooled(LOCKED, PUTS), False),
        (pooled(LOCKED, UNREAD), False),
        (pooled(LOCKED, beside=CALLED), False),
        (pooled(LOCKED, beside=stack(frame(70), tid=101)), False),
    ],
    ids=["alone", "beside an idle one", "of an executor", "one hands over", "one unread", "callback", "thread"],
)
def test_the_wait_for_a_pool_is_closed_where_each_worker_with_a_task_is(seen: RankSnapshot, closed: bool) -> None:
    wait = stands(seen)
    assert (wait.kind, wait.is_closed, wait.child is not None) == (WaitKind.CHILD, closed, True)


@pytest.mark.parametrize(
    "seen", [pooled(RESTS), pooled(LOCKED, awaits=RESULT), pooled(LOCKED, awaits=())], ids=["idle", "other", "none"]
)
def test_a_rank_that_waits_for_no_worker_of_a_pool_stands_in_its_own_lock(seen: RankSnapshot) -> None:
    wait = stands(seen)
    assert (wait.kind, wait.is_closed, wait.child) == (WaitKind.LOCK, False, None)


def test_a_worker_of_a_pool_that_only_computes_is_what_the_rank_waits_for() -> None:
    at_work = (frame(85), POOL_WORKER)
    wait = stands(pooled((child(300, cpu_s=9.0), at_work), RESTS), before=pooled(LOCKED, RESTS))
    assert (wait.motion, [one.pid for one in wait.computing]) == (Motion.BURNING, [300])


# File locks and connections.


def test_a_file_lock_held_by_another_rank_waits_for_it_and_one_held_outside_is_open() -> None:
    holder = in_all_reduce(1)
    held = stands(rank("flock", target="/tmp/lock", held_by=(101,)), holder)
    assert (held.kind, held.peers, held.is_closed) == (WaitKind.FILE_LOCK, (1,), True)
    outside = stands(rank("flock", target="/tmp/lock", held_by=(999,)), holder)
    assert (outside.peers, outside.is_closed, outside.target) == ((), False, "/tmp/lock")


def connected(**changes: Any) -> RankSnapshot:
    facts = {"inode": 5, "local": "10.0.0.1:40", "peer": "10.0.0.2:50", "state": "ESTABLISHED"}
    counts = {"unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    seen = rank("recvfrom", target="socket:[5]")
    return replace(seen, process=replace(seen.process, sockets=(Socket(**{**facts, **counts, **changes}),)))


def test_a_connection_to_a_rank_waits_for_that_rank_and_any_other_for_the_world() -> None:
    inside = stands(connected(peer_rank=1), in_all_reduce(1))
    assert (inside.peers, inside.is_closed, inside.target) == ((1,), True, "10.0.0.2:50")
    outside = stands(connected(), in_all_reduce(1))
    assert (outside.peers, outside.is_closed, outside.target) == ((), False, "10.0.0.2:50")


# Another thread computes.


def helped(cpu_s: float, comm: str = "python") -> tuple[RankSnapshot, RankSnapshot]:
    """The main thread waits for a lock; another thread used CPU meanwhile."""

    def look(used_s: float) -> RankSnapshot:
        tasks = (task(100), task(101, comm=comm, cpu_s=used_s, state="R", syscall="running"))
        return rank_snapshot(0, process=process(cpu_s=used_s, tasks=tasks), stacks=_stacks(comm))

    return look(1.0), look(1.0 + cpu_s)


def _stacks(comm: str) -> tuple[Stack, ...]:
    own = (stack(STEP),)
    return own if comm != "python" else (*own, stack(frame(60), tid=101, thread="saver"))


def test_a_thread_that_waits_for_one_that_computes_hangs_only_if_that_one_does() -> None:
    before, after = helped(1.9)
    wait = stands(after, before=before)
    assert (wait.motion, wait.kind, wait.is_closed) == (Motion.BURNING, WaitKind.LOCK, False)
    assert [(one.thread, one.pid, one.leaf) for one in wait.computing] == [("saver", 101, frame(60))]


def test_where_another_thread_may_end_the_wait_none_that_computes_explains_it() -> None:
    looks = [
        replace(
            one,
            stacks=(*one.stacks, stack(frame(70), tid=102, thread="reader")),
            process=replace(one.process, tasks=(*one.process.tasks, task(102, syscall="read", state="S"))),
        )
        for one in helped(1.9)
        if one.process
    ]
    wait = stands(looks[1], before=looks[0])
    assert (wait.motion, wait.computing) == (Motion.MOVING, ())


def test_a_thread_that_compiles_is_waited_for_however_long() -> None:
    compiler = frame(700, file=f"{SITE}/triton/compiler/compiler.py", function="compile")
    compiling = (stack(STEP), stack(compiler, frame(60), tid=101, thread="compiler"))
    before, after = (replace(one, stacks=compiling) for one in helped(1.9))
    wait = stands(after, before=before)
    assert (wait.motion, wait.computing) == (Motion.MOVING, ())


@pytest.mark.parametrize(
    "facts",
    [
        {"syscall": "clock_nanosleep", "wakes_at_s": 30.0},
        {"syscall": "poll", "target": "pipe:[8]", "held_by": (100,)},
        {"syscall": "read", "target": "pipe:[8]", "held_by": (100,), "timed": False},
    ],
    ids=["a sleep", "a poll", "a read"],
)
def test_a_thread_that_computes_may_end_the_open_wait_of_its_rank(facts: dict[str, Any]) -> None:
    looks = [
        replace(
            one, process=replace(one.process, tasks=(task(100, **{"timed": True, **facts}), *one.process.tasks[1:]))
        )
        for one in helped(1.9)
        if one.process
    ]
    assert stands(looks[1], before=looks[0]).motion is Motion.MOVING


def test_a_library_thread_that_spins_releases_no_lock() -> None:
    before, after = helped(1.9, "cuda-EvtHandlr")
    wait = stands(after, before=before)
    assert (wait.motion, wait.kind, wait.is_closed) == (Motion.WAITING, WaitKind.LOCK, True)


def test_a_rank_that_compiles_is_told_from_one_that_loops() -> None:
    compiler = frame(700, file=f"{SITE}/torch/_inductor/compile_fx.py", function="compile_fx_inner")
    looks = [
        rank_snapshot(0, frame(1, file=f"{SITE}/sympy/core.py"), compiler, process=process(cpu_s=s)) for s in (1.0, 3.0)
    ]
    assert stands(looks[1], before=looks[0]).kind is WaitKind.COMPILE


# Semaphores of several processes.

SEMAPHORE = "/dev/shm/sem.mp-1 (deleted)"
FETCHING, IDLE = (frame(31), FETCH, WORKER), (INDICES, WORKER)


def slots(*held_by: int, others: tuple[Process, ...] = (), lines: Any = None, **changes: Any) -> Wait:
    """A worker, 300, waits for a semaphore that these processes have in their memory too."""
    worker = child(300, target=SEMAPHORE, held_by=held_by, **changes)
    return stands(rank("poll", worker, *others, line=LOADER, lines={300: FETCHING, **(lines or {})}))


def test_a_semaphore_that_only_those_who_wait_for_it_share_never_comes() -> None:
    wait = slots(100)
    assert (wait.kind, wait.is_closed) == (WaitKind.LOADER, True)
    assert wait.child is not None
    assert (wait.child.kind, wait.child.target) == (WaitKind.LOCK, SEMAPHORE)
    assert slots().is_closed is True, "nobody else has it at all"


def test_a_worker_without_orders_gives_no_semaphore_back_and_one_at_work_may() -> None:
    idle = child(301, "poll", timed=True)
    assert slots(100, 301, others=(idle,), lines={301: IDLE}).is_closed is True
    reading = child(301, "read", target="/data")
    worker = slots(100, 301, others=(reading,), lines={301: FETCHING}).child
    assert worker is not None
    assert (worker.pid, worker.is_closed) == (300, False)


@pytest.mark.parametrize("changes", [{"held_by": (999,)}, {"held_by": None}, {"timed": True}])
def test_a_semaphore_that_a_stranger_shares_or_that_is_waited_for_with_a_limit_is_open(changes: dict[str, Any]) -> None:
    worker = child(300, **{"target": SEMAPHORE, "held_by": (100,), **changes})
    assert stands(rank("poll", worker, line=LOADER, lines={300: FETCHING})).is_closed is False


def test_a_semaphore_is_waited_for_while_a_process_below_computes() -> None:
    worker = child(301, "futex", cpu_s=9.0)
    now = rank("futex", worker, target=SEMAPHORE, held_by=(301,), timed=False)
    before = rank("futex", child(301, "futex"), target=SEMAPHORE, held_by=(301,), timed=False)
    wait = stands(now, before=before)
    assert (wait.motion, [one.pid for one in wait.computing]) == (Motion.BURNING, [301])


def test_of_so_many_sharers_that_not_all_are_named_none_is_left_out() -> None:
    worker = child(300, target=SEMAPHORE, held_by=(100,) * 16)
    assert stands(rank("poll", worker, line=LOADER, lines={300: FETCHING})).is_closed is False
