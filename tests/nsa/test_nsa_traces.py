"""Traces and tables: what they say is what happened."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nsa_harness.nsa.attention import BlockSelector, GateMLP
from nsa_harness.nsa.config import CI
from nsa_harness.nsa.model import Recompute, TinyLM
from nsa_harness.nsa.observe import (
    GradientTrace,
    ModuleBackwardTrace,
    Observer,
    gate_rows,
    ready_buckets,
    selection_row,
    traced_modules,
)
from nsa_harness.nsa.parallelize import checkpoint_layers, freeze
from nsa_harness.nsa.telemetry import StepResult, Telemetry, memory_text, peak_rss_bytes, rss_bytes
from nsa_harness.nsa.world import CannotRunError, World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)


@pytest.fixture
def model() -> TinyLM:
    return TinyLM.from_config(replace(CI, layers=2))


def backward(model: nn.Module) -> None:
    model(torch.randint(256, (1, 64))).logsumexp(-1).mean().backward()


def test_every_parameter_arrives_in_a_healthy_step(
    model: TinyLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = GradientTrace(model.named_parameters(), tmp_path / "order.jsonl")
    backward(model)
    trace.after_backward(1)
    assert capsys.readouterr().out == "[GRAD-TRACE] after_backward_step1 arrived=56 missing=0\n"
    assert len(list(model.parameters())) == 56


def test_a_frozen_parameter_is_missing_by_name(
    model: TinyLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = freeze(model, "blocks.1.attn.gate_mlp.*s*")
    trace = GradientTrace(model.named_parameters(), tmp_path / "order.jsonl")
    backward(model)
    trace.after_backward(7)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"[GRAD-TRACE] after_backward_step7 arrived={56 - len(frozen)} missing={len(frozen)}"
    assert lines[1:] == [f"  - MISSING: {name}" for name in frozen]
    assert "  - MISSING: blocks.1.attn.gate_mlp.bias" in lines


def test_an_unused_parameter_is_missing_though_it_is_trainable(
    model: TinyLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.register_parameter("idle", nn.Parameter(torch.zeros(1)))
    trace = GradientTrace(model.named_parameters(), tmp_path / "order.jsonl")
    backward(model)
    trace.after_backward(1)
    assert capsys.readouterr().out.splitlines()[1:] == ["  - MISSING: idle"]


def test_each_step_is_counted_afresh_and_an_order_is_kept_once(
    model: TinyLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = GradientTrace(model.named_parameters(), tmp_path / "order.jsonl")
    for step in (1, 2):
        backward(model)
        trace.after_backward(step)
    trace.after_backward(3)
    counts = re.findall(r"arrived=(\d+) missing=(\d+)", capsys.readouterr().out)
    assert counts == [("56", "0"), ("56", "0"), ("0", "56")]
    records = [json.loads(line) for line in (tmp_path / "order.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 3]
    assert records[0]["arrived"][0] == "norm.weight"
    assert records[0]["arrived"][-1] == "embed.weight"


def test_a_bucket_is_ready_with_the_last_of_its_gradients() -> None:
    held = {0: ["a", "d"], 1: ["b", "c"], 2: ["e", "never"]}
    assert ready_buckets(["a", "b", "c", "d", "e"], held) == [
        {"bucket": 1, "parameters": 2, "last": "c"},
        {"bucket": 0, "parameters": 2, "last": "d"},
        {"bucket": 2, "parameters": 2, "last": "never"},
    ]


@given(st.permutations(range(12)), st.integers(1, 12))
def test_the_bucket_of_the_last_gradient_is_the_last_one_ready(arrived: list[int], size: int) -> None:
    names = [str(number) for number in arrived]
    held = {start: [str(one) for one in range(start, min(start + size, 12))] for start in range(0, 12, size)}
    order = ready_buckets(names, held)
    assert sorted(one["bucket"] for one in order) == sorted(held)
    assert [names.index(one["last"]) for one in order] == sorted(names.index(one["last"]) for one in order)
    assert order[-1]["last"] == names[-1]


def test_the_buckets_of_a_step_stand_beside_the_order_of_its_gradients(model: TinyLM, tmp_path: Path) -> None:
    by_name = dict(model.named_parameters())
    steps = iter([{0: [by_name["norm.weight"]], 1: [by_name["embed.weight"]]}, {}])
    trace = GradientTrace(model.named_parameters(), tmp_path / "order.jsonl", lambda: next(steps))
    for step in (1, 2):
        backward(model)
        trace.after_backward(step)
    first, second = map(json.loads, (tmp_path / "order.jsonl").read_text(encoding="utf-8").splitlines())
    assert [(one["bucket"], one["last"]) for one in first["buckets"]] == [(0, "norm.weight"), (1, "embed.weight")]
    assert (second["step"], "buckets" in second) == (2, False)


@pytest.mark.parametrize("mode", [None, *Recompute])
def test_the_backward_pass_is_followed_from_the_last_block_to_the_first(
    model: TinyLM, mode: Recompute | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if mode is not None:
        checkpoint_layers(model, {0, 1}, mode)
    ModuleBackwardTrace(traced_modules(model)).step = 4
    backward(model)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[MODULE-BWD] step=4 blocks.") for line in lines)
    assert lines[0] == "[MODULE-BWD] step=4 blocks.1"
    assert len([line for line in lines if line.endswith((".cmp", ".sel", ".win"))]) == 6
    blocks = [line for line in lines if re.fullmatch(r"\[MODULE-BWD\] step=4 blocks\.\d", line)]
    assert list(dict.fromkeys(blocks)) == ["[MODULE-BWD] step=4 blocks.1", "[MODULE-BWD] step=4 blocks.0"]


def test_a_module_that_writes_in_place_survives_the_backward_trace() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.add_(1)

    module = nn.Sequential(nn.Linear(3, 3), InPlace())
    ModuleBackwardTrace(module.named_modules())
    module(torch.randn(2, 3)).add_(1).sum().backward()
    assert module[0].weight.grad is not None


def test_freezing_nothing_is_an_error_that_shows_a_name(model: TinyLM) -> None:
    with pytest.raises(CannotRunError, match=r'no parameter matches "block\.\*"; parameters look like embed\.weight'):
        freeze(model, "block.*")


def test_selection_statistics_count_different_blocks() -> None:
    # Four queries, l' = 2: blocks 0 0 1 1. Row 1 repeats a block, row 2 has an empty place in the middle.
    indices = torch.tensor([[[[0, -1, -1], [0, 0, -1], [0, -1, 1], [1, 0, -1]]]])
    row = selection_row("3", indices, select_len=2)
    assert (row.layer, row.least, row.most) == ("3", 1, 2)
    assert row.mean == pytest.approx(1.5)
    assert row.forced_share == 1.0
    assert row.empty_share == pytest.approx(5 / 12)


def test_a_choice_that_is_not_forced_lowers_the_forced_share() -> None:
    indices = torch.tensor([[[[0, 4, 3, 2]]]]).expand(1, 1, 10, 4)[:, :, 9:]
    indices = torch.cat([torch.full((1, 1, 9, 4), -1), indices], 2)
    assert selection_row("0", indices, select_len=2).forced_share == pytest.approx(3 / 4)


def test_a_closed_gate_shows_in_the_table() -> None:
    gates = torch.cat([torch.full((1, 8), 0.001), torch.full((1, 8), 0.5)])
    closed, half = gate_rows("0", gates, ["cmp", "win"])
    assert (closed.branch, closed.saturated_share) == ("cmp", 1.0)
    assert (half.branch, half.saturated_share, half.deviation) == ("win", 0.0, 0.0)


def test_an_observer_leaves_no_hook_behind(model: TinyLM) -> None:
    observer = Observer(model)
    observer.watch()
    backward(model)
    observer.release()
    assert [row.layer for row in observer.selections()] == ["0", "1"]
    assert [(row.layer, row.branch) for row in observer.gates()][:3] == [("0", "cmp"), ("0", "sel"), ("0", "win")]
    assert observer.activation_dtypes()["blocks.0.attn.sel"] == "torch.float32"
    watched = [module for module in model.modules() if isinstance(module, BlockSelector | GateMLP)]
    assert all(not module._forward_hooks for module in watched)


@pytest.fixture
def telemetry(model: TinyLM, tmp_path: Path) -> Iterator[Telemetry]:
    result = Telemetry(tmp_path, ALONE, model, mem_dump_every=2, steps=2)
    yield result
    result.close()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_tables_are_on_disk_before_the_run_ends(telemetry: Telemetry, model: TinyLM, tmp_path: Path) -> None:
    for step in (1, 2):
        telemetry.begin(step)
        backward(model)
        result = StepResult(step=step, phase="step", tokens=64, seconds=0.5, loss=2.0, mean_loss=2.5, grad_norm=1.0)
        telemetry.end(result)
    training = rows(tmp_path / "training.csv")
    expected = [("1", "2.5", "128"), ("2", "2.5", "128")]
    assert [(row["step"], row["loss"], row["tokens_per_s"]) for row in training] == expected
    assert int(training[0]["peak_rss_bytes"]) > 10**7
    assert [(row["step"], row["layer"]) for row in rows(tmp_path / "k_stats.csv")] == [("1", "0"), ("1", "1")]
    assert len(rows(tmp_path / "gate_health.csv")) == 6
    counters = {row["part"]: row for row in rows(tmp_path / "fallback_counters.csv")}
    assert set(counters) == {"cmp", "chooser", "sel", "win", "gate_mlp"}
    assert {row["implementation"] for part, row in counters.items() if part in ("cmp", "sel", "win")} == {"fused_cpu"}
    assert {counters[part]["implementation"] for part in ("chooser", "gate_mlp")} == {"eager"}
    assert {row["count"] for row in counters.values()} == {"2"}  # two layers, as of the sampled step
    beats = [json.loads(line) for line in (tmp_path / "heartbeat_rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(beat["step"], beat["phase"], beat["loss"]) for beat in beats] == [
        (0, "start", None),
        (1, "step", 2.0),
        (2, "step", 2.0),
    ]
    assert sorted(path.name for path in tmp_path.glob("mem_*")) == ["mem_rank0_step0.txt", "mem_rank0_step2.txt"]


def test_the_dtype_audit_counts_what_is_there(telemetry: Telemetry, model: TinyLM, tmp_path: Path) -> None:
    freeze(model, "blocks.0.mlp.*")
    model.blocks[1].mlp.double()
    telemetry.begin(1)
    optimizer = torch.optim.AdamW([model.norm.weight])
    model.norm.weight.grad = torch.zeros_like(model.norm.weight)
    optimizer.step()
    telemetry.audit_dtypes(optimizer)
    report = (tmp_path / "dtypes_report.txt").read_text(encoding="utf-8").splitlines()
    assert report[:2] == ["parameters torch.float32 53", "parameters torch.float64 3"]
    assert "gradients torch.float32 1" in report
    assert "optimizer torch.float32 3" in report


def test_only_the_first_rank_writes_the_common_tables(model: TinyLM, tmp_path: Path) -> None:
    second = replace(ALONE, rank=1)
    telemetry = Telemetry(tmp_path, second, model, mem_dump_every=0, steps=1)
    telemetry.begin(1)
    telemetry.end(StepResult(step=1, phase="step", tokens=1, seconds=1.0))
    telemetry.close()
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat_rank1.jsonl"]


def test_a_memory_dump_names_the_largest_tensors() -> None:
    kept = torch.zeros(1234, 567)
    text = memory_text(torch.device("cpu"))
    assert f"{kept.numel() * 4} 1 (1234, 567) torch.float32 cpu" in text
    assert 0 < rss_bytes() <= peak_rss_bytes() * 1.01
