"""What failed first, and where: behind an exception, before a signal, in a thread or child that died."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    ALL_REDUCE,
    C10D,
    SITE,
    USER,
    Diagnosis,
    board,
    call,
    diagnose,
    ended,
    evidence,
    frame,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    stack,
    stalled,
    task,
)

from nsa_harness.core.evidence.evidence import (
    EarlierError,
    Ending,
    Evidence,
    Frame,
    RaisedException,
    RankEvidence,
    Source,
)
from nsa_harness.core.evidence.exit_messages import (
    closing_signals,
    earliest_program_error,
    last_traceback,
    read_background_failures,
    with_passed_on_errors,
)
from nsa_harness.core.evidence.health_samples import PrintedMessage
from nsa_harness.core.evidence.host import SentSignal
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import judge

LOADER = frame(710, file=f"{SITE}/torch/utils/data/dataloader.py", function="__next__")
WORKER = f"{SITE}/torch/utils/data/_utils/worker.py"
IN_A_WORKER = f"""Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "{WORKER}", line 349, in _worker_loop
    data = fetcher.fetch(index)  # type: ignore[union-attr]
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/ada/data.py", line 12, in __getitem__
    return self.labels[name]
           ~~~~~~~~~~~^^^^^^
KeyError: 'img22'
"""
POOL = (
    '\n"""\nTraceback (most recent call last):\n'
    '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125, in worker\n'
    "    result = (True, func(*args, **kwds))\n"
    '  File "/home/ada/data.py", line 40, in tokenize\n'
    "    return table[word]\n"
    "ValueError: no such word\n"
    '"""'
)


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def failed(
    rank: int, error: RaisedException | None = None, status: int = 1, at_s: float = 9.0, **changes: Any
) -> RankEvidence:
    return rank_evidence(rank, exception=error, exit=ended(rank, status, at_s=at_s), **changes)


def terminated(rank: int, **changes: Any) -> RankEvidence:
    return failed(rank, status=-15, at_s=10.0, **changes)


def place(line: int, function: str = "step", file: str = USER) -> Place:
    return Place(file=file, line=line, function=function)


# Behind the exception that ended a rank.


def test_a_workers_exception_is_told_with_the_workers_own_line_and_then_where_the_rank_met_it() -> None:
    error = with_passed_on_errors(raised(1, "KeyError", IN_A_WORKER, frames=(LOADER, frame(50))))
    found = diagnosed(evidence(rank_evidence(0), failed(1, error))).findings[0]
    assert (found.code, found.place) == ("exception", place(12, "__getitem__", "/home/ada/data.py"))
    assert (found.facts["error"], found.facts["came_out"]["line"]["line"]) == ("KeyError: 'img22'", 50)
    assert found.facts["came_out"]["error"] == "KeyError: Caught KeyError in DataLoader worker process 0."


def test_without_a_probe_the_printed_traceback_of_the_worker_is_the_last_one() -> None:
    log = (
        f'Traceback (most recent call last):\n  File "{USER}", line 50, in step\n    next(it)\nKeyError: {IN_A_WORKER}'
    )
    kind, message, frames = last_traceback(log) or ("", "", ())
    assert (kind, message, frames[0]) == (
        "KeyError",
        "'img22'",
        frame(12, file="/home/ada/data.py", function="__getitem__"),
    )


def test_a_pools_exception_carries_its_workers_traceback_as_its_cause() -> None:
    remote = EarlierError(type="multiprocessing.pool.RemoteTraceback", message=POOL, frames=())
    error = with_passed_on_errors(
        raised(0, "ValueError", "no such word", frames=(frame(774, file=LOADER.file), frame(9)), chain=(remote,))
    )
    assert earliest_program_error(error).frames[0] == frame(40, file="/home/ada/data.py", function="tokenize")


def behind(*frames: Frame, explicit: bool = True, message: str = "no such file") -> RaisedException:
    chain = (EarlierError(type="OSError", message=message, frames=frames, explicit=explicit),)
    return raised(1, "RuntimeError", "step 3 failed", frames=(frame(88),), chain=chain)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (behind(frame(17)), 17),
        (behind(frame(17), explicit=False), 88),  # handled, and then something else went wrong
        (behind(LOADER), 88),  # a library's own business
    ],
)
def test_what_an_exception_was_raised_from_is_where_it_began(error: RaisedException, line: int) -> None:
    found = diagnosed(evidence(rank_evidence(0), failed(1, error))).findings[0]
    assert found.place == place(line)


