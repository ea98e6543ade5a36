"""The benchmark of telemetry: what it makes of its samples, and that both of its sides are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.telemetry_cost import WARM, interval, percent_more, steps_of, summary


def pair(with_s: list[float], without_s: list[float]) -> dict[str, Any]:
    warm = [9.0] * WARM
    sides = {"with": warm + with_s, "without": warm + without_s}
    return {f"{name}_{clock}": samples for name, samples in sides.items() for clock in ("wall_s", "cpu_s")}


def test_a_step_that_is_looked_into_counts_as_one_of_ten() -> None:
    looked_into = [1.1 if step % 10 == 9 else 1.0 for step in range(40)]
    assert percent_more(pair(looked_into, [1.0] * 40), "wall_s") == pytest.approx(1.0)


def test_neither_warm_steps_nor_one_that_was_held_up_count() -> None:
    held_up = [1.0] * 30
    held_up[13] = 60.0
    assert percent_more(pair(held_up, [1.0] * 30), "cpu_s") == pytest.approx(0.0)


@given(st.lists(st.floats(0.5, 2.0), min_size=10, max_size=40), st.floats(0.1, 10.0))
def test_a_machine_that_is_slower_throughout_changes_no_share(samples: list[float], times: float) -> None:
    slower = pair([times * one for one in samples], [times * one for one in samples])
    assert percent_more(slower, "wall_s") == pytest.approx(0.0, abs=1e-6)


def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-3), pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-3))


def test_the_summary_has_both_clocks_with_their_intervals() -> None:
    told = summary([pair([1.01] * 10, [1.0] * 10), pair([1.03] * 10, [1.0] * 10)])
    assert told["pairs"] == 2
    assert (told["wall_percent_mean"], told["cpu_percent_median"]) == (pytest.approx(2.0), pytest.approx(2.0))
    assert told["wall_percent_low"] < 2.0 < told["wall_percent_high"]
    assert told["wall_step_ms_without"] == 1000.0


@pytest.mark.slow
def test_both_sides_train_and_one_of_them_writes(tmp_path: Path) -> None:
    for on in (True, False):
        (side := tmp_path / str(on)).mkdir()
        samples = steps_of(telemetry=on, steps=3, directory=side)
        assert [wall > 0 and processor > 0 for wall, processor in samples] == [True] * 3
        assert (side / "out" / "heartbeat_rank0.jsonl").exists() is on
