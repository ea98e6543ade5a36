"""Measures that the subject must keep: memory linear in tokens, a step not much dearer than its control's, learning."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import nsa_learning, nsa_memory, nsa_parts, nsa_step_cost
from nsa_attention.config import CI

WAYS = ("forward", "backward")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestFourTimesTheTokensTakeFourAndAHalfTimesTheMemoryAtMost:
    def test_on_the_usual_path(self) -> None:
        short, long = (nsa_memory.measure_in_process(nsa_memory.PATHS[0], tokens) for tokens in (512, 2048))
        assert 2.0 < long / short < nsa_memory.LIMIT

    @pytest.mark.slow
    @pytest.mark.parametrize("path", nsa_memory.PATHS, ids="-".join)
    def test_on_every_path(self, path: tuple[str, str, str]) -> None:
        short, long = (nsa_memory.measure_in_process(path, tokens) for tokens in nsa_memory.LENGTHS)
        assert 2.0 < long / short < nsa_memory.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("tokens", sorted(nsa_step_cost.LIMITS))
def test_a_step_of_two_production_layers_stays_within_its_limit_over_its_control(tokens: int) -> None:
    length = nsa_step_cost.Length(tokens=tokens, layers=2, pairs=3)
    assert nsa_step_cost.over_limit(nsa_step_cost.measure(length)) == []


def test_a_length_is_over_its_limit_in_the_modes_whose_wall_time_is() -> None:
    summary = {"kept_wall_s_ratio_median": 1.29, "checkpointed_wall_s_ratio_median": 1.31}
    summary["attention_wall_s_ratio_median"] = 2.0  # the limit is one of whole steps
    measured = {"limit": 1.3, "samples": {"kept": [], "checkpointed": [], "attention": []}, "summary": summary}
    assert nsa_step_cost.over_limit(measured) == ["checkpointed"]
    assert nsa_step_cost.over_limit(measured | {"limit": None}) == []


def test_the_plan_can_be_cut_to_a_length_that_it_does_not_have() -> None:
    changed, plan = nsa_step_cost.adjust_plan, nsa_step_cost.PLAN
    assert changed(plan, None, None, None) == plan
    assert changed(plan, 8192, None, 1) == (nsa_step_cost.Length(tokens=8192, layers=2, pairs=1),)
    assert changed(plan, 4096, 3, None) == (nsa_step_cost.Length(tokens=4096, layers=3, pairs=2),)


def test_the_parts_of_a_layer_are_those_of_the_table() -> None:
    split = nsa_parts.parts(replace(CI, layers=1, seq_len=64), 1)
    branches = {"compress", "cmp", "choose", "sel", "sel where neighbours share 95%", "win", "gate"}
    assert set(split["nsa"]) == {"projections", *branches, "mlp", "head"}
    assert set(split["vanilla"]) == {"projections", "attention", "mlp", "head"}
    seconds = [part[f"{way}_wall_s"] for side in split.values() for part in side.values() for way in WAYS]
    assert min(seconds) >= 0 < max(seconds)
    summary = {"kept_vanilla_wall_s_median": 2.0, "kept_nsa_wall_s_median": 2.5, "kept_wall_s_ratio_median": 1.25}
    alone = {"vanilla_wall_s_median": 0.5, "nsa_wall_s_median": 0.25, "wall_s_ratio_median": 0.5}
    summary |= {f"attention_{name}": value for name, value in alone.items()}
    samples: dict[str, list[object]] = {"kept": [], "attention": []}
    length = {"tokens": 64, "layers": 1, "limit": 1.3, "goal": None, "samples": samples, "summary": summary}
    table = nsa_step_cost.table_md({"lengths": [length | {"parts": split}]}).splitlines()
    assert table[2] == "| 64 | 1 | kept | 2.00 | 2.50 | 1.25 | 1.3 |  |"
    assert table[6] == "| 64 | 0.500 | 0.250 | 0.50 |"
    assert [line.split(" | ")[0] for line in table[10:]] == [
        f"| {side} {part}" for side, names in split.items() for part in names
    ]


@pytest.mark.slow
def test_held_out_loss_ends_no_more_than_five_percent_above_the_control() -> None:
    summaries = nsa_learning.measure(200)["summary"]
    assert [summary["seed"] for summary in summaries] == list(nsa_learning.SEEDS)
    assert all(summary["excess_at_equal_tokens"] <= nsa_learning.LIMIT for summary in summaries)
    assert all(summary["nsa_loss_at_equal_tokens"] < 3.0 for summary in summaries)


LEARNED = {
    "seed": 3,
    "vanilla": [{"tokens": 100, "cpu_s": 1.0, "loss": 4.0}, {"tokens": 200, "cpu_s": 2.0, "loss": 2.0}],
    "nsa": [{"tokens": 100, "cpu_s": 1.5, "loss": 3.0}, {"tokens": 200, "cpu_s": 3.5, "loss": 1.0}],
}


def test_losses_are_compared_after_equal_tokens_and_after_equal_processor_time() -> None:
    found = nsa_learning.summary(LEARNED)
    assert (found["vanilla_loss_at_equal_tokens"], found["nsa_loss_at_equal_tokens"]) == (2.0, 1.0)
    assert (found["cpu_s"], found["vanilla_loss_at_equal_time"], found["nsa_loss_at_equal_time"]) == (2.0, 2.0, 2.5)
    assert (found["excess_at_equal_tokens"], found["excess_at_equal_time"]) == (-0.5, 0.25)
    assert found["cpu_ratio"] == 1.75


def test_the_picture_has_each_curve_over_tokens_and_over_processor_time() -> None:
    picture = nsa_learning.plot([LEARNED, LEARNED | {"seed": 4}])
    assert picture.count("<polyline") == 2 * 2 * 2
    assert all(label in picture for label in (">tokens<", ">processor time, s<", ">NSA<", ">full causal attention<"))


def test_the_table_of_memory_gives_each_length_with_its_growth() -> None:
    sizes = {str(tokens): 2**20 * tokens for tokens in nsa_memory.CURVE}
    rows = nsa_memory.table({"curve": {"nsa": sizes, "vanilla": sizes}}).splitlines()
    assert rows[2] == "| 2048 | 2048 |  | 2048 |  |"
    assert rows[3] == "| 4096 | 4096 | 2.00 | 4096 | 2.00 |"
    assert len(rows) == 2 + len(nsa_memory.CURVE)