@pytest.mark.parametrize("explicit", [True, False])
def test_an_error_raised_over_a_lost_connection_is_no_first_failure(explicit: bool) -> None:
    lost = replace(
        behind(frame(17), explicit=explicit).chain[0], type="RuntimeError", message="Connection closed by peer"
    )
    victim = replace(raised(0, message="epoch failed"), chain=(lost,))
    first = judge(evidence(failed(0, victim, at_s=8.9), failed(1, status=3, at_s=9.0))).failures[0]
    assert first.rank == 1


def test_a_pipe_of_the_programs_own_that_breaks_is_no_lost_peer() -> None:
    error = raised(1, "BrokenPipeError", "[Errno 32] Broken pipe")
    assert diagnosed(evidence(rank_evidence(0), failed(1, error))).cause == "exception"


# Collectives that time out.


def timed_out(said: str, **of_waiting: Any) -> Evidence:
    """Rank 0 entered an all_reduce and was aborted in it; rank 1 was still at work when it was ended."""
    calls = (call(1), call(2, step=2, entered_s=4.0, left_s=None))
    inside = board(mark(step=2), calls=calls, enqueued=2, completed=1)
    on_its_way = board(
        mark(step=2, at_s=8.0), calls=calls[:1], enqueued=1, completed=1, rank=1, heartbeat_frame=frame(61)
    )
    waiting = failed(0, status_file=inside, error_lines=(said,), **{"status": -6, **of_waiting})
    return evidence(waiting, terminated(1, status_file=on_its_way), launcher=ended(None, 1))


def test_a_rank_that_the_watchdog_of_nccl_aborted_is_not_the_one_that_never_arrived() -> None:
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 9 ms"
    found = diagnosed(timed_out(said))
    assert (found.cause, found.findings[0].ranks, found.findings[0].place) == (
        "slow",
        (1,),
        replace(place(61), module=""),
    )


def test_an_abort_of_the_programs_own_is_its_own() -> None:
    assert diagnosed(timed_out("std::bad_variant_access")).findings[0].ranks == (0,)


BARRIER = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"


@pytest.mark.parametrize(
    ("said", "cause", "ranks"),
    [
        (BARRIER, "slow", (1,)),
        ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms", "slow", (1, 2)),
        ("Timed out waiting 5000ms for recv operation to complete", "slow", (1, 2)),
        ("a barrier of mine", "exception", (0,)),
    ],
)
def test_who_gave_up_waiting_is_not_who_never_came_though_no_call_shows_it(
    said: str, cause: str, ranks: tuple[int, ...]
) -> None:
    seen = evidence(
        failed(0, raised(0, message=said)),
        terminated(1, status_file=board(rank=1, heartbeat_frame=frame(61))),
        terminated(2),
    )
    found = diagnosed(seen).findings[0]
    assert (found.code, found.ranks, found.place and found.place.line) == (cause, ranks, 61 if cause == "slow" else 88)


def test_where_all_gave_up_nobody_is_late() -> None:
    late = "Timed out waiting 5000ms for recv operation to complete"
    seen = evidence(failed(0, raised(0, message=late)), failed(1, raised(1, message=late)))
    assert diagnosed(seen).cause == "unknown"


# Signals.


def sent(pid: int, sender: str) -> SentSignal:
    return SentSignal(pid=pid, rank=pid - 100 if pid else None, signal="SIGTERM", sender=sender, at_s=None)


@pytest.mark.parametrize(
    ("signals", "sender", "ranks"),
    [
        ((), ("", False), (0,)),
        ((sent(100, "torchrun"),), ("torchrun", False), ()),
        ((sent(100, "torchrun"), sent(0, "Slurm (time limit)")), ("Slurm (time limit)", True), ()),
        ((sent(100, "harness"),), ("", False), (0,)),
    ],
)
def test_who_sent_a_signal_is_said_where_it_is_known(
    signals: tuple[SentSignal, ...], sender: tuple[str, bool], ranks: tuple[int, ...]
) -> None:
    found = diagnosed(evidence(terminated(0), terminated(1), signals=signals)).findings[0]
    assert (found.code, found.ranks) == ("killed", ranks)
    assert (found.facts["sender"], found.facts["sent_to_whole_job"]) == sender


