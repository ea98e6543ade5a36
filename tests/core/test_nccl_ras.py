"""The answers of NCCL's RAS service. None was recorded by this project, which has no GPUs.

STRAGGLER (the example for RAS) and JSON (the user guide) are excerpts that NCCL's documentation publishes. The other
answers are these with other numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import SITE, board, diagnose, frame, process, rank_snapshot, sample, snapshot, stalled
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.evidence.host import LaunchCount, NcclCommunicator
from nsa_harness.core.evidence.nccl_ras import parse_ras, with_launch_counts
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import judge

STRAGGLER = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks   Status  Errors
    #  in group   per comm  per node  per comm  in group
    0         1          2         4         8         8  RUNNING  MISMATCH

Errors
======


Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1

"""
HANDSHAKE = "SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\n"
JSON = """\
{
  "nccl_version": "2.29.1",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0xae94423cfbb2ef4a",
      "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
      "size": 2,
      "ranks_count": 1,
      "missing_ranks_count": 1,
      "ranks": [
        {
          "rank": 0,
          "host": "172.16.64.245",
          "pid": 1524344,
          "cuda_dev": 0,
          "nvml_dev": 0,
          "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          },
          "collective_counts": {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0}
        }
      ],
      "missing_ranks": [
        {
          "rank": 1,
          "host": "172.16.64.245",
          "pid": 1524345,
          "cuda_dev": 1,
          "nvml_dev": 1,
          "status": {"unresponsive": true, "considered_dead": false}
        }
      ]
    }
  ],
  "ras": {"collection_time_sec": 0.000, "timeouts_count": 0}
}
"""


def launch(count: int, *ranks: int, operation: str = "AllReduce") -> LaunchCount:
    return LaunchCount(operation=operation, count=count, ranks=ranks)


def test_the_text_names_the_rank_behind_and_leaves_those_ahead_to_be_counted() -> None:
    (found,) = parse_ras(HANDSHAKE + STRAGGLER, {1650386: 7})
    assert found == NcclCommunicator(
        name="78db921d1c117b4a",
        size=8,
        job_ranks={7: 7},  # the ranks of the other node are unknown here
        missing=(),
        launched=(launch(60, 7), launch(64, *range(7))),
    )


def test_in_a_job_of_one_node_every_rank_of_the_text_is_known() -> None:
    pids = {1650379 + rank: rank for rank in range(8)}
    (found,) = parse_ras(STRAGGLER, pids)
    assert found.job_ranks == {rank: rank for rank in range(8)}


@pytest.mark.parametrize("pids", [{}, {1650387: 7}, {71: 0, 72: 1}])
def test_the_answer_of_another_job_on_the_same_port_is_not_of_this_run(pids: dict[int, int]) -> None:
    assert parse_ras(STRAGGLER, pids) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  7 ranks", "  6 ranks"),  # one rank has a count that the answer does not tell
        ("  7 ranks have launched up to operation 64\n", ""),
        ("  7 ranks have", "  3 ranks have launched up to operation 65\n  4 ranks have"),
        ("RUNNING", "FINALIZE"),
        ("AllReduce", "SendRecv"),  # ranks may send and receive differently often
        ("  Communicator", "  Communicator ranks have different status\n  Communicator"),
        ("Warnings", "#0-0 (78db921d1c117b4a) INCOMPLETE\n  The missing rank: 3\n\nWarnings"),
    ],
)
def test_counts_that_are_not_known_for_every_rank_are_not_used(old: str, new: str) -> None:
    (found,) = parse_ras(STRAGGLER.replace(old, new, 1), {1650386: 7})
    assert found.launched == ()


def test_the_json_names_the_rank_that_does_not_answer() -> None:
    (found,) = parse_ras("SERVER PROTOCOL 2\nOK\nOK\n" + JSON, {1524344: 0, 1524345: 1})
    assert found == NcclCommunicator(name="ae94423cfbb2ef4a", size=2, job_ranks={0: 0, 1: 1}, missing=(1,), launched=())


def document(counts: dict[int, dict[str, int]], *, first: int = 0, hash: str = "0xabc", **status: Any) -> str:
    """The JSON with these ranks and their counts; rank r is process 100 + `first` + r on one host."""
    whole = json.loads(JSON)
    (communicator,) = whole["communicators"]
    (rank,) = communicator["ranks"]
    communicator |= {"hash": hash, "size": len(counts), "missing_ranks": []}
    communicator["ranks"] = [
        rank
        | {"rank": number, "pid": 100 + first + number, "collective_counts": count}
        | {"status": rank["status"] | status}
        for number, count in counts.items()
    ]
    return json.dumps(whole, indent=1)


def test_the_json_of_a_part_of_the_job_is_told_by_its_processes() -> None:
    answer = document({0: {"AllGather": 9, "SendRecv": 4}, 1: {"AllGather": 8, "SendRecv": 7}}, first=2)
    (found,) = parse_ras(answer, {100 + rank: rank for rank in range(4)})
    assert found.job_ranks == {0: 2, 1: 3}
    assert found.launched == (launch(8, 1, operation="AllGather"), launch(9, 0, operation="AllGather"))
    (ending,) = parse_ras(document({0: {"AllGather": 9}, 1: {"AllGather": 8}}, finalize_called=True), {100: 0, 101: 1})
    assert ending.launched == ()


