"""What is said of a job that was only looked at: MOVING or SUSPECT, never PASS."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    C10D,
    board,
    diagnose,
    evidence,
    frame,
    mark,
    process,
    rank_evidence,
    rank_snapshot,
    sample,
    task,
    twice,
)
from builders import ended as exited

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import ChildSample, Ending, Retraction
from nsa_harness.core.outcome.outcome import ending_text, rank_statuses
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import judge, moving_ranks, observation_sentence, ranks_with_progress

C10D_BARRIER = frame(5356, file=C10D, function="barrier")


def seen(*samples, ranks=2, **changes):
    looks = twice(*(rank_snapshot(rank, frame()) for rank in range(ranks)))
    everyone = [rank_evidence(rank) for rank in range(ranks)]
    return evidence(*everyone, ending=Ending.DETACHED, snapshots=looks, samples=samples, is_observed=True, **changes)


def test_one_moved_look_may_be_a_heartbeat_and_two_are_motion():
    assert moving_ranks([sample(0, "moving"), sample(0, "waiting")]) == ()
    assert moving_ranks([sample(0, "moving"), sample(1, "waiting"), sample(0, "moving")]) == (0,)


@pytest.mark.parametrize(("lines", "moves"), [(2, ()), (3, (0,))])
def test_a_rank_that_computes_moves_if_it_does_so_on_more_lines_than_a_loop_has(lines, moves):
    assert moving_ranks([sample(0, "burning", leaf=frame(10 + n % lines)) for n in range(9)]) == moves


@pytest.mark.parametrize(("lines", "moves"), [(2, ()), (3, (0,))])
def test_a_rank_moves_where_a_child_that_it_waits_for_computes_on_more_lines_than_a_loop_has(lines, moves):
    looks = []
    for number in range(9):
        below = (ChildSample(pid=pid, leaf=frame(pid + number % lines), user_frame=None) for pid in (300, 400))
        looks.append(replace(sample(0, "burning", leaf=frame(10)), child_samples=tuple(below)))
    assert moving_ranks(looks) == moves


def test_a_mark_since_the_first_look_is_motion():
    marked = rank_snapshot(1, frame(), status_file=board(mark(at_s=15.0)))
    still = rank_snapshot(0, frame(), status_file=board(mark(at_s=9.0)))
    found = evidence(ending=Ending.DETACHED, snapshots=twice(still, marked), samples=(sample(0, "unseen"),))

    assert ranks_with_progress(found) == [1]


def test_what_has_no_probe_is_said():
    assert observation_sentence(seen(sample(0, "waiting"), sample(1, "burning"))) == (
        "SUSPECT: nothing moves, and it is not proven that nothing can: rank 0 waiting, rank 1 burning;"
        " ranks 0, 1 have no probe, so no step, module or collective of theirs is known"
    )
    assert observation_sentence(seen(sample(1, "moving"), sample(1, "moving"))).startswith(
        "MOVING: rank 1 moves; ranks 0, 1 have"
    )


def test_where_no_rank_could_be_looked_at_nothing_moves():
    assert observation_sentence(evidence(ending=Ending.DETACHED, snapshots=(), samples=())) == (
        "SUSPECT: no rank could be looked at"
    )


@pytest.mark.parametrize(("motion", "cause"), [("moving", Cause.STILL_RUNNING), ("waiting", "suspected")])
def test_a_job_that_was_only_looked_at_is_no_pass_and_no_failure(motion, cause):
    found = seen(sample(0, motion), sample(0, motion))
    judgement = judge(found)

    assert judgement.status is Status.ERROR
    assert diagnose(found, judgement).cause == cause


def test_a_proof_that_was_taken_back_is_a_finding_of_the_run_that_passed():
    back = Retraction(at_s=11.0, kind="starved", reason="an open wait of 7 s", no_progress_s=18.2)
    found = evidence(rank_evidence(0, pid=process().pid), retractions=(back, back))
    judgement = judge(found)
    (finding,) = diagnose(found, judgement).findings

    assert (judgement.status, finding.code) == (Status.PASS, "retracted_hang")
    assert (finding.facts["kind"], finding.facts["reason"]) == ("starved", "an open wait of 7 s")
    assert [finding.facts[name] for name in ("proven_at_s", "no_progress_s", "times")] == [11.0, 18.2, 2]


def test_where_the_ranks_of_a_job_stand_is_told_though_nothing_is_proven():
    stands = [
        rank_snapshot(rank, C10D_BARRIER, frame(), process=process(100 + rank, tasks=(task(100 + rank, idle_s=40.0),)))
        for rank in (0, 1)
    ]
    everyone = [rank_evidence(rank) for rank in (0, 1)]
    found = evidence(
        *everyone, ending=Ending.DETACHED, snapshots=twice(*stands), samples=(), is_observed=True, is_attached=True
    )

    def rows(of):
        return [(row.blocked_in, row.waits_for, row.no_progress_s) for row in rank_statuses(of, judge(of), None)]

    assert rows(found) == [("barrier", "rank 1", 40.0), ("barrier", "rank 0", 40.0)]
    assert rows(replace(found, is_attached=False)) == [("barrier", "rank 1", None), ("barrier", "rank 0", None)]
    moved = (replace(found.snapshots[0], ranks=()), found.snapshots[1])
    assert rows(replace(found, snapshots=moved))[0] == ("moving in step", "", 40.0)
    left = (replace(everyone[0], exit=exited(0, 3)), everyone[1])
    assert rows(replace(found, ranks=left, exits=(exited(0, 3),)))[0][0].startswith("ended with exit code 3")
    assert rows(replace(found, ending=Ending.INTERRUPTED))[0] == ("nothing recorded", "", 40.0)


def test_a_job_that_was_found_runs_on_and_nothing_is_said_of_its_processes():
    found = seen(sample(0, "waiting"), is_attached=True, teardown_s=None)
    assert ending_text(found) == "not by us: it runs on"
    assert ending_text(replace(found, ending=Ending.STALL)) == "not by us: it runs on"
    assert ending_text(replace(found, ending=Ending.STALL, is_attached=False)) == "not by us"
