"""A sample of the trials; the script beside it makes as many as are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import COMMANDS, VICTIMS, Trial, attempted, trial_of


def test_a_trial_is_a_function_of_its_seed_and_few_trials_meet_every_pair() -> None:
    trials = [trial_of(1, number) for number in range(len(COMMANDS) * len(VICTIMS))]
    assert trials == [trial_of(1, number) for number in range(len(trials))]
    assert len({(one.command, one.victim) for one in trials}) == len(trials)
    assert trial_of(2, 0) != trials[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "victim"),
    [("run", "controller and guardian"), ("run", "guardian"), ("watch", "guardian"), ("plan", "controller")],
)
def test_nothing_is_left_and_the_report_is_right_after_kill_9(tmp_path: Path, command: str, victim: str) -> None:
    trial = Trial(number=0, command=command, mode="healthy", forked=False, victim=victim, after_s=1.0)
    result = attempted(trial, tmp_path / "trial")
    assert (result.killed, result.wrong) == (True, [])