def test_what_failed_before_a_launcher_ended_the_others_is_the_cause() -> None:
    seen = evidence(terminated(0), failed(1, raised(1, at_s=9.5)), signals=(sent(100, "torchrun"),))
    assert diagnosed(seen).cause == "exception"


def test_a_handler_that_turns_a_signal_into_an_exit_code_hides_nobody() -> None:
    assert diagnosed(evidence(failed(0, status=143), failed(1, status=3, at_s=9.5))).findings[0].ranks == (1,)
    assert diagnosed(evidence(failed(0, status=143), rank_evidence(1))).cause == "killed"


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("Sending process 71 closing signal SIGTERM", (71, "SIGTERM", "torchrun")),
        ("Terminating process 71 via signal SIGTERM", (71, "SIGTERM", "torch.multiprocessing.spawn")),
        ("[launch.py:319:sigkill_handler] Killing subprocess 71", (71, "SIGTERM", "DeepSpeed's launcher")),
        ("Received 15 death signal, shutting down workers", (0, "SIGTERM", "somebody outside, to torchrun")),
        ("Received 1 death signal, shutting down workers", (0, "SIGHUP", "somebody outside, to torchrun")),
        ("api.SignalException: Process 71 got signal: 15", (0, "SIGTERM", "somebody outside, to torchrun")),
        (
            "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***",
            (0, "SIGTERM", "Slurm (time limit)"),
        ),
        ("slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-22T10:00:00 ***", (0, "SIGTERM", "Slurm")),
        (
            "[rank: 1] Child process with PID 71 terminated with code 1. Forcefully terminating all other processes",
            (0, "SIGTERM", "Lightning's launcher (terminated with code 1)"),
        ),
    ],
)
def test_launchers_and_schedulers_say_what_they_send(line: str, signal: tuple[int, str, str]) -> None:
    assert closing_signals(f"step 3\nReceived 5\n{line}\n") == (signal,)


# Threads and children that died.

DIED = PrintedMessage(kind="child process", name="Process-1", error="KeyError: 7", place=place(12, "load"))
UNNAMED = replace(DIED, name="child process")


def test_the_traceback_of_a_child_comes_before_what_its_parent_raised_for_want_of_it() -> None:
    error = raised(
        1, "EOFError", "", frames=(frame(399, file="/usr/lib/python3.11/multiprocessing/connection.py"), frame(50))
    )
    found = diagnosed(evidence(rank_evidence(0), failed(1, error, background_failures=(DIED,)))).findings[0]
    assert (found.code, found.place) == ("exception", DIED.place)
    before = found.facts["before"]
    assert (before["died"], before["rank"], before["error"]) == ("child process", 1, "KeyError: 7")
    assert (found.facts["line"]["line"], found.facts["beneath"]["line"]) == (50, 399)
    assert "rank 1 raised EOFError (ada/train.py:50)" in found.claim


@pytest.mark.parametrize(
    ("kind", "dead", "line"),
    [
        ("RuntimeError", DIED, 88),
        ("queue.Empty", DIED, 12),
        ("queue.Empty", UNNAMED, 88),  # which may have been caught and printed
        ("subprocess.CalledProcessError", UNNAMED, 12),
    ],
)
def test_only_what_follows_from_a_child_that_died_is_told_after_it(kind: str, dead: PrintedMessage, line: int) -> None:
    found = diagnosed(evidence(rank_evidence(0), failed(1, raised(1, kind), background_failures=(dead,)))).findings[0]
    assert found.place is not None
    assert found.place.line == line


@pytest.mark.parametrize(("dead", "cause"), [(DIED, "thread_died"), (UNNAMED, "lock_cycle")])
def test_a_rank_that_waits_for_a_child_that_died_waits_for_nobody(dead: PrintedMessage, cause: str) -> None:
    seen = stalled(rank_snapshot(0, frame(327, file="/usr/lib/python3.11/threading.py", function="wait"), frame(30)))
    assert seen.ending is Ending.STALL
    found = diagnosed(replace(seen, ranks=(rank_evidence(0, background_failures=(dead,)),)))
    assert (found.cause, found.findings[0].place) == (cause, dead.place if dead is DIED else place(30))


