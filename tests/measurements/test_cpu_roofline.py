"""The least time of a training step on a CPU, from counted work and measured rates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.cpu_roofline import RESULT, STEP_COST, Rates, Work, floor_s, floors, step_work, table_md
from nsa_attention.config import CI, PRODUCTION, Attention

RATES = Rates(weight_flops=100e9, attention_flops=100e9, exponentials=1e9, bytes=10e9)


def test_the_least_time_is_the_sum_of_what_the_same_cores_do() -> None:
    work = Work(weight_flops=100e9, attention_flops=50e9, exponentials=2e9, bytes=5e9)
    assert floor_s(work, RATES) == pytest.approx(1.0 + 0.5 + 2.0 + 0.5)


def test_dense_attention_is_seven_products_and_two_exponentials_for_each_visible_pair() -> None:
    config = replace(CI, attention=Attention.VANILLA)
    work = step_work(config)["attention"]
    visible = config.layers * config.heads * config.seq_len * (config.seq_len + 1) // 2
    assert work.exponentials == 2 * visible
    assert work.attention_flops == 7 * 2 * config.d_k * visible  # two forward, five backward


def test_a_product_with_a_weight_is_made_three_times() -> None:
    assert step_work(CI)["head"].weight_flops == 3 * 2 * CI.seq_len * CI.dim * CI.vocab
    assert step_work(replace(CI, layers=8))["mlp"].weight_flops == 2 * step_work(CI)["mlp"].weight_flops


def test_nsa_pays_off_for_long_sequences_only() -> None:
    ratios = [row["ratio"] for row in floors(RATES)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1 > ratios[-1]


def test_the_recorded_result_is_what_its_rates_give() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert floors(Rates(**result["rates"])) == result["lengths"]
    assert table_md(result, json.loads(STEP_COST.read_text(encoding="utf-8"))).count("tokens |") == len(
        result["lengths"]
    )
    assert PRODUCTION.seq_len == result["lengths"][0]["tokens"]
