"""How long quiet is too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import board, call, evidence, mark
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.plan import Limits
from nsa_harness.core.verdict.limits import (
    current_limits,
    final_limits,
    has_done_first_steps,
    has_started,
    is_exiting,
    last_progress_s,
    with_deadline_from,
    without_earlier_pauses,
)


def test_before_any_board_the_floors_hold_and_the_stall_limit_is_long() -> None:
    assert current_limits(Limits(), [None]) == Limits(
        stall_s=20.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=None
    )


def test_a_lively_run_is_suspected_at_the_floor() -> None:
    lively = board(mark("forward"), gaps_s={"forward": 0.1})
    assert current_limits(Limits(deadline_s=600.0), [lively]) == Limits(
        stall_s=5.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=600.0
    )


def test_a_long_quiet_in_the_same_phase_raises_the_stall_limit_threefold() -> None:
    pausing = board(mark("data"), gaps_s={"data": 4.0, "forward": 0.1})
    assert current_limits(Limits(), [pausing]).stall_s == 12.0


def test_a_long_quiet_in_another_phase_raises_only_the_open_wait() -> None:
    pausing = board(mark("forward"), gaps_s={"data": 40.0, "forward": 0.1})
    limits = current_limits(Limits(), [pausing])
    assert (limits.stall_s, limits.open_wait_s) == (5.0, 400.0)


def test_the_phase_of_any_rank_counts_for_all() -> None:
    limits = current_limits(Limits(), [board(mark("forward")), board(mark("data"), gaps_s={"forward": 3.0})])
    assert limits.stall_s == 9.0


def test_long_steps_raise_the_time_that_a_rank_may_compute() -> None:
    slow = board(mark("forward"), steps_s=((1, 10.0), (2, 40.0), (3, 50.0)))
    assert current_limits(Limits(), [slow]).busy_s == 300.0


def test_a_suspect_that_moved_again_has_raised_the_limit_of_its_phase() -> None:
    learned_s = {"data": 33.0}
    assert current_limits(Limits(), [board(mark("data"))], learned_s).stall_s == 33.0
    assert current_limits(Limits(), [board(mark("forward"))], learned_s).stall_s == 5.0
    assert current_limits(Limits(), [board()], {"": 33.0}).stall_s == 33.0  # no phase is known


def test_pauses_of_start_up_that_no_later_pause_exceeds_are_forgotten() -> None:
    paused = board(mark("data"), gaps_s={"data": 4.0, "forward": 9.0})
    assert without_earlier_pauses(paused, {"data": 4.0, "forward": 8.0}).gaps_s == {"forward": 9.0}
    assert current_limits(Limits(), [without_earlier_pauses(paused, {"data": 4.0})]).stall_s == 5.0


def test_the_first_steps_belong_to_start_up_and_without_training_the_first_collectives() -> None:
    assert not has_done_first_steps(board(mark("step", step=2)))
    assert has_done_first_steps(board(mark("data", step=3)))
    assert not has_done_first_steps(board())
    assert not has_done_first_steps(board(calls=(call(16, "all_reduce"),)))
    assert has_done_first_steps(board(calls=(call(17, "all_reduce"),)))


def test_a_rank_exits_once_its_interpreter_does_or_it_destroys_its_process_group() -> None:
    assert is_exiting(board(mark("exit"), mark("forward")))
    assert is_exiting(board(calls=(call(2, "destroy_process_group", left_s=None),)))
    assert not is_exiting(board(mark("forward"), calls=(call(2, "destroy_process_group", left_s=9.0),)))
    assert not is_exiting(board(mark("raised"), calls=(call(2, "all_reduce", left_s=None),)))
    assert not is_exiting(board())
    assert not is_exiting(None)


def test_what_is_declared_holds_whatever_the_run_shows() -> None:
    declared = Limits(stall_s=1.0, busy_s=2.0, open_wait_s=3.0, start_s=4.0, deadline_s=5.0)
    pausing = board(mark("data"), gaps_s={"data": 99.0}, steps_s=((1, 0.0), (2, 99.0)))
    assert current_limits(declared, [pausing], {"data": 99.0}) == declared


@given(st.lists(st.floats(0, 1e6), max_size=4), st.floats(0, 1e6))
def test_the_limits_never_fall_below_their_floors(gaps: list[float], grown_s: float) -> None:
    limits = current_limits(
        Limits(), [board(mark("data"), gaps_s={"data": gap}) for gap in gaps], {"data": grown_s, "": grown_s}
    )
    assert limits.stall_s is not None
    assert limits.stall_s >= max([5.0, grown_s, *[3 * gap for gap in gaps]])
    assert limits.open_wait_s is not None
    assert limits.open_wait_s >= max([300.0, *[10 * gap for gap in gaps]])


@pytest.mark.parametrize("kind", ["data", "forward", "backward", "optimizer", "step"])
def test_a_rank_that_trains_has_started(kind: str) -> None:
    assert has_started(board(mark("start"), mark(kind))) is True


def test_a_rank_that_only_sets_up_has_not_started() -> None:
    assert has_started(None) is False
    assert has_started(board(mark("start"), mark("init"))) is False
    assert has_started(board(calls=(call(op="init_process_group"), call(2, op="new_group")))) is False


def test_a_rank_that_waits_for_a_store_before_it_sets_up_has_not_started() -> None:
    assert not has_started(board(calls=(call(1, "wait store.get"), call(2, "init_process_group"))))


def test_a_rank_that_calls_collectives_of_its_own_has_started() -> None:
    assert has_started(board(calls=(call(op="init_process_group"), call(2, op="all_reduce")))) is True


def test_progress_is_the_newest_of_birth_mark_collective_and_device() -> None:
    assert last_progress_s(board()) == 0.5
    assert last_progress_s(board(mark(at_s=3.0))) == 3.0
    assert last_progress_s(board(mark(at_s=3.0), collectives_changed_s=4.0)) == 4.0
    assert last_progress_s(board(mark(at_s=3.0), collectives_changed_s=4.0, device_changed_s=5.0)) == 5.0


def test_a_deadline_counts_from_when_every_rank_had_left_start_up() -> None:
    limits = Limits(deadline_s=600.0, stall_s=5.0)
    assert with_deadline_from(limits, 7.0) == Limits(deadline_s=607.0, stall_s=5.0)
    assert with_deadline_from(limits, None) == limits
    assert with_deadline_from(Limits(), 7.0) == Limits()
    ours = evidence(launch_s=7.0, limits=limits)
    found = [replace(ours, is_observed=True), replace(ours, is_attached=True), replace(ours, launch_s=None)]
    assert [final_limits(one).deadline_s for one in (ours, *found)] == [607.0, 600.0, 600.0, 600.0]