TRACE = 'Traceback (most recent call last):\n  File "/home/ada/train.py", line {}, in load\n    x = y[7]\nKeyError: 7\n'


def test_tracebacks_of_threads_and_children_are_told_from_the_ranks_own() -> None:
    log = f"Exception in thread Thread-1 (produce):\n{TRACE.format(12)}Process Process-1:\n{TRACE.format(13)}"
    log += TRACE.format(14) + TRACE.format(88)
    led = raised(0, chain=(EarlierError(type="KeyError", message="7", frames=(frame(15),)),))
    found = read_background_failures(log + TRACE.format(15), led)
    assert [(one.kind, one.name, one.place and one.place.line) for one in found] == [
        ("thread", "Thread-1 (produce)", 12),
        ("child process", "Process-1", 13),
        ("child process", "child process", 14),
    ]
    last = raised(0, at_s=None, frames=(frame(12),))
    assert read_background_failures(log, last)[0].name == "Thread-1 (produce)", (
        "the last traceback of a rank may be that of a thread"
    )
    assert read_background_failures("".join(f"[rank0]: {line}\n" for line in TRACE.format(3).splitlines()), None) == ()


# A key that nobody set, and a lock that somebody holds.

PUBLISH = Source(
    file=USER,
    first=70,
    text="def publish(store, rank):\n    if rank == 0:\n        store.set('data/path', 'shards')\n"
    "    seen.add(name)\n    store.set(f'ready/{rank}', '1')\n"
    "    if rank == 0:\n        wait(store)\n    elif not name:\n        store.set('name', 'x')",
)


def in_store(key: str, *sources: Source) -> Evidence:
    now = call(1, "wait store.get", left_s=None, key=key, elements=0)
    inner = frame(2000, file=C10D, function="get")
    waits = rank_snapshot(1, inner, frame(40), status_file=board(rank=1, calls=(now,)))
    return stalled(
        rank_snapshot(0, ALL_REDUCE, frame(41), status_file=board(rank=0, calls=(call(1, left_s=None),))),
        waits,
        sources=sources,
    )


@pytest.mark.parametrize(
    ("key", "line", "ranks", "setter", "went_past"),
    [
        ("data/path", 72, (0,), ([0], 72, "if rank == 0"), None),
        ("ready/0", 74, (0,), ([0], 74, None), None),
        ("ready/x", 74, (0,), ([], 74, None), 0),
        ("go", 40, (0,), None, 0),
        ("name", 77, (1,), ([1], 78, "if rank == 0 … else"), None),
    ],
)
def test_a_key_is_told_with_the_line_that_sets_such_a_key(
    key: str, line: int, ranks: tuple[int, ...], setter: tuple[list[int], int, str | None] | None, went_past: int | None
) -> None:
    found = diagnosed(in_store(key, PUBLISH)).findings[0]
    assert (found.code, found.place and found.place.line, found.ranks) == ("store_key_missing", line, ranks)
    written = found.facts["setter"]
    assert (written and (written["ranks"], written["line"]["line"], written["under"])) == setter
    assert found.facts["went_past"] == went_past


def test_of_two_ranks_that_wait_for_keys_the_one_that_should_set_the_other_key_is_explained() -> None:
    inner = frame(2000, file=C10D, function="get")
    keys = {0: "name", 1: "data/path"}  # rank 1 sets `name`, and rank 0 sets `data/path`
    waits = [
        rank_snapshot(
            rank,
            inner,
            frame(40),
            status_file=board(rank=rank, calls=(call(1, "wait store.get", left_s=None, key=key, elements=0),)),
        )
        for rank, key in keys.items()
    ]
    found = diagnosed(stalled(*waits, sources=(PUBLISH,))).findings[0]
    assert (found.code, found.ranks) == ("store_key_missing", (0,))
    assert (found.facts["waiting_rank"], found.facts["key"]) == (1, "data/path")


