"""Who left, who was late, and in which step a rank is: what tells a call that was left out from one not yet made."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    USER,
    Diagnosis,
    board,
    call,
    case,
    diagnose,
    ended,
    evidence,
    frame,
    mark,
    raised,
    rank_evidence,
    sample,
    stack,
)

from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.diagnosis.context import step_in_progress
from nsa_harness.core.diagnosis.rules import failures
from nsa_harness.core.evidence.evidence import Call, Evidence, RankEvidence, StatusFile
from nsa_harness.core.evidence.exit_messages import timeout_s
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import judge

STEPS = ((1, 1.0), (2, 2.0))
SYNC = Place(file=USER, line=45, function="main")
CLOSED = "Connection closed by peer [127.0.0.1]:4502"
TIMED_OUT = "Timed out waiting 12000ms for recv operation to complete"


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def inside(number: int, op: str, **changes: Any) -> Call:
    return call(number, op, **{"place": SYNC, "step": 3, "position": 7, "entered_s": 3.0, "left_s": None, **changes})


def lost(rank: int, message: str, op: str = "all_reduce", **changes: Any) -> RankEvidence:
    """A rank that stood in a collective of step 3 until its peer or its patience was gone."""
    board_of = board(mark("backward", step=3, position=7), steps_s=STEPS, calls=(inside(1, op, left_s=9.0),))
    facts = {"exit": ended(rank, 1, at_s=9.5), "exception": raised(rank, message=message), "status_file": board_of}
    return rank_evidence(rank, **{**facts, **changes})


# A rank that left.


def leaver(*calls: Call, **changes: Any) -> RankEvidence:
    """It went through a forward pass more than usual, took down its group and ended with 0."""
    destroyed = call(1 + len(calls), "destroy_process_group", step=3, position=8, entered_s=3.1, left_s=3.2)
    facts: dict[str, Any] = {"steps_s": STEPS, "calls": (*calls, destroyed), "exit_s": 3.5, "rank": 2}
    return rank_evidence(
        2, exit=ended(2, at_s=9.0), status_file=board(mark(step=3, position=8), **{**facts, **changes})
    )


def test_a_rank_that_ended_within_a_step_left_and_did_not_leave_a_call_out() -> None:
    seen = evidence(lost(0, CLOSED), lost(1, CLOSED), leaver())
    found = diagnosed(seen)
    assert (found.cause, found.findings[0].ranks) == ("early_exit", (2,))


@pytest.mark.parametrize(
    "left",
    [
        leaver(inside(1, "broadcast", position=8, left_s=3.05)),  # it went on to another collective
        leaver(steps_s=(*STEPS, (3, 3.0))),  # it did that step
        leaver(steps_s=()),  # it counts no steps, and the call may be the last of its program
    ],
    ids=["called on", "did the step", "no steps"],
)
def test_a_rank_that_went_on_without_the_call_left_it_out(left: RankEvidence) -> None:
    seen = evidence(lost(0, CLOSED), lost(1, CLOSED), left)
    assert diagnosed(seen).cause in ("rank_conditional_collective", "collective_order_mismatch")


@pytest.mark.parametrize(("beat_s", "at_line"), [(3.05, 37), (3.3, 33)])
def test_a_rank_that_left_is_placed_at_what_it_did_last(beat_s: float, at_line: int) -> None:
    left = leaver(heartbeat_frame=frame(33, function="fit"), beat_s=beat_s)
    found = diagnosed(evidence(lost(0, CLOSED), lost(1, CLOSED), left)).findings[0]
    assert (found.code, found.place.line if found.place else None) == ("early_exit", at_line)


@pytest.mark.parametrize(("destroyed_s", "cause"), [(4.0, "early_exit"), (None, "unknown")])
def test_a_rank_is_gone_when_it_takes_down_its_groups_and_not_only_when_its_process_ends(
    destroyed_s: float | None, cause: str
) -> None:
    calls = () if destroyed_s is None else (call(1, "destroy_process_group", entered_s=destroyed_s),)
    gone = rank_evidence(1, status_file=board(calls=calls, rank=1), exit=ended(1, 0, at_s=8.0))
    failed = raised(0, message=CLOSED, at_s=4.2)
    assert diagnosed(evidence(rank_evidence(0, exit=ended(0, 1), exception=failed), gone)).cause == cause


# A rank that was late.


def late(*calls: Call, **changes: Any) -> RankEvidence:
    """Rank 0 evaluates its model meanwhile, which makes marks, until torchrun ends it."""
    seen = frame(20, function="evaluate")
    facts: dict[str, Any] = {"steps_s": STEPS, "calls": calls, "heartbeat_frame": seen, "beat_s": 9.4}
    made = board(mark(step=4, position=60, at_s=9.0), **{**facts, **changes})
    return rank_evidence(0, exit=ended(0, -signal.SIGTERM, at_s=9.9), status_file=made)


def waited(rank: RankEvidence, message: str = TIMED_OUT) -> Evidence:
    return evidence(rank, *(lost(number, message, "barrier") for number in (1, 2)))


def test_a_rank_that_was_at_work_when_the_others_gave_up_waiting_came_too_late() -> None:
    found = diagnosed(waited(late()))
    (main,) = found.findings
    assert (main.code, main.ranks, main.confidence) == ("slow", (0,), 0.75)
    assert main.place is not None
    assert (main.place.file, main.place.line, main.place.function) == (USER, 20, "evaluate")
    assert (main.facts["op"], main.facts["line"]["line"], main.facts["waiting"]) == ("barrier", 45, [1, 2])
    assert (main.facts["timeout_s"], main.facts["was_busy"]) == (12.0, True)
    assert found.culprit is not None
    assert found.culprit.step == 3


def test_a_late_rank_that_made_no_mark_since_may_stand() -> None:
    still = late()
    assert still.status_file is not None
    stood = replace(still, status_file=replace(still.status_file, events=(mark(step=4, position=60, at_s=2.5),)))
    assert diagnosed(waited(stood)).findings[0].confidence == 0.6
    assert diagnosed(waited(stood)).findings[0].facts["was_busy"] is False


@pytest.mark.parametrize(("at_s", "of_rank", "busy"), [(4.0, 0, True), (2.0, 0, False), (4.0, 1, False)])
def test_a_late_rank_that_samples_show_at_work_was_busy(at_s: float, of_rank: int, *, busy: bool) -> None:
    still = late()
    assert still.status_file is not None
    stood = replace(still, status_file=replace(still.status_file, events=(mark(step=4, position=60, at_s=2.5),)))
    seen = replace(waited(stood), samples=(replace(sample(of_rank), at_s=at_s),))
    assert diagnosed(seen).findings[0].facts["was_busy"] is busy


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        (TIMED_OUT, 12.0),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, Timeout(ms)=600000) ran",
            600.0,
        ),
        ("Ranks 2 failed to pass monitoredBarrier in 5000 ms", 5.0),
        ("Socket Timeout: timed out after 300000ms", 300.0),
        ("Timed out waiting for a peer", None),
    ],
)
def test_the_timeout_of_the_group_is_read_from_the_messages_of_torch(message: str, seconds: float | None) -> None:
    assert timeout_s(message) == seconds


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (late(call(1, "broadcast", step=4, entered_s=3.5, left_s=3.6)), TIMED_OUT),
        (late(enqueued=9, completed=8), TIMED_OUT),
        (replace(late(), exit=ended(0, 1, at_s=9.9)), TIMED_OUT),
        (late(), CLOSED),
    ],
    ids=["went on to another call", "stands in one below Python", "ended by itself", "no limit ran out"],
)
def test_a_rank_that_went_on_or_ended_itself_was_not_late(rank: RankEvidence, message: str) -> None:
    assert failures.came_too_late(case(waited(rank, message))) is None


def test_that_a_rank_may_not_have_come_to_the_call_yet_leaves_no_certainty() -> None:
    found = diagnosed(waited(late(), CLOSED)).findings[0]
    assert (found.code, found.ranks) == ("rank_conditional_collective", (0,))
    assert found.confidence < CERTAIN


# The step that a rank is in.


def between(**changes: Any) -> RankEvidence:
    facts: dict[str, Any] = {"steps_s": STEPS, "optimizer_chain": (frame(46, function="fit"),)}
    board_of: StatusFile = board(mark("step", step=2, at_s=2.0), **facts)
    return rank_evidence(0, **{"status_file": board_of, "exit": ended(0, -6, at_s=3.0), **changes})


@pytest.mark.parametrize(("at_line", "step"), [(41, 3), (50, 2)])
def test_a_rank_that_died_in_c_is_in_the_step_whose_lines_its_last_stack_shows(at_line: int, step: int) -> None:
    died = between(death_stacks=(stack(frame(31, function="release"), frame(at_line, function="fit")),))
    assert step_in_progress(case(evidence(died)), died) == step


def test_a_method_is_the_same_function_whether_its_class_is_told_or_not() -> None:
    died = between(death_stacks=(stack(frame(41, function="Trainer.fit")),))
    assert step_in_progress(case(evidence(died)), died) == 3
