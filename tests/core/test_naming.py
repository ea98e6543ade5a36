"""What people call ranks."""

from __future__ import annotations

import pytest
from builders import board, diagnose, ended, evidence, raised, rank_evidence

from nsa_harness.core.diagnosis.context import meshes
from nsa_harness.core.outcome.wording import rank_names, ranks_text
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.texts.sentences import with_coordinates, without_steps

PLACES = {0: (("dp", 0), ("tp", 0)), 1: (("dp", 0), ("tp", 1)), 3: (("dp", 1), ("tp", 1))}
STAGE = {rank: (("dp", rank), ("pp", 1)) for rank in range(512)}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 7], "ranks 0-2, 7"),
        ([*range(512), 600, 603, 605, 700, 702], "ranks 0-511, 600, 603, 605 and 2 more"),
        (range(1000), "ranks 0-999"),
    ],
)
def test_many_ranks_are_told_in_ranges_and_never_in_more_than_a_line(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        (
            "rank 1 skipped all_reduce (a.py:3, step 1); in step 2 rank 0 called it",
            "rank 1 skipped all_reduce (a.py:3); rank 0 called it",
        ),
        (
            "killed; last progress event: returned barrier, step 1; 0.20 s before its end",
            "killed; last progress event: returned barrier; 0.20 s before its end",
        ),
        (
            "still active (3 steps done, 4.0 s per step), but the last step",
            "still active (4.0 s per step), but the last step",
        ),
        ("it takes a step (a.py:12), and 2 steps later", "it takes a step (a.py:12), and 2 steps later"),
    ],
)
def test_where_no_steps_are_counted_no_number_of_one_is_told(claim: str, told: str) -> None:
    assert without_steps(claim) == told


def test_a_step_in_a_message_of_the_program_is_no_step_of_ours() -> None:
    message = "ValueError: the configuration of step 10 does not fit"
    claim = f"rank 1 raised {message} (a.py:3, step 1); before that, {message}"
    kept = f"rank 1 raised {message} (a.py:3); before that, {message}"
    assert without_steps(claim, [message]) == kept
    assert without_steps(claim) != kept
    own = raised(1, "ValueError", message.partition(": ")[2])
    seen = evidence(
        rank_evidence(0, status_file=None), rank_evidence(1, status_file=None, exception=own, exit=ended(1, 1))
    )
    assert message in diagnose(seen, judge(seen)).findings[0].claim


def test_the_text_of_a_thousand_scattered_ranks_is_short() -> None:
    assert ranks_text(range(0, 2000, 2)) == "ranks 0, 2, 4, 6 and 996 more"


def test_a_rank_carries_its_place_in_the_mesh_where_there_is_one() -> None:
    assert rank_names([3], PLACES) == "rank 3 (dp=1 tp=1)"
    assert rank_names([3], {}) == "rank 3"
    assert rank_names([0, 3], PLACES) == "ranks 0 (dp=0 tp=0), 3 (dp=1 tp=1)"
    assert rank_names(range(512), STAGE) == "ranks 0-511 (pp=1)", "what they share"
    assert rank_names([0, 1], {}) == "ranks 0, 1"


def test_the_first_mention_of_each_rank_in_a_claim_gets_its_place() -> None:
    claim = "rank 3 never entered all_reduce #42; ranks 0, 1 wait, and rank 3 x1, rank 12 left, ranks 0-2 too"
    assert with_coordinates(claim, PLACES) == (
        "rank 3 (dp=1 tp=1) never entered all_reduce #42; ranks 0 (dp=0 tp=0), 1 (dp=0 tp=1) wait, and rank 3 x1,"
        " rank 12 left, ranks 0-2 too"
    )
    assert with_coordinates(claim, {}) == claim


def test_the_places_are_those_the_boards_tell() -> None:
    told = rank_evidence(3, status_file=board(mesh=PLACES[3]))
    assert meshes(evidence(rank_evidence(0), rank_evidence(1, status_file=board()), told)) == {3: PLACES[3]}
