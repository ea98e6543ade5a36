"""The profile of a slow run: its lines by how often they were seen, its pace, and when it would have ended."""

from __future__ import annotations

from dataclasses import replace

from nsa_harness.core.diagnosis.profile import busiest, pace, profiles
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.render.documents.plain_text import profile_text
from tests.core.builders import ALL_REDUCE, board, ended, evidence, frame, rank_evidence, sample

LOOP, PICK = frame(40, function="attend"), frame(41, function="attend")
STEPS = ((1, 10.0), (2, 14.0), (3, 18.0))


def slow(*, planned: int | None = None, ended_s: float = 20.0, nodes: int | None = None):
    working = rank_evidence(1, status_file=board(steps_s=STEPS, autograd_nodes=nodes), planned_steps=planned)
    ahead = rank_evidence(0, status_file=board(steps_s=(*STEPS, (4, 19.0))))
    samples = (
        sample(0, "waiting", leaf=ALL_REDUCE, user=frame(9)),
        sample(1, leaf=PICK, user=LOOP),
        sample(1, "moving", leaf=LOOP, user=LOOP),
        sample(1, leaf=PICK, user=LOOP),
        sample(1, user=PICK),
    )
    facts = {"ending": Ending.DEADLINE, "launcher": ended(None, 1, by_us=True), "samples": samples}
    return evidence(ahead, working, ended_s=ended_s, **facts)


def test_the_lines_of_a_rank_are_ordered_by_how_often_they_were_seen() -> None:
    (_, one) = profiles(slow())
    assert [(line.frame, line.sample_count, line.leaf) for line in one.lines] == [(LOOP, 3, PICK), (PICK, 1, None)]
    assert (one.samples, one.working) == (4, 4)


def test_what_was_seen_before_the_first_step_was_done_is_the_start_and_no_part_of_the_profile() -> None:
    seen = slow()
    start = [replace(sample(1, user=frame(9), leaf=frame(9)), at_s=5.0) for _ in range(9)]
    after = [replace(one, at_s=11.0) for one in seen.samples]
    assert profiles(replace(seen, samples=(*start, *after))) == profiles(replace(seen, samples=tuple(after)))
    begun = replace(seen.ranks[1], status_file=board(steps_s=()))
    only_start = replace(seen, ranks=(begun,), samples=tuple(start))
    assert profiles(only_start)[0].samples == 9, "no step was done yet: the start is all there is"


def test_the_rank_at_work_in_most_samples_is_the_one_the_others_wait_for() -> None:
    made = profiles(slow())
    assert busiest(made) is made[1]
    assert busiest(made[:1]) is None, "a rank that only waits keeps nobody waiting"


def test_a_rank_that_moves_from_collective_to_collective_is_held_up_by_the_one_that_computes() -> None:
    seen = slow()
    meeting = [sample(0, "moving", leaf=ALL_REDUCE, user=frame(9))] * 9
    made = profiles(replace(seen, samples=(*seen.samples, *meeting)))
    assert (made[0].working, made[0].computing) == (9, 0)
    assert busiest(made) is made[1]
    assert busiest(made[:1]) is made[0], "alone it is all that is known"


def test_a_rank_without_a_stack_has_no_profile() -> None:
    unseen = replace(slow(), samples=(sample(0), sample(1)))
    assert profiles(unseen) == ()
    assert list(profile_text(unseen)) == []


def test_the_pace_is_that_of_the_rank_with_the_fewest_steps() -> None:
    speed = pace(slow())
    assert speed is not None
    assert (speed.steps_done, speed.step_s, speed.running_s, speed.left_s) == (3, 4.0, 2.0, None)


def test_the_end_is_projected_from_the_steps_the_program_plans() -> None:
    at_pace = pace(slow(planned=10))
    assert at_pace is not None
    assert at_pace.left_s == 7 * 4.0 - 2.0


def test_a_step_that_takes_longer_than_those_before_it_slows_the_projection() -> None:
    late = pace(slow(planned=10, ended_s=48.0))
    assert late is not None
    assert late.left_s == 7 * 30.0 - 30.0


def test_without_two_steps_or_without_a_plan_no_end_is_projected() -> None:
    assert pace(evidence(rank_evidence(0))) is None
    first = pace(evidence(rank_evidence(0, status_file=board(steps_s=STEPS[:1]), planned_steps=10)))
    assert first is not None
    assert (first.steps_done, first.step_s, first.left_s) == (1, None, None)


def test_the_table_names_shares_pace_and_autograd_nodes() -> None:
    text = "\n".join(profile_text(slow(planned=10, nodes=5120)))
    assert "3 steps done, 4.0 s per step; the current step has taken 2.0 s so far; 26 s more for all 10 steps" in text
    assert "rank 1: working in 4 of 4 samples, 5120 autograd nodes in its first backward pass" in text
    assert "50000 or more autograd nodes" in "\n".join(profile_text(slow(nodes=50_000)))
    assert "75.0 %  /home/ada/train.py:40 attend" in text
