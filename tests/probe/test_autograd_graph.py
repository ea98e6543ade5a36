"""The first backward pass is counted, in nodes, once; the program's own gradients are what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa_harness import protocol
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.probe import autograd
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.status_file import StatusFileWriter


@pytest.fixture
def board(tmp_path: Path) -> StatusFileWriter:
    return StatusFileWriter(str(tmp_path / "7.board"), rank=0, world_size=1)


def nodes(path: Path) -> int | None:
    return parse((path / "7.board").read_bytes(), 0).autograd_nodes


def loop(turns: int) -> torch.Tensor:
    total = torch.ones(3, requires_grad=True)
    for _ in range(turns):
        total = total + 1
    return total.sum()


def test_a_loop_over_tokens_shows_as_a_node_a_turn() -> None:
    few, many = autograd.count_nodes([loop(10).grad_fn]), autograd.count_nodes([loop(1010).grad_fn])
    assert many - few == 1000


def test_a_graph_without_end_is_counted_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "NODES_LIMIT", 50)
    assert autograd.count_nodes([loop(1000).grad_fn]) == 50


def test_the_first_backward_pass_is_counted_and_the_wrapper_leaves(board: StatusFileWriter, tmp_path: Path) -> None:
    original = torch.autograd.backward
    autograd.watch_graph(torch, board, TroubleLog(str(tmp_path)))
    try:
        assert torch.autograd.backward is not original
        expected = autograd.count_nodes([loop(5).grad_fn])
        loop(5).backward()
        assert torch.autograd.backward is original
        loop(500).backward()
    finally:
        torch.autograd.backward = original
    assert nodes(tmp_path) == expected


def test_a_graph_that_cannot_be_counted_is_noted_and_the_gradients_come(
    board: StatusFileWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.autograd.backward
    monkeypatch.setattr(autograd, "count_nodes", lambda _: 1 // 0)
    autograd.watch_graph(torch, board, TroubleLog(str(tmp_path)))
    try:
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
    finally:
        torch.autograd.backward = original
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    assert nodes(tmp_path) is None
    assert "autograd nodes" in next(tmp_path.glob("*.trouble.jsonl")).read_text()
