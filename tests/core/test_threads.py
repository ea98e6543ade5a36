"""Threads of one process that wait for each other, and loops that sleep: a run for each rule, and one to refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    SITE,
    USER,
    Diagnosis,
    board,
    diagnose,
    evidence,
    frame,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    snapshot,
    stack,
    stalled,
    task,
)

from nsa_harness.core.evidence.evidence import Ending, Evidence, Frame, RaisedException, RankSnapshot, Stack
from nsa_harness.core.evidence.exit_messages import read_background_failures
from nsa_harness.core.evidence.health_samples import PrintedMessage
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import HangKind, Place
from nsa_harness.core.source_code.collection import excerpts
from nsa_harness.core.verdict.verdict import judge

THREADING = "/usr/lib/python3.11/threading.py"
POOL = "/usr/lib/python3.11/multiprocessing/pool.py"
QUEUES = "/usr/lib/python3.11/multiprocessing/queues.py"
JOIN = frame(1132, file=THREADING, function="Thread.join")
WAIT = frame(327, file=THREADING, function="wait")
GET = frame(365, file=QUEUES, function="get")
WORK = frame(114, file=POOL, function="worker")
BEGAN = frame(1045, file=THREADING, function="_bootstrap_inner")


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def line(number: int, function: str = "step") -> Place:
    return Place(file=USER, line=number, function=function)


def threads(*others: Stack, main: tuple[Frame, ...] = (JOIN, frame(40)), **syscalls: Any) -> RankSnapshot:
    """Rank 0, whose main thread joins; every thread in a futex unless it is said otherwise."""
    tasks = (task(100), *(task(one.tid or 0, **syscalls) for one in others))
    return rank_snapshot(0, stacks=(stack(*main, tid=100), *others), process=process(tasks=tasks))


def other(number: int, tid: int = 500) -> Stack:
    return stack(WAIT, frame(number, function="run"), tid=tid, thread="Thread-1")


def printed(**changes: Any) -> RaisedException:
    facts = {"at_s": None, "frames": (frame(17, function="decode"), BEGAN), "proof": "rank0/stderr.log"}
    return raised(0, "KeyError", "4", **{**facts, **changes})


# A thread that died.


DEAD = PrintedMessage(kind="thread", name="Thread-1 (decode)", error="KeyError: 4", place=line(17, "decode"))


def waits_after(*dead: PrintedMessage) -> Evidence:
    seen = stalled(rank_snapshot(0, WAIT, frame(30)))
    exit = seen.launcher and replace(seen.launcher, rank=0)
    return replace(seen, ranks=(rank_evidence(0, exception=printed(), background_failures=dead, exit=exit),))


def test_a_thread_that_printed_its_exception_and_died_explains_the_one_that_waits() -> None:
    found = diagnosed(waits_after(DEAD))
    assert (found.cause, found.findings[0].place) == ("thread_died", line(17, "decode"))
    assert found.findings[0].confidence < 0.9, "it may have been another thread"
    assert found.findings[0].proof[0] == "rank0/stderr.log"


def test_so_it_does_where_nobody_saw_how_the_rank_ended() -> None:
    seen = waits_after(DEAD)
    assert diagnosed(replace(seen, ranks=(replace(seen.ranks[0], exit=None),))).cause == "thread_died"


@pytest.mark.parametrize("dead", [(), (replace(DEAD, name="thread"),)])
def test_what_no_thread_died_of_is_a_lock_as_any(dead: tuple[PrintedMessage, ...]) -> None:
    assert diagnosed(waits_after(*dead)).cause == "lock_cycle"


def test_a_thread_that_died_does_not_say_in_which_step_its_rank_stands() -> None:
    led = (frame(33, function="main"),)
    between = board(mark("step", "SGD", step=4), steps_s=((4, 4.0),), optimizer_chain=tuple(_bare(one) for one in led))
    seen = stalled(rank_snapshot(0, WAIT, frame(30, function="main"), status_file=between))
    died = rank_evidence(
        0,
        exception=printed(),
        background_failures=(DEAD,),
        status_file=between,
        exit=seen.launcher and replace(seen.launcher, rank=0),
    )
    culprit = diagnosed(replace(seen, ranks=(died,))).culprit
    assert culprit is not None
    assert culprit.step == 5


def _bare(one: Frame) -> Frame:
    return replace(one, file=one.file.rpartition("/")[2])


def test_a_thread_is_told_with_the_line_of_its_own_function_that_nobody_guards() -> None:
    """What a helper raised three calls down is told; that the thread dies of it is for its own function to see to."""
    log = (
        "Exception in thread Thread-1 (fill):\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/threading.py", line 982, in run\n    self._target()\n'
        '  File "/home/ada/train.py", line 12, in fill\n    queue.put(load())\n'
        '  File "/home/ada/train.py", line 17, in load\n    x = y[4]\nKeyError: 4\n'
    )
    found = diagnosed(waits_after(*read_background_failures(log, None))).findings[0]
    assert (found.code, found.place) == ("thread_died", line(12, "fill"))
    assert (found.facts["error"], found.facts["raised_at"]["line"]) == ("KeyError: 4", 17)


# A queue whose other end nobody serves any more, and a lock that nobody gives back.

READER = """\
class Reader:
    def start(self):
        self.thread = threading.Thread(target=self.fill)

    def fill(self):
        for row in self.rows:
            try:
                batch = load(row)
            except ValueError:
                return
            self.hand(batch)

    def hand(self, batch):
        self.ready.put(batch)

    def take(self):
        return self.ready.get()

    def write(self, row):
        with self.index:
            self.rows.append(row)

    def drop(self, row):
        self.index.acquire()
        if row is None:
            return
        self.rows.remove(row)
        self.index.release()
