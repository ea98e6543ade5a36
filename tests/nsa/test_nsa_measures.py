"""Measures that the subject must keep: memory linear in tokens, a step not much dearer than its control's, learning."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import nsa_learning, nsa_memory, nsa_step_cost


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestFourTimesTheTokensTakeFourAndAHalfTimesTheMemoryAtMost:
    def test_on_the_usual_path(self) -> None:
        short, long = (nsa_memory.measured(nsa_memory.PATHS[0], tokens) for tokens in (512, 2048))
        assert 2.0 < long / short < nsa_memory.LIMIT

    @pytest.mark.slow
    @pytest.mark.parametrize("path", nsa_memory.PATHS, ids="-".join)
    def test_on_every_path(self, path: tuple[str, str, str]) -> None:
        short, long = (nsa_memory.measured(path, tokens) for tokens in nsa_memory.LENGTHS)
        assert 2.0 < long / short < nsa_memory.LIMIT


@pytest.mark.slow
def test_a_step_of_two_production_layers_costs_at_most_half_more_than_its_control() -> None:
    measured = nsa_step_cost.measure(layers=2, pairs=3)
    for name in ("kept", "checkpointed"):
        assert measured["summary"][f"{name}_wall_s_ratio_median"] <= nsa_step_cost.LIMIT


@pytest.mark.slow
def test_two_hundred_steps_of_text_end_no_more_than_five_percent_above_the_control() -> None:
    summary = nsa_learning.measure(200)["summary"]
    assert all(excess <= nsa_learning.LIMIT for excess in summary["excess"])
    assert all(end["nsa"] < 3.0 for end in summary["last_losses"])
