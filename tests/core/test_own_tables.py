"""What our own program tells of itself, and that no other program's run is asked for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from builders import case, diagnose, ended, evidence, finding_of, rank_evidence, spec
from hypothesis import given
from hypothesis import strategies as st

from nsa_attention.samples import gate_rows
from nsa_harness.commands.judge import judge_evidence
from nsa_harness.core.diagnosis.confidence import LIKELY
from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.report import Place, StepCost
from nsa_harness.core.scenario.program import Row, Table
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.subject.tables import (
    RULES,
    gate_collapse,
    memory_excess,
    per_token_nodes,
    quadratic_cost,
    reported_values,
)


def gates(mean: float, share: float) -> Evidence:
    rows = [{"step": 20, "layer": layer, "branch": "sel", "mean": mean, "saturated_share": share} for layer in (3, 2)]
    return evidence(rank_evidence(0), program_records=tuple(rows))


@pytest.mark.parametrize(
    ("mean", "share", "shut"), [(0.0004, 1.0, True), (0.3, 0.2, False), (0.009, 0.5, False), (0.998, 1.0, False)]
)
def test_a_gate_that_is_shut_for_every_token_is_a_collapse(mean: float, share: float, shut: bool) -> None:
    one = gate_collapse(case(gates(mean, share)))
    assert (one is not None) is shut
    if one is not None:
        assert (one.place, one.cause) == (Place(layer=2, module="blocks.2.attn"), "gate_collapse")
        assert finding_of(one).claim == (
            "2 gates are shut for every token in step 20; the first is branch sel of layer 2, mean 0.0004"
        )


def test_a_rule_of_one_program_is_asked_only_where_it_is_passed_in() -> None:
    seen = gates(0.0004, 1.0)
    assert "gate_collapse" in [one.code for one in diagnose(seen, judge(seen), RULES).findings]
    assert "gate_collapse" not in [one.code for one in diagnose(seen, judge(seen)).findings]
    told = judge_evidence(spec(), seen, attempt=1, directory="a", artifacts=(), metrics={}, repeat="r", own_rules=RULES)
    assert "gate_collapse" in [one.code for one in told.findings]


@given(st.lists(st.sampled_from([0.0, 0.0099, 0.0101, 0.5, 0.9999]), min_size=2, max_size=200))
def test_the_column_says_collapsed_where_the_rule_does(values: list[float]) -> None:
    (row,) = gate_rows("0", torch.tensor([values], dtype=torch.double), ["sel"])
    seen = evidence(
        rank_evidence(0),
        program_records=(
            {"step": 1, "layer": 0, "branch": "sel", "mean": row.mean, "saturated_share": row.saturated_share},
        ),
    )
    assert row.collapsed is (gate_collapse(case(seen)) is not None)


@pytest.mark.parametrize("name", ["fallback_counters.csv", "fallback_counters_fsdp.csv"])
def test_who_computed_is_read_under_either_name(name: str) -> None:
    tables: dict[str, list[Row]] = {
        "step_cost.csv": [{"batch": 1.0, "seq_len": 8.0, "layers": 1.0}],
        name: [{"part": "cmp", "implementation": "eager"}],
    }
    _, rows = reported_values(tables.get)
    assert [row["implementations"] for row in rows] == ["cmp eager"]


def test_a_run_of_an_earlier_version_has_no_fetch_time_and_all_its_numbers() -> None:
    old: list[Row] = [{"step": 1.0, "loss": 5.5, "seconds": 2.0, "forward_s": 0.5}]
    metrics, _ = reported_values({"training.csv": old}.get)
    later, _ = reported_values({"training.csv": [{**old[0], "fetch_s": 0.25}]}.get)
    assert "fetch_s" not in metrics
    assert later == {**metrics, "fetch_s": 0.25}


def cost(**numbers: float) -> Evidence:
    """A step of four layers with two sequences of 512 tokens, healthy unless said otherwise."""
    row = {"seq_len": 512, "layers": 4, "batch": 2, "nodes": 832, "saved_bytes": 30e6, "square_bytes": 0}
    row |= {"expected_bytes": 83e6, "begin_bytes": 240e6, "peak_bytes": 450e6} | numbers
    return evidence(rank_evidence(0), program_records=({"step_cost": "of the first step", **row},))


def codes(seen: Evidence) -> list[str]:
    return [one.code for one in diagnose(seen, judge(seen), RULES).findings]


def test_a_step_that_costs_what_its_shape_says_is_no_finding() -> None:
    assert codes(cost()) == []
    assert (
        codes(evidence(rank_evidence(0), program_records=({"step_cost": "", "seq_len": 8, "layers": 1, "batch": 1},)))
        == []
    )


@pytest.mark.parametrize(
    ("nodes", "layers", "said"), [(16_384, 4, True), (16_383, 4, False), (8_192, 2, True), (400, 1, False)]
)
def test_four_nodes_for_each_token_and_layer_are_a_loop_over_tokens(nodes: int, layers: int, said: bool) -> None:
    assert (codes(cost(nodes=nodes, layers=layers)) == ["per_token_nodes"]) is said


@pytest.mark.parametrize(
    ("ending", "nodes", "said"),
    [(Ending.DEADLINE, 323_166, True), (Ending.DEADLINE, 424, False), (Ending.EXITED, 323_166, False)],
    ids=["slow", "slow for another reason", "failed otherwise"],
)
def test_a_loop_over_tokens_is_the_reason_of_a_run_that_is_slow(ending: Ending, nodes: int, said: bool) -> None:
    by_us = ending is Ending.DEADLINE
    late = replace(cost(nodes=nodes), ending=ending, launcher=ended(None if by_us else 1, 1, by_us=by_us))
    found = diagnose(late, judge(late), RULES).findings
    assert (found[0].code == "slow") == by_us
    assert found[0].claim.endswith("; the program computes token by token (per_token_nodes)") == said
    assert (found[0].confidence == LIKELY) == said
    assert ("per_token_nodes" in [one.code for one in found]) == (nodes > 424)


def test_few_tokens_have_few_nodes_each_whatever_computes_them() -> None:
    """A layer has its two hundred nodes for sixteen tokens too: that is no loop."""
    assert codes(cost(nodes=800, seq_len=16, batch=1)) == []
    one = per_token_nodes(case(cost(nodes=125 * 512 * 2 * 4)))
    assert one is not None
    assert one.confidence == 1.0
    assert finding_of(one).claim == (
        "the graph of the first step has 512000 autograd nodes, 125 for each of 1024 tokens in each of 4 layers:"
        " the program computes token by token"
    )


@pytest.mark.parametrize(
    ("kept", "square", "said"),
    [(90e6, 46e6, True), (90e6, 44e6, False), (20e6, 16e6, False), (20e6, 17e6, True)],
)
def test_what_has_a_row_and_a_column_for_each_token_is_quadratic(kept: float, square: float, said: bool) -> None:
    one = quadratic_cost(case(cost(saved_bytes=kept, square_bytes=square)))
    assert (one is not None) is said


def test_a_length_that_is_also_a_width_says_nothing_of_squares() -> None:
    unknown = cost()
    (row,) = unknown.program_records
    assert (
        quadratic_cost(case(replace(unknown, program_records=({k: v for k, v in row.items() if k != "square_bytes"},))))
        is None
    )


@pytest.mark.parametrize(
    ("numbers", "confidence"),
    [
        ({"saved_bytes": 333e6}, 1.0),
        ({"saved_bytes": 331e6}, None),
        ({"saved_bytes": 0, "peak_bytes": 240e6 + 621e6}, 0.8),
        ({"saved_bytes": 0, "peak_bytes": 240e6 + 610e6}, None),  # the rest of a process grows as well
        ({"expected_bytes": 10e6, "saved_bytes": 76e6}, None),
        ({"expected_bytes": 10e6, "saved_bytes": 78e6}, 1.0),
        ({"peak_bytes": 240e6 + 73e9}, 0.8),
    ],
)
def test_memory_that_no_shape_explains_is_an_excess(numbers: dict[str, float], confidence: float | None) -> None:
    one = memory_excess(case(cost(**numbers)))
    assert (one and one.confidence) == confidence


def test_the_seeds_memory_is_told_with_what_the_shape_needs() -> None:
    one = memory_excess(case(cost(peak_bytes=240e6 + 73 * 2**30, layers=5)))
    assert one is not None
    assert finding_of(one).claim == (
        "the first step took 73.0 GiB, 944 times the 79.2 MiB that parameters, gradients, optimizer and activations of"
        " 5 layers and 2 x 512 tokens need"
    )


def tables(**csv: list[dict[str, float | str]]) -> Table:
    return lambda name: csv.get(name.removesuffix(".csv"))


def test_what_a_step_cost_is_read_from_three_tables() -> None:
    sizes: Row = {"batch": 1.0, "seq_len": 512.0, "layers": 2.0, "expected_bytes": 9.0, "begin_bytes": 5.0}
    _, rows = reported_values(
        tables(
            step_cost=[
                {**sizes, "moment": "forward", "nodes": 424.0, "saved_bytes": 7.0, "peak_bytes": 6.0},
                {**sizes, "moment": "step", "peak_bytes": 8.0},
            ],
            fallback_counters=[
                {"part": "sel", "implementation": "fused_cpu", "reason": "short", "count": 2.0, "until_tokens": 1024.0},
                {"part": "cmp", "implementation": "fused_cpu", "reason": "auto", "count": 2.0},
            ],
            training=[{"seconds": value, "cpu_s": 2.0} for value in (9.0, 1.0, 1.2, 1.1, 4.0, 1.0)],
        )
    )
    (row,) = rows
    told = judge_evidence(
        spec(),
        evidence(rank_evidence(0), program_records=rows),
        attempt=1,
        directory="a",
        artifacts=(),
        metrics={},
        repeat="r",
    )
    assert "square_bytes" not in row
    assert told.cost == StepCost(
        tokens=512,
        layers=2,
        batch=1,
        seconds=1.1,
        error=pytest.approx(1.2533 * 0.2 / 1.349 / 5**0.5 / 1.1),
        cpu_s=2.0,
        cpu_error=0.0,
        steps=5,
        nodes=424,
        bytes=7,
        peak_bytes=8,
        implementations=("cmp fused_cpu", "sel fused_cpu"),
        until_tokens=1024,
    )


def test_a_step_that_was_cut_short_has_told_what_its_graph_has() -> None:
    _, rows = reported_values(
        tables(step_cost=[{"moment": "forward", "batch": 1.0, "seq_len": 64.0, "layers": 1.0, "nodes": 9.0}])
    )
    assert rows == (
        {
            "step_cost": "of the first step",
            "batch": 1.0,
            "seq_len": 64.0,
            "layers": 1.0,
            "nodes": 9.0,
            "implementations": "",
        },
    )
    assert reported_values(tables(step_cost=[{"moment": "forward", "batch": 1.0, "seq_len": 64.0}]))[1] == ()


@given(numbers=st.lists(st.floats(), min_size=3, max_size=6))
def test_whatever_a_table_says_what_a_step_cost_are_finite_numbers(numbers: list[float]) -> None:
    _, rows = reported_values(
        tables(
            step_cost=[{"batch": 1.0, "seq_len": 64.0, "layers": 1.0, "nodes": numbers[0]}],
            fallback_counters=[{"part": "sel", "implementation": "eager", "until_tokens": value} for value in numbers],
            training=[{"seconds": value, "cpu_s": -value} for value in numbers],
        )
    )
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


def test_each_finding_of_a_cost_stands_beside_the_others_in_the_order_of_how_much_it_explains() -> None:
    all_of_it = cost(nodes=10**6, saved_bytes=4e9, square_bytes=3e9)
    assert codes(all_of_it) == ["per_token_nodes", "quadratic_cost", "memory_excess"]


def test_the_loss_on_what_is_held_out_is_told_where_there_is_one() -> None:
    training = [{"step": 1.0, "loss": 5.5}, {"step": 2.0, "loss": 5.0}]
    evaluation = [{"step": 1.0, "loss": 5.6}, {"step": 2.0, "loss": 5.2}]
    metrics, _ = reported_values(tables(training=training, evaluation=evaluation))
    assert (metrics["eval_loss_first"], metrics["eval_loss_last"], metrics["loss_last"]) == (5.6, 5.2, 5.0)
    assert "eval_loss_last" not in reported_values(tables(training=training))[0]