def test_a_helper_that_sets_a_key_is_told_with_what_turns_its_only_caller_off() -> None:
    calls = Source(
        file=USER,
        first=90,
        text="def score(self, rank, value):\n    if value <= self.best:\n        return\n    publish(self.store, rank)",
    )
    found = diagnosed(in_store("ready/x", PUBLISH, calls)).findings[0]
    assert (found.code, found.place and found.place.line, found.ranks) == ("store_key_missing", 91, (0,))


def test_a_rank_that_gave_up_waiting_for_a_key_is_not_the_one_that_failed_to_set_it() -> None:
    said = "wait timeout after 5000ms, keys: /default_pg/0//data/path"
    error = raised(1, "torch.distributed.DistStoreError", said, frames=(frame(40),))
    found = diagnosed(evidence(rank_evidence(0), failed(1, error), sources=(PUBLISH,))).findings[0]
    assert (found.code, found.ranks, found.place and found.place.line) == ("store_key_missing", (0,), 72)
    unknown = diagnosed(evidence(rank_evidence(0), failed(1, error))).findings[0]
    assert (unknown.ranks, unknown.place and unknown.place.line) == ((1,), 40)


LOCKS = Source(
    file=USER,
    first=20,
    text="def run(self):\n    with self.index:  # first\n        with self.cache:\n            pass",
)
MAIN = Source(
    file=USER,
    first=30,
    text="def main(self):\n    with self.cache:\n        with self.index:  # then\n            pass",
)


@pytest.mark.parametrize(
    ("sources", "holder"),
    [
        ((LOCKS, MAIN), ("Thread-1", 21)),
        ((), None),
        ((MAIN, replace(LOCKS, text=LOCKS.text.replace("index", "table"))), None),
    ],
)
def test_a_lock_is_told_with_the_line_where_the_other_thread_took_it(
    sources: tuple[Source, ...], holder: tuple[str, int] | None
) -> None:
    wait = frame(327, file="/usr/lib/python3.11/threading.py", function="wait")
    worker = stack(wait, frame(22, function="run"), tid=500, thread="Thread-1")
    main = stack(wait, frame(32, function="main"), tid=100)
    found = diagnosed(
        stalled(rank_snapshot(0, stacks=(main, worker), process=process(tasks=(task(100), task(500)))), sources=sources)
    )
    assert (found.cause, found.findings[0].place) == ("lock_cycle", place(32, "main"))
    took = found.findings[0].facts["holder"]
    assert (took and (took["thread"], took["line"]["line"])) == holder


def test_a_lock_taken_twice_by_one_thread_is_told_with_the_first_time() -> None:
    twice = Source(file=USER, first=30, text="def main(self):\n    with lock:\n        lock.acquire()")
    found = diagnosed(stalled(rank_snapshot(0, frame(32, function="main")), sources=(twice,))).findings[0]
    assert (found.facts["holder"]["thread"], found.facts["holder"]["line"]["line"]) == (None, 31)


def test_of_several_threads_that_wait_for_a_lock_the_one_that_took_it_itself_is_told() -> None:
    """The rank waits for both to end; the other one waits behind it."""
    evicts = (
        "def evict(self):\n    with self.lock:\n        pass\ndef pull(self):\n    with self.lock:\n        evict()"
    )
    pushes = "def push(self):\n    with self.lock:\n        pass"
    sources = (Source(file=USER, first=20, text=evicts), Source(file=USER, first=40, text=pushes))
    join = frame(1119, file="/usr/lib/python3.11/threading.py", function="join")
    behind = stack(frame(41, function="push"), tid=500, thread="Thread-1")
    again = stack(frame(21, function="evict"), frame(25, function="pull"), tid=501, thread="Thread-2")
    main = stack(join, frame(98, function="run"), tid=100)
    tasks = tuple(task(tid) for tid in (100, 500, 501))
    rank = rank_snapshot(0, stacks=(behind, again, main), process=process(tasks=tasks))
    found = diagnosed(stalled(rank, sources=sources)).findings[0]
    assert (found.code, found.place) == ("lock_cycle", place(21, "evict"))
    assert (found.facts["holder"]["thread"], found.facts["holder"]["line"]["line"]) == (None, 24)
    unknown = diagnosed(stalled(rank)).findings[0]
    assert unknown.place == place(98, "run"), "which of them holds it is not known"
