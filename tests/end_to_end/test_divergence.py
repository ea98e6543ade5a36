"""Ranks that part under real torchrun: the cause, the rank, the line and the step in which it began."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import PROGRAMS, Ran

PROGRAM = PROGRAMS / "diverge.py"


def ran(workspace, kind: str) -> Ran:
    workspace.scenario(kind, f"about: ranks part\nrun: {{ranks: 2, program: {PROGRAM}, args: [{kind}]}}\n")
    return workspace.harness("run", kind)


def outcome_of(workspace, kind: str) -> dict[str, Any]:
    outcome = ran(workspace, kind).outcome
    assert outcome["trouble"] == []
    return outcome


def line_of(text: str, kind: str) -> int:
    """The first line with this text in the function of the kind."""
    lines = PROGRAM.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"def {kind}("))
    return 1 + next(number for number in range(begin, len(lines)) if text in lines[number])


def blamed(outcome: dict[str, Any]) -> tuple[str, str, list[int], int, int | None]:
    culprit = outcome["culprit"]
    place = culprit["place"]
    return outcome["verdict"], outcome["cause"], culprit["ranks"], culprit["step"], place["line"] if place else None


@pytest.mark.slow
def test_another_order_of_collectives_is_named_with_both_lines_and_the_number(workspace):
    outcome = outcome_of(workspace, "order")
    line = line_of("if step == 3", "order")
    assert blamed(outcome) == ("HANG", "collective_order_mismatch", [1], 3, line)
    assert outcome["culprit"]["collective"]["seq"] is not None
    assert f"diverge.py:{line_of('else:', 'order') + 1}" in outcome["summary"]


@pytest.mark.slow
def test_of_two_shapes_the_rank_that_changed_is_blamed_and_not_the_one_that_gloo_ended(workspace):
    outcome = outcome_of(workspace, "shape")
    assert blamed(outcome) == ("FAIL", "shape_mismatch", [1], 3, line_of("dist.all_reduce", "shape"))
    assert outcome["exit_codes"]["0"] == -6
    assert "1000 elements" in outcome["summary"]
    assert "1004 elements" in outcome["summary"]


@pytest.mark.slow
def test_another_dtype_is_named_with_both(workspace):
    outcome = outcome_of(workspace, "dtype")
    assert blamed(outcome) == ("FAIL", "dtype_mismatch", [1], 3, line_of("dist.all_reduce", "dtype"))
    assert "float32" in outcome["summary"]
    assert "float64" in outcome["summary"]


@pytest.mark.slow
def test_two_groups_taken_in_opposite_order_are_a_deadlock_although_both_stand_on_one_line(workspace):
    outcome = outcome_of(workspace, "groups")
    assert blamed(outcome) == ("HANG", "cross_group_deadlock", [1], 3, line_of("for group in", "groups"))


@pytest.mark.slow
def test_a_no_sync_mismatch_is_named_by_the_step_in_which_it_began(workspace):
    found = ran(workspace, "no_sync")
    verdict, cause, ranks, step, _ = blamed(found.outcome)
    assert (verdict, cause, ranks, step) == ("HANG", "no_sync_mismatch", [1], 5)
    ledger = (found.run_dir / found.outcome["dir"] / "step_ledger.txt").read_text().splitlines()
    at = ledger.index("step 5")
    assert "all_reduce x1" in ledger[at + 1]
    assert "no collective" in ledger[at + 2]


@pytest.mark.slow
def test_the_rank_with_one_batch_less_is_blamed_and_not_the_one_that_still_trains(workspace):
    outcome = outcome_of(workspace, "uneven")
    assert blamed(outcome) == ("HANG", "uneven_inputs", [1], 8, line_of("for _ in DataLoader", "uneven"))


@pytest.mark.slow
def test_a_barrier_on_rank_0_only_is_named_on_rank_0(workspace):
    outcome = outcome_of(workspace, "barrier")
    assert blamed(outcome) == ("HANG", "rank0_only_collective", [0], 3, line_of("if step == 3", "barrier"))


@pytest.mark.slow
def test_a_barrier_of_another_group_on_rank_0_only_is_named_on_rank_0(workspace):
    verdict, cause, ranks, _, line = blamed(outcome_of(workspace, "barrier_of_group"))
    assert (verdict, cause, ranks) == ("HANG", "rank0_only_collective", [0])
    assert line == line_of("if step == 3", "barrier_of_group")


@pytest.mark.slow
def test_an_asynchronous_collective_of_one_rank_is_named_although_nobody_waits_for_it(workspace):
    outcome = outcome_of(workspace, "forgotten")
    line = line_of("if step == 3", "forgotten")
    assert blamed(outcome) == ("FAIL", "rank0_only_collective", [0], 2, line)


@pytest.mark.slow
def test_under_fsdp_the_rank_that_went_round_a_layer_is_blamed(workspace):
    outcome = outcome_of(workspace, "branch")
    line = line_of("if not (step == 3", "branch")
    assert blamed(outcome) == ("HANG", "rank_conditional_collective", [1], 3, line)


@pytest.mark.slow
def test_a_call_that_later_calls_hide_is_found_in_the_helper_that_made_it(workspace):
    outcome = outcome_of(workspace, "best")
    line = line_of("if loss < job.best", "keep_best")
    assert blamed(outcome) == ("HANG", "rank_conditional_collective", [0], 1, line)


@pytest.mark.slow
def test_ranks_that_differ_only_where_they_may_pass_without_a_finding(workspace):
    found = ran(workspace, "healthy")
    assert (found.code, found.outcome["verdict"], found.outcome["findings"]) == (0, "PASS", [])
    text = (found.run_dir / found.outcome["dir"] / "step_ledger.txt").read_text()
    assert "step 8" in text
    assert "all_to_all x1" in text
