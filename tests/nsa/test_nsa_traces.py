"""Traces of the backward pass: what they say is what happened."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nsa_attention.config import CI
from nsa_attention.model import Recompute, TinyLM
from nsa_attention.observe import GradientTrace, ModuleBackwardTrace, ready_buckets, traced_modules
from nsa_attention.parallelize import checkpoint_layers, freeze
from nsa_attention.world import CannotRunError


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
    with pytest.raises(
        CannotRunError, match=r'no parameter matches "block\.\*"; parameter names look like embed\.weight'
    ):
        freeze(model, "block.*")
