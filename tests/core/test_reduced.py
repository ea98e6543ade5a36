"""Evidence within its bound: a thousand threads, stacks without end, calls without number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    board,
    call,
    collective,
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

from nsa_harness.core.evidence.evidence import EarlierError, Evidence, RankSnapshot
from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.evidence.reduced import (
    HISTORIES,
    LEVELS,
    MAX_RANK_BYTES,
    reduce_evidence,
    with_history,
    without_finished_calls,
)
from nsa_harness.supervisor.storage.adapters import evidence_text, json_text, type_adapter
from nsa_harness.supervisor.storage.collect import reduce_to_limit

LONG = "/very/" + "long/" * 60 + "train.py"
LED = (
    EarlierError(type="OSError", message="x" * 10**5, frames=tuple(frame(line, file=LONG) for line in range(200))),
) * 4


def crowded(rank: int) -> RankSnapshot:
    """Every list of a rank as long as its reader lets it be."""
    pid = 100 + rank
    deep = [frame(line, file=LONG, function="f" * 100) for line in range(60)]
    threads = tuple(stack(*deep, tid=pid + 1000 * number, thread="T" * 50) for number in range(256))
    tasks = tuple(task(pid + 1000 * number, target=LONG) for number in range(256))
    facts = {"local": "127.0.0.1:1", "peer": "127.0.0.1:2", "state": "ESTABLISHED"}
    queues = {"unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    sockets = tuple(Socket(inode=number, **facts, **queues) for number in range(64))
    whole = process(pid, tasks=tasks, sockets=sockets, open_ends=tuple(f"{LONG}{n} r" for n in range(256)))
    children = tuple(replace(whole, pid=pid + number, parent=pid) for number in range(1, 4))
    calls = tuple(call(number, group="g" * 40) for number in range(256))
    return rank_snapshot(
        rank,
        process=whole,
        stacks=threads,
        children=children,
        child_stacks={child.pid: threads[:20] for child in children},
        status_file=board(mark(tid=pid), calls=calls),
    )


def crowd(ranks: int) -> Evidence:
    looks = tuple(snapshot(number, 10.0 * number, *(crowded(rank) for rank in range(ranks))) for number in (1, 2))
    known = (
        rank_evidence(
            rank, status_file=crowded(rank).status_file, exception=raised(rank, message="x" * 10**5, chain=LED)
        )
        for rank in range(ranks)
    )
    return evidence(*known, snapshots=looks)


def test_a_crowd_of_threads_fits_into_the_bound_and_that_is_said() -> None:
    ranks = 2
    whole = crowd(ranks)
    assert len(json_text(whole)) > 10 * MAX_RANK_BYTES * ranks
    kept, text = reduce_to_limit(whole)
    assert len(text.encode()) <= MAX_RANK_BYTES * ranks
    assert text == evidence_text(kept)
    assert [one.what for one in kept.trouble].count("evidence") == 1


def test_evidence_within_its_bound_stays_as_it_is() -> None:
    small = evidence(rank_evidence(0), rank_evidence(1))
    assert reduce_to_limit(small) == (small, evidence_text(small))


@pytest.mark.parametrize("keep", LEVELS)
def test_the_thread_that_trains_and_those_that_may_act_go_last(keep: object) -> None:
    training = stack(frame(7), tid=900)
    others = [stack(frame(1), tid=number) for number in range(1000, 1300)]
    tasks = [task(number) for number in range(300)]
    tasks[299] = task(299, syscall="read")
    seen = rank_snapshot(0, stacks=(*others, replace(training, tid=100)), process=process(tasks=(*tasks, task(900))))
    (kept,) = reduce_evidence(evidence(rank_evidence(0), snapshots=(snapshot(1, 9.0, seen),)), keep).snapshots[0].ranks
    assert kept.stacks[0].tid == 100
    assert kept.process is not None
    assert {100, 299} <= {one.tid for one in kept.process.tasks}
    assert len(kept.process.tasks) == keep.tasks


def test_a_snapshot_keeps_the_last_calls_and_every_call_that_has_not_returned() -> None:
    calls = (call(1, left_s=None), *(call(number) for number in range(2, 60)))
    (kept,) = without_finished_calls(snapshot(1, 9.0, rank_snapshot(0, status_file=board(calls=calls)))).ranks
    assert kept.status_file is not None
    assert [one.number for one in kept.status_file.calls] == [1, *range(44, 60)]


CHAIN = tuple(frame(line, file=f"/home/someone/project/training/part{line}.py") for line in (80, 200, 310, 12))


def trained(calls: int) -> Evidence:
    """Two ranks that made four calls in each of their steps, each of them entered in the recorder."""
    sites = [(op, 4**size) for size, op in enumerate(("all_reduce", "broadcast", "all_gather", "reduce_scatter"), 4)]
    made = tuple(
        call(
            number,
            op=sites[number % 4][0],
            elements=sites[number % 4][1],
            step=1 + (number - 1) // 4,
            position=7 * (number % 4),
            entered_s=10 + number * 0.012345678,
            left_s=10 + number * 0.012345678 + 0.000123456,
            chain=(frame(number % 4, file="/home/someone/project/training/helpers.py"), *CHAIN),
            grad=True,
            tid=100,
        )
        for number in range(1, calls + 1)
    )
    entered = tuple(
        collective(
            one.number,
            op=one.op,
            sizes=((one.elements,),),
            retired=True,
            created_ns=1763820000 * 10**9 + int(one.entered_s * 1e9),
        )
        for one in made
    )
    ranks = (rank_evidence(rank, status_file=board(mark(), calls=made), collectives=entered) for rank in (0, 1))
    return evidence(*ranks)


def test_four_hundred_calls_and_what_the_recorder_has_of_them_fit_with_their_callers() -> None:
    whole = trained(400)
    kept, text = reduce_to_limit(whole)
    assert kept == whole
    assert text.count("helpers.py") <= 2 * 5  # ranks x lines, and the place of a call
    assert len(json_text(whole)) > 4 * MAX_RANK_BYTES
    assert type_adapter(Evidence).validate_json(text) == whole
    assert type_adapter(Evidence).validate_json(json_text(whole)) == whole


def test_of_more_calls_than_fit_whole_steps_are_kept_and_nothing_else_is_reduced() -> None:
    kept, text = reduce_to_limit(trained(4003))
    assert len(text.encode()) <= 2 * MAX_RANK_BYTES
    assert kept.trouble == ()
    for rank in kept.ranks:
        assert rank.status_file is not None
        assert 400 <= len(rank.status_file.calls) <= HISTORIES[0]
        assert [one.number for one in rank.status_file.calls][:1] == [4 * (rank.status_file.calls[0].step - 1) + 1]
        assert rank.status_file.calls[-1].number == 4003
        assert rank.collectives[-1].seq == 4003
        assert {one.number for one in rank.status_file.calls} <= {one.seq for one in rank.collectives}


def test_of_one_step_with_very_many_calls_the_newest_are_kept() -> None:
    only = evidence(rank_evidence(0, status_file=board(calls=tuple(call(number) for number in range(1, 2000)))))
    kept = with_history(only, 96).ranks[0].status_file
    assert kept is not None
    assert [one.number for one in kept.calls] == list(range(1904, 2000))