@given(st.sampled_from([HANDSHAKE + STRAGGLER, JSON]), st.data())
def test_a_torn_answer_is_refused_or_tells_nothing_else(answer: str, data: st.DataObject) -> None:
    torn = answer[: data.draw(st.integers(0, len(answer)))] + data.draw(st.text(max_size=20))
    whole = parse_ras(answer, {1650386: 7, 1524344: 0})
    try:
        found = parse_ras(torn, {1650386: 7, 1524344: 0})
    except ValueError:
        return
    assert all(one in whole or one.launched == () for one in found)


@given(st.text())
def test_any_text_is_refused_or_read(text: str) -> None:
    for answer in (text, "{" + text, STRAGGLER + text, STRAGGLER.replace("64", text)):
        try:
            parse_ras(answer, {1650386: 7})
        except ValueError:
            continue


# A hang without a flight recorder, as `attach` finds it: three ranks wait for their GPUs, and one computes.

SYNCHRONIZE = frame(1000, file=f"{SITE}/torch/cuda/__init__.py", function="synchronize")
COUNTS = {rank: {"AllReduce": 64 - 4 * (rank == 3)} for rank in range(4)}
PIDS = {100 + rank: rank for rank in range(4)}


def hang(answers: tuple[str, str], **changes: Any) -> Evidence:
    """The evidence of four ranks; each answer of the service belongs to one snapshot."""
    lines = [(SYNCHRONIZE, frame(20))] * 3 + [(frame(30, function="load"),)]
    looks = []
    known: tuple[NcclCommunicator, ...] = ()
    for number, answer in enumerate(answers):
        ranks = [
            rank_snapshot(rank, *lines[rank], process=process(100 + rank, cpu_s=5.0 + 20 * number), **changes)
            for rank in range(4)
        ]
        before, known = known, parse_ras(answer, PIDS)
        looks.append(snapshot(number + 1, 380.0 + 20 * number, *with_launch_counts(ranks, before, known, 1)))
    samples = tuple(
        replace(sample(rank, leaf=lines[rank][0], user=lines[rank][-1]), at_s=float(at_s))
        for at_s in range(12, 400, 4)
        for rank in range(4)
    )
    seen = stalled(*looks[-1].ranks, backend="nccl")
    return replace(seen, snapshots=tuple(looks), samples=samples, ended_s=400.0)


def culprits(seen: Evidence) -> tuple[int, ...]:
    judgement = judge(seen)
    assert judgement.status is Status.HANG
    culprit = diagnose(seen, judgement).culprit
    return culprit.ranks if culprit else ()


def test_the_rank_that_has_launched_fewer_collectives_is_the_one_that_the_others_wait_for() -> None:
    assert culprits(hang((document(COUNTS),) * 2)) == (3,)


def test_without_counts_the_ranks_that_wait_for_their_gpus_look_like_the_ones_that_compute() -> None:
    nothing = document({rank: {"AllReduce": 60} for rank in range(4)})
    assert culprits(hang((nothing, nothing))) == (0, 1, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # The job goes on: NCCL read the counts at different times.
        ({rank: {"AllReduce": 63 - 4 * (rank == 3)} for rank in range(4)}, COUNTS),
        ({rank: {"AllReduce": 64} for rank in range(4)}, COUNTS),
        # Two operations differ, so it is unknown which of them the ranks are in.
        *[({rank: {"AllReduce": 64 + (rank == 3), "AllGather": 3 - (rank == 3)} for rank in range(4)},) * 2],
        # The root of a broadcast may be done without the others.
        *[({rank: {"Broadcast": 64 - (rank == 3)} for rank in range(4)},) * 2],
        *[({rank: COUNTS[rank] for rank in range(3)},) * 2],  # nothing is known of rank 3
    ],
)
def test_a_difference_that_proves_nothing_is_no_wait(
    first: dict[int, dict[str, int]], second: dict[int, dict[str, int]]
) -> None:
    assert culprits(hang((document(first), document(second)))) == (0, 1, 2)


def test_a_rank_with_a_record_of_its_own_keeps_it() -> None:
    (communicator,) = parse_ras(document({0: {"AllReduce": 4}, 1: {"AllReduce": 3}}), {100: 0, 101: 1})
    known = (communicator,)
    for ranks in ((rank_snapshot(0, status_file=board()), rank_snapshot(1)), (rank_snapshot(0), rank_snapshot(2))):
        assert with_launch_counts(ranks, known, known, 1) == ranks
    ahead, behind = with_launch_counts((rank_snapshot(0), rank_snapshot(1)), known, known, 1)
    assert [(one.group, one.op, one.seq, one.retired) for one in (*ahead.collectives, *behind.collectives)] == [
        ("abc", "all_reduce", 4, False),
        ("abc", "all_reduce", 3, True),
    ]
