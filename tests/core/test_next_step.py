"""The command to run after a run that was too slow for its deadline."""

from __future__ import annotations

from typing import Any

import pytest
from builders import board, ended, evidence, rank_evidence, spec

from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.outcome.reproduction import after_slow

STEPS = ((1, 4.0), (2, 8.0), (3, 12.0), (4, 16.0))


def slow(planned: int | None = 24, **changes: Any) -> Evidence:
    rank = rank_evidence(0, status_file=board(steps_s=STEPS), planned_steps=planned)
    facts = {"ending": Ending.DEADLINE, "launcher": ended(None, 1, by_us=True), "ended_s": 20.0}
    return evidence(rank, **{**facts, **changes})


def test_a_script_is_run_again_with_a_deadline_that_suffices_at_the_measured_rate() -> None:
    script = spec(program=("my train.py", "--steps", "24"), python="python3.12")
    assert after_slow(script, slow(), ["slow"]) == (
        "nsa-harness run 'my train.py' --ranks 2 --python python3.12 limits.deadline_s=120 -- --steps 24"
    )


@pytest.mark.parametrize("reason", ["straggler", "input_bound"])
def test_a_finding_that_says_why_the_run_is_slow_comes_first(reason: str) -> None:
    assert after_slow(spec(), slow(), ["slow", "nan", reason]) == f"nsa-harness explain {reason}"


@pytest.mark.parametrize(
    ("launch", "planned"),
    [({}, None), ({"env": (("A", "1"),)}, 24), ({"program": ("nsa.train",)}, 24), ({"cwd": "/home/ada"}, 24)],
)
def test_without_a_rate_or_a_command_line_the_cause_is_explained(launch: dict[str, Any], planned: int | None) -> None:
    assert after_slow(spec(**launch), slow(planned), ["slow"]) == "nsa-harness explain slow"


def test_other_runs_have_no_such_command() -> None:
    assert after_slow(spec(), slow(), ["straggler"]) is None
    assert after_slow(spec(), slow(ending=Ending.EXITED), ["slow"]) is None
