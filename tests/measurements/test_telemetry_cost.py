"""The benchmark of telemetry: what it makes of its samples, and that both of its sides are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.telemetry_cost import ROUND, SIDE_OF, interval, percent_more, steps_of, summary


def run(with_s: list[float], without_s: list[float]) -> dict[str, Any]:
    sides = {"with": with_s, "without": without_s}
    return {f"{name}_{clock}": samples for name, samples in sides.items() for clock in ("wall_s", "cpu_s")}


def test_a_step_that_is_looked_into_counts_as_one_of_ten() -> None:
    looked_into = [1.1 if step % 10 == 9 else 1.0 for step in range(40)]
    assert percent_more(run(looked_into, [1.0] * 40), "wall_s") == pytest.approx(1.0)


def test_a_step_that_was_held_up_does_not_count() -> None:
    held_up = [1.0] * 30
    held_up[13] = 60.0
    assert percent_more(run(held_up, [1.0] * 30), "cpu_s") == pytest.approx(0.0)


@given(st.lists(st.floats(0.5, 2.0), min_size=10, max_size=40), st.floats(0.1, 10.0))
def test_a_machine_that_is_slower_throughout_changes_no_share(samples: list[float], times: float) -> None:
    slower = run([times * one for one in samples], [times * one for one in samples])
    assert percent_more(slower, "wall_s") == pytest.approx(0.0, abs=1e-6)


def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-3), pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-3))


def test_the_summary_has_both_clocks_with_their_intervals() -> None:
    told = summary([run([1.01] * 10, [1.0] * 10), run([1.03] * 10, [1.0] * 10)])
    assert told["runs"] == 2
    assert (told["wall_percent_mean"], told["cpu_percent_median"]) == (pytest.approx(2.0), pytest.approx(2.0))
    assert told["wall_percent_low"] < 2.0 < told["wall_percent_high"]
    assert told["wall_step_ms_without"] == 1000.0


@pytest.mark.slow
def test_within_a_run_telemetry_is_there_for_every_other_pair_of_rounds(tmp_path: Path) -> None:
    samples = steps_of(steps=4 * ROUND + 1, directory=tmp_path)
    sides = [SIDE_OF[telemetry] for telemetry, _, _ in samples]
    assert sides == ["with"] * 2 * ROUND + ["without"] * 2 * ROUND + ["with"]
    assert all(wall > 0 and processor > 0 for _, wall, processor in samples)
    beats = [json.loads(line)["step"] for line in (tmp_path / "out" / "heartbeat_rank0.jsonl").open()]
    assert set(beats) == {step for step, side in enumerate(["with", *sides]) if side == "with"}
