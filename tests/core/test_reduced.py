"""Evidence within its bound: a thousand threads, stacks without end, calls without number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    board,
    call,
    evidence,
    frame,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    snapshot,
    stack,
    task,
)

from nsa_harness.core.evidence.evidence import Evidence, RankSnapshot
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.evidence.reduced import LEVELS, MAX_RANK_BYTES, brief, reduced
from nsa_harness.supervisor.store.adapters import json_text
from nsa_harness.supervisor.store.collect import bounded

LONG = "/very/" + "long/" * 60 + "train.py"


def crowded(rank: int) -> RankSnapshot:
    """Every list of a rank as long as its reader lets it be."""
    pid = 100 + rank
    deep = [frame(line, file=LONG, function="f" * 100) for line in range(60)]
    threads = tuple(stack(*deep, tid=pid + 1000 * number, thread="T" * 50) for number in range(256))
    tasks = tuple(task(pid + 1000 * number, target=LONG) for number in range(256))
    facts = {"local": "127.0.0.1:1", "peer": "127.0.0.1:2", "state": "ESTABLISHED"}
    queues = {"unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    sockets = tuple(Socket(inode=number, **facts, **queues) for number in range(64))
    whole = process(pid, tasks=tasks, sockets=sockets, holds=tuple(f"{LONG}{n} r" for n in range(256)))
    children = tuple(replace(whole, pid=pid + number, parent=pid) for number in range(1, 4))
    calls = tuple(call(number, group="g" * 40) for number in range(256))
    return rank_snapshot(
        rank,
        process=whole,
        stacks=threads,
        children=children,
        child_stacks={child.pid: threads[:20] for child in children},
        board=board(mark(tid=pid), calls=calls),
    )


def crowd(ranks: int) -> Evidence:
    looks = tuple(snapshot(number, 10.0 * number, *(crowded(rank) for rank in range(ranks))) for number in (1, 2, 3))
    known = (
        rank_evidence(rank, board=crowded(rank).board, raised=raised(rank, message="x" * 10**5))
        for rank in range(ranks)
    )
    return evidence(*known, snapshots=looks)


def test_a_crowd_of_threads_fits_into_the_bound_and_that_is_said() -> None:
    ranks = 2
    whole = crowd(ranks)
    assert len(json_text(whole)) > 10 * MAX_RANK_BYTES * ranks
    kept, text = bounded(whole)
    assert len(text.encode()) <= MAX_RANK_BYTES * ranks
    assert text == json_text(kept)
    assert [one.what for one in kept.trouble].count("evidence") == 1


def test_evidence_within_its_bound_stays_as_it_is() -> None:
    small = evidence(rank_evidence(0), rank_evidence(1))
    assert bounded(small) == (small, json_text(small))


@pytest.mark.parametrize("keep", LEVELS)
def test_the_thread_that_trains_and_those_that_may_act_go_last(keep: object) -> None:
    training = stack(frame(7), tid=900)
    others = [stack(frame(1), tid=number) for number in range(1000, 1300)]
    tasks = [task(number) for number in range(300)]
    tasks[299] = task(299, syscall="read")
    seen = rank_snapshot(0, stacks=(*others, replace(training, tid=100)), process=process(tasks=(*tasks, task(900))))
    (kept,) = reduced(evidence(rank_evidence(0), snapshots=(snapshot(1, 9.0, seen),)), keep).snapshots[0].ranks
    assert kept.stacks[0].tid == 100
    assert kept.process is not None
    assert {100, 299} <= {one.tid for one in kept.process.tasks}
    assert len(kept.process.tasks) == keep.tasks


def test_a_snapshot_keeps_the_last_calls_and_every_call_that_has_not_returned() -> None:
    calls = (call(1, left_s=None), *(call(number) for number in range(2, 60)))
    (kept,) = brief(snapshot(1, 9.0, rank_snapshot(0, board=board(calls=calls)))).ranks
    assert kept.board is not None
    assert [one.number for one in kept.board.calls] == [1, *range(44, 60)]