"""


def reading(text: str = READER) -> dict[str, Any]:
    return {"sources": tuple(excerpts(USER, text, set(range(1, text.count("\n") + 1))))}


def at(text: str) -> int:
    return next(number for number, one in enumerate(READER.splitlines(), start=1) if text in one)


@pytest.mark.parametrize(
    ("text", "told", "function"),
    [
        (READER, "except ValueError", "fill"),
        (READER.replace("return\n            self.hand", "pass\n            self.hand"), "self.hand(batch)", "fill"),
        (READER.replace("self.ready.put", "self.out.put"), "except ValueError", "fill"),
        (READER.replace("target=self.fill", "target=self.spy"), "self.ready.get()", "take"),
    ],
    ids=["left by a handler", "never left", "under another name", "of no thread"],
)
def test_a_queue_that_nobody_fills_is_told_with_the_function_of_the_thread_that_would(
    text: str, told: str, function: str
) -> None:
    get = frame(171, file="/usr/lib/python3.11/queue.py", function="Queue.get")
    waits = threads(main=(WAIT, get, frame(at("self.ready.get()"), function="take")))
    found = diagnosed(stalled(waits, **reading(text))).findings[0]
    assert (found.code, found.place) == ("lock_cycle", line(at(told), function))
    assert ("in a thread of its own" in found.claim) == (function == "fill")


def filling(number: int, function: str = "Reader.fill") -> Stack:
    get = frame(171, file="/usr/lib/python3.11/queue.py", function="Queue.get")
    return stack(WAIT, get, frame(number, function=function), tid=500, thread="Thread-1")


def waits_for_reader(*others: Stack, dead: tuple[PrintedMessage, ...] = ()) -> Evidence:
    get = frame(171, file="/usr/lib/python3.11/queue.py", function="Queue.get")
    waits = threads(*others, main=(WAIT, get, frame(at("self.ready.get()"), function="take")))
    return replace(stalled(waits, **reading()), ranks=(rank_evidence(0, background_failures=dead),))


def test_a_thread_that_should_fill_the_queue_and_is_alive_is_told_as_alive() -> None:
    found = diagnosed(waits_for_reader(filling(at("for row in")))).findings[0]
    assert (found.code, found.facts["living"]["thread"], found.facts["living"]["call"]) == (
        "lock_cycle",
        "Thread-1",
        "Queue.get",
    )
    assert found.facts["living"]["line"]["line"] == at("for row in")
    assert diagnosed(waits_for_reader(filling(3, "Reader.spy"))).findings[0].facts["living"] is None


def test_a_thread_died_for_a_wait_only_if_no_other_function_serves_it_in_a_living_thread() -> None:
    assert diagnosed(waits_for_reader(filling(at("for row in")), dead=(DEAD,))).cause == "lock_cycle"
    same = replace(DEAD, entry_place=line(at("for row in"), "fill"))
    for seen, thread in (
        (waits_for_reader(filling(at("for row in")), dead=(same,)), "Thread-1"),
        (waits_for_reader(filling(3, "Reader.spy"), dead=(DEAD,)), "Thread-1"),
        (waits_for_reader(dead=(DEAD,)), None),
    ):
        found = diagnosed(seen).findings[0]
        living = found.facts["living"]
        assert (found.code, living and living["thread"]) == ("thread_died", thread)


def test_a_lock_that_all_threads_wait_for_is_told_with_the_way_out_that_keeps_it() -> None:
    takes = [frame(at("with self.index"), function="write"), frame(at("self.index.acquire()"), function="drop")]
    workers = (stack(WAIT, one, tid=500 + each, thread="Thread-1") for each, one in enumerate(takes))
    seen = stalled(threads(*workers), **reading())
    found = diagnosed(seen).findings[0]
    assert (found.code, found.place) == ("lock_cycle", line(at("if row is None") + 1, "drop"))
    given = READER.replace("is None:\n", "is None:\n            self.index.release()\n")
    assert diagnosed(replace(seen, **reading(given))).findings[0].place == line(at("with self.index"), "write")


# A thread that is waited for.


def test_a_lock_that_two_threads_wait_for_in_turn_is_named_with_the_line_of_the_one_that_is_joined() -> None:
    found = diagnosed(stalled(threads(other(20))))
    assert (found.cause, found.findings[0].place) == ("lock_cycle", line(20, "run"))


def test_of_several_threads_none_is_named_in_place_of_the_one_that_waits() -> None:
    found = diagnosed(stalled(threads(other(20), other(60, tid=501))))
    assert (found.cause, found.findings[0].place) == ("lock_cycle", line(40))


def test_a_thread_that_waits_for_no_thread_is_named_with_its_own_line() -> None:
    found = diagnosed(stalled(threads(other(20), main=(WAIT, frame(40)))))
    assert (found.cause, found.findings[0].place) == ("lock_cycle", line(40))


def test_a_joined_thread_that_reads_for_too_long_is_an_open_wait_named_with_its_line() -> None:
    seen = stalled(threads(other(20), syscall="recvfrom"), at_s=400.0)
    found = diagnosed(seen)
    assert (found.cause, found.findings[0].place) == ("blocked_io", line(20, "run"))
    assert (found.findings[0].facts["variant"], found.findings[0].facts["syscall"]) == ("joined thread", "recvfrom")
    assert found.findings[0].confidence < 0.9


# A process pool.


def pool(*workers: tuple[Frame, ...]) -> Evidence:
    """Rank 0 waits for a result of its pool, beside a handler of the pool that polls; these are its workers."""
    main = (WAIT, frame(768, file=POOL, function="ApplyResult.wait"), frame(40))
    seen = threads(stack(frame(500, file=POOL, function="_handle_workers"), tid=500), main=main, timed=True)
    pids = range(200, 200 + len(workers))
    stacks = {pid: (stack(*frames, tid=pid),) for pid, frames in zip(pids, workers, strict=True)}
    children = tuple(process(pid, parent=100, tasks=(task(pid, syscall="read"),)) for pid in pids)
    return stalled(replace(seen, children=children, child_stacks=stacks), at_s=400.0)


def test_a_pool_whose_workers_all_wait_for_work_has_lost_the_task_that_a_rank_waits_for() -> None:
    found = diagnosed(pool((GET, WORK), (GET, WORK)))
    assert (found.cause, found.findings[0].place) == ("pool_worker_lost", line(40))


@pytest.mark.parametrize("workers", [((GET, WORK), (frame(9), WORK)), ((frame(9), WORK),), ()])
def test_a_pool_with_a_worker_at_work_has_lost_nothing(workers: tuple[tuple[Frame, ...], ...]) -> None:
    assert diagnosed(pool(*workers)).cause != "pool_worker_lost"


# A loop that sleeps.


def naps(until_s: float, number: int = 12, *, at_line: int = 10) -> RankSnapshot:
    nap = task(syscall="clock_nanosleep", wakes_at_s=until_s, timed=True)
    return rank_snapshot(0, frame(at_line), process=process(tasks=(nap,), io_bytes=number))


def slept(*looks: RankSnapshot, open_wait_s: float = 6.0) -> Evidence:
    limits = Limits(stall_s=5.0, busy_s=60.0, open_wait_s=open_wait_s, start_s=120.0, deadline_s=600.0)
    shots = tuple(snapshot(number, 20.0 + 2 * number, look) for number, look in enumerate(looks))
    at_s = shots[-1].at_s
    return evidence(rank_evidence(0), ending=Ending.STALL, snapshots=shots, ended_s=at_s, limits=limits)


def test_a_loop_that_sleeps_and_looks_again_for_too_long_is_a_livelock() -> None:
    seen = slept(naps(20.5), naps(22.5), naps(24.5))
    proof = judge(seen).proof
    found = diagnosed(seen)
    assert proof is not None
    assert (proof.kind, found.cause, found.findings[0].place) == (HangKind.LIVELOCK, "livelock", line(10))


@pytest.mark.parametrize(
    "facts", [{"syscall": "poll", "timeout_s": 0.5}, {"wakes_at_s": 20.4}], ids=["a poll", "a timed lock"]
)
def test_so_is_one_that_waits_with_a_time_limit_each_time(facts: dict[str, Any]) -> None:
    look = rank_snapshot(0, frame(10), process=process(tasks=(task(timed=True, **facts),)))
    found = diagnosed(slept(look, look, look, look)).findings[0]
    assert (found.code, found.place) == ("livelock", line(10))


def test_so_is_one_that_says_each_time_that_it_tries_again() -> None:
    assert diagnosed(slept(naps(20.5), naps(22.5, 90), naps(24.5, 180))).cause == "livelock"


def test_one_long_sleep_is_none_and_ends_in_time() -> None:
    assert judge(slept(naps(90.0), naps(90.0), naps(90.0))).proof is None


def test_a_sleep_past_the_deadline_is_no_loop() -> None:
    assert diagnosed(slept(naps(900.0), naps(900.0))).cause == "starved"


def test_before_the_limit_of_open_waits_a_loop_that_sleeps_may_still_find_what_it_looks_for() -> None:
    assert judge(slept(naps(20.5), naps(22.5), naps(24.5), open_wait_s=300.0)).proof is None


def test_a_library_that_sleeps_in_a_loop_is_shown_with_the_line_that_called_it() -> None:
    library = frame(99, file=f"{SITE}/filelock/_api.py", function="acquire")
    look = replace(naps(20.5), stacks=(stack(library, frame(31)),))
    again = replace(naps(22.5), stacks=look.stacks)
    assert diagnosed(slept(look, again)).findings[0].place == line(31)
