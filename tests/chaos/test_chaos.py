"""A sample of the trials; the script beside it makes as many as are asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import endings
import pytest
from chaos import COMMANDS, HERE, OK, OVER, VICTIMS, Trial, attempted, make_trial


def test_a_trial_is_a_function_of_its_seed_and_few_trials_meet_every_pair() -> None:
    trials = [make_trial(1, number) for number in range(len(COMMANDS) * len(VICTIMS))]
    assert trials == [make_trial(1, number) for number in range(len(trials))]
    assert len({(one.command, one.victim) for one in trials}) == len(trials)
    assert make_trial(2, 0) != trials[0]


def test_what_is_stored_of_the_trials_is_what_the_script_would_try_and_none_of_it_went_wrong() -> None:
    """A change of the trials has them made again: `python tests/chaos/chaos.py --store tests/chaos/result.json`."""
    stored = json.loads((HERE / "result.json").read_text())
    assert {one["outcome"] for one in stored["trials"]} <= {OK, OVER}
    made = [{name: said for name, said in one.items() if name not in ("commit", "outcome")} for one in stored["trials"]]
    assert made == [asdict(make_trial(stored["seed"], number)) for number in range(60)]
    killed = {(one["command"], one["victim"]) for one in stored["trials"] if one["outcome"] == OK}
    assert len(killed) == len(COMMANDS) * len(VICTIMS)


def test_what_is_stored_of_the_endings_is_what_the_script_would_try_and_none_of_it_went_wrong() -> None:
    """Made anew by `python tests/chaos/endings.py --out FOLDER --store tests/chaos/endings.json`."""
    stored = json.loads((HERE / "endings.json").read_text())
    assert {one["outcome"] for one in stored["trials"]} <= {OK, OVER}
    made = [{name: said for name, said in one.items() if name not in ("commit", "outcome")} for one in stored["trials"]]
    assert made == [asdict(endings.make_trial(stored["seed"], number)) for number in range(len(made))]
    assert {one["kind"] for one in stored["trials"] if one["outcome"] == OK} == set(endings.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "victim"),
    [("run", "controller and guardian"), ("run", "guardian"), ("watch", "guardian"), ("plan", "controller")],
)
def test_nothing_is_left_and_the_report_is_right_after_kill_9(tmp_path: Path, command: str, victim: str) -> None:
    trial = Trial(number=0, command=command, mode="healthy", forked=False, victim=victim, after_s=1.0)
    result = attempted(trial, tmp_path / "trial")
    assert (result.killed, result.wrong) == (True, [])
