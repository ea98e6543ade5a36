"""What the evidence leaves open makes a certain cause a likely one, and the claim says what else is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    C10D,
    IN_LOCK,
    USER,
    board,
    call,
    case,
    collective,
    diagnose,
    ended,
    evidence,
    finding_of,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    sample,
    stack,
    stalled,
    task,
    whole,
)

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.caveats import with_caveat
from nsa_harness.core.diagnosis.confidence import CERTAIN, LIKELY, EvidenceKind
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.evidence.evidence import CaughtException, Evidence, Frame, RankEvidence, RankSnapshot, Source
from nsa_harness.core.report import Finding, Place
from nsa_harness.core.verdict.verdict import judge

LINE = Place(file=USER, line=10, function="step")


def main(seen: Evidence) -> Finding:
    return diagnose(seen, judge(seen)).findings[0]


def said(cause: str, *ranks: int, **changes: Any) -> Explanation:
    """As sure as the row allows."""
    given = {"place": LINE, "evidence": Cause(cause).row.certain_by[0], "ranks": ranks, **changes}
    return Explanation(cause=Cause(cause), **given)


def weighed(seen: Evidence, explanation: Explanation) -> tuple[float, str]:
    one = finding_of(with_caveat(case(seen), explanation))
    return one.confidence, "; ".join(("so it is", *one.left_open))


CROSSED = stalled(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast")))


def test_ranks_that_do_not_go_together_and_are_all_blamed_leave_open_who_is_wrong() -> None:
    open_end = "; this run does not show which of these ranks is wrong"
    assert weighed(CROSSED, said("shape_mismatch", 0, 1)) == (LIKELY, f"so it is{open_end}")
    assert weighed(CROSSED, said("shape_mismatch", 0, 1, left_open=(OpenQuestion(code="all_are_blamed"),))) == (
        LIKELY,
        f"so it is{open_end}",
    )
    assert weighed(CROSSED, said("shape_mismatch", 1)) == (0.95, "so it is")
    assert weighed(CROSSED, said("static_graph_changed", 0, 1)) == (0.95, "so it is"), "no disagreement of ranks"


def test_what_a_rule_held_for_likely_stays_as_it_is() -> None:
    found = said("shape_mismatch", 0, 1, evidence=EvidenceKind.PART)
    assert with_caveat(case(CROSSED), found) is found


def in_a_sleep(rank: int) -> RankSnapshot:
    asleep = process(100 + rank, tasks=(task(100 + rank, syscall="clock_nanosleep", timed=True, wakes_at_s=1e4),))
    return rank_snapshot(rank, frame(70), process=asleep)


def test_a_second_root_that_hangs_by_itself_is_not_explained_by_the_first() -> None:
    found = main(stalled(locked_in_backward(0), in_a_sleep(1)))
    assert (found.code, found.ranks, found.confidence) == ("backward_function_blocked", (0,), LIKELY)
    assert whole(found).endswith("; rank 1 is also blocked, in a sleep in step, which this cause does not explain")
    waits = stalled(locked_in_backward(0), in_all_reduce(1, collective(6)))
    assert main(waits).confidence == 0.95, "a rank that waits for the one to blame is explained"


def test_ranks_that_wait_for_each_other_explain_each_other() -> None:
    assert weighed(CROSSED, said("rank_conditional_collective", 1)) == (0.95, "so it is")


def test_a_rank_of_which_nothing_is_known_may_be_the_one_to_blame() -> None:
    seen = stalled(locked_in_backward(0), in_all_reduce(1, collective(6)))
    unseen = replace(seen, ranks=(*seen.ranks, rank_evidence(2)))
    assert weighed(unseen, said("lock_cycle", 0)) == (LIKELY, "so it is; nothing is known about rank 2")
    assert weighed(unseen, said("lock_cycle", 0, 2)) == (CERTAIN, "so it is")


def failing(rank: int, at_s: float, message: str = "boom", *, type: str = "ValueError", at: int = 88) -> RankEvidence:
    error = raised(rank, type, message, at_s=at_s, frames=(frame(at),))
    return rank_evidence(rank, exception=error, exit=ended(rank, 1, at_s=at_s + 1))


def test_two_ranks_that_fail_of_themselves_at_the_same_time_need_not_follow_from_each_other() -> None:
    found = main(evidence(failing(0, 9.0), failing(1, 9.2, "lost", type="KeyError")))
    assert (found.ranks, found.confidence) == ((0,), LIKELY)
    assert whole(found).endswith("; rank 1 also failed on its own: KeyError: lost")
    assert main(evidence(failing(0, 9.0), failing(1, 19.0, "lost", type="KeyError"))).confidence == 0.95
    lost = failing(1, 9.2, "Connection closed by peer", type="RuntimeError")
    assert main(evidence(failing(0, 9.0), lost)).confidence == 0.95


def test_the_same_exception_in_the_same_line_is_that_of_every_rank_that_raised_it() -> None:
    both = main(evidence(failing(0, 9.0, "row 3"), failing(1, 9.2, "row 7")))
    assert (both.ranks, both.confidence) == ((0, 1), 0.95)
    assert main(evidence(failing(0, 9.0), failing(1, 9.2, at=99))).ranks == (0,)


def test_a_victim_in_the_same_line_raised_nothing_of_its_own() -> None:
    victim = failing(1, 9.2, "Connection closed by peer", type="ValueError")
    assert main(evidence(failing(0, 9.0), victim)).ranks == (0,)


@pytest.mark.parametrize(("innermost", "confidence"), [(frame(3252, file=C10D), LIKELY), (frame(88), 0.95)])
def test_what_a_collective_raised_may_be_about_another_rank(innermost: Frame, confidence: float) -> None:
    error = raised(0, "ValueError", "sizes differ", frames=(innermost, frame(88)))
    assert (
        main(evidence(rank_evidence(0, exception=error, exit=ended(0, 1)), rank_evidence(1))).confidence == confidence
    )


def aborted(**of_board: Any) -> Evidence:
    return evidence(rank_evidence(0, status_file=board(**of_board), exit=ended(0, -6)), rank_evidence(1))


def test_an_abort_inside_a_collective_may_be_about_another_rank() -> None:
    assert (main(aborted()).code, main(aborted()).confidence) == ("aborted", 0.9)
    assert main(aborted(calls=(call(left_s=None),))).confidence == LIKELY


def test_a_hang_without_a_line_of_the_program_is_not_certain() -> None:
    assert weighed(CROSSED, said("pipe_full", 0, place=None))[0] == LIKELY
    assert weighed(CROSSED, said("pipe_full", 0, 1))[0] == 0.95


@pytest.mark.parametrize(("function", "confidence"), [("Condition.wait", LIKELY), ("acquire", 0.9)])
def test_a_wait_for_a_word_that_nobody_gives_has_more_causes_than_a_lock(function: str, confidence: float) -> None:
    leaf = frame(327, file="/usr/lib/python3.11/threading.py", function=function)
    found = main(stalled(rank_snapshot(0, leaf, frame(10))))
    assert (found.code, found.confidence) == ("lock_cycle", confidence)


def test_only_the_beat_tells_a_python_loop_from_a_call_that_does_not_return() -> None:
    before = rank_snapshot(0, frame(39), status_file=board(beat_s=89.9))
    looks = stalled(before, at_s=90.0).snapshots
    spun = replace(looks[1], ranks=(replace(before, process=process(cpu_s=9.0)),))
    samples = tuple(sample(leaf=frame(39), user=frame(39)) for _ in range(20))
    seen = stalled(before, at_s=90.0, snapshots=(looks[0], spun), samples=samples)
    assert (main(seen).code, main(seen).confidence) == ("infinite_loop", 0.9)
    blind = replace(seen, ranks=(replace(seen.ranks[0], status_file=None),))
    assert main(blind).confidence == LIKELY


@pytest.mark.parametrize(
    ("condition", "confidence"),
    [("not done", 0.9), ("not os.path.exists(path)", 0.75), ("time.monotonic() < end", 0.75)],
)
def test_a_loop_that_asks_for_a_file_or_the_time_may_still_end(condition: str, confidence: float) -> None:
    before = rank_snapshot(0, frame(39), status_file=board(beat_s=89.9))
    looks = stalled(before, at_s=90.0).snapshots
    spun = replace(looks[1], ranks=(replace(before, process=process(cpu_s=9.0)),))
    samples = tuple(sample(leaf=frame(39), user=frame(39)) for _ in range(20))
    seen = stalled(before, at_s=90.0, snapshots=(looks[0], spun), samples=samples)
    source = Source(
        file=USER, first=38, text=f"    def wait(done, path, end):\n        while {condition}:\n            pass\n"
    )
    assert main(replace(seen, sources=(source,))).confidence == confidence


def left_after(kind: str, **changes: Any) -> Finding:
    gone = board(mark(kind, step=3), **changes)
    lost = raised(0, message="Connection closed by peer", at_s=31.0)
    victim = rank_evidence(0, exception=lost, exit=ended(0, 1, at_s=31.5))
    return main(evidence(victim, rank_evidence(1, status_file=gone, exit=ended(1, 0, at_s=30.9))))


def test_a_rank_that_left_between_two_steps_may_have_had_fewer_to_do_unless_it_called_exit() -> None:
    assert (left_after("forward").code, left_after("forward").confidence) == ("early_exit", 0.95)
    assert left_after("step").confidence == LIKELY
    assert left_after("step", exit_chain=(frame(18),)).confidence == 0.95


def test_an_exception_that_only_the_blamed_rank_caught_may_be_why() -> None:
    caught = (CaughtException(step=2, type="ValueError", place=LINE),)
    boards = {0: board(), 1: board(caught_exceptions=caught)}
    seen = replace(CROSSED, ranks=tuple(rank_evidence(rank, status_file=one) for rank, one in boards.items()))
    assert weighed(seen, said("uneven_inputs", 1)) == (
        LIKELY,
        "so it is; rank 1 caught ValueError (ada/train.py:10), which may be the reason",
    )
    alike = replace(seen, ranks=tuple(replace(one, status_file=board(caught_exceptions=caught)) for one in seen.ranks))
    assert weighed(alike, said("uneven_inputs", 1))[0] == 0.95
    assert weighed(seen, said("lock_cycle", 1, 0))[0] == CERTAIN


@pytest.mark.parametrize("code", ["store_key_missing", "fork_lock"])
def test_some_causes_never_show_who_began(code: str) -> None:
    assert weighed(CROSSED, said(code, 0, 1))[0] == LIKELY


def test_a_stack_is_enough_to_be_seen() -> None:
    locked = rank_snapshot(0, stacks=(replace(stack(frame(10)), native=IN_LOCK),))
    seen = stalled(locked, in_all_reduce(1, collective(6)))
    assert weighed(seen, said("lock_cycle", 0))[0] == CERTAIN
