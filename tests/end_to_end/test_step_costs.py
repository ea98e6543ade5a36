"""Real torchrun: what makes a step slow or large is told by that step, and its healthy twin has no such finding."""

from __future__ import annotations

import pytest

from .conftest import Workspace

# Lengths that are no width of the model, so that tensors of T x T are told from others.
SMALL = ("model.layers=2", "model.seq_len=576", "train.batch=1", "trace.step_cost=true")


def codes(workspace: Workspace, *keys: str) -> dict[str, str]:
    ran = workspace.harness("run", "ddp_onestep", *SMALL, *keys, "--json")
    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS")
    return {one["code"]: one["claim"] for one in ran.outcome["findings"]}


@pytest.mark.slow
def test_the_seeds_loop_over_tokens_is_told_by_its_first_step(workspace: Workspace) -> None:
    told = codes(workspace, "model.impl=per_token")
    assert set(told) == {"per_token_nodes"}
    assert "for each of 576 tokens in each of 2 layers: the program computes token by token" in told["per_token_nodes"]


@pytest.mark.slow
def test_the_seeds_memory_is_told_as_a_square_and_as_more_than_the_shape_needs(workspace: Workspace) -> None:
    told = codes(workspace, "model.impl=dense", "model.seq_len=1440")
    assert set(told) == {"quadratic_cost", "memory_excess"}
    assert "are tensors with a row and a column for each of 1440 tokens" in told["quadratic_cost"]


@pytest.mark.slow
def test_the_healthy_twin_has_neither(workspace: Workspace) -> None:
    assert codes(workspace) == {}
    assert codes(workspace, "model.seq_len=1440") == {}


@pytest.mark.slow
def test_growth_is_followed_to_its_line_by_a_second_run(workspace: Workspace) -> None:
    """A list that keeps what each step computed: no step fails, and the memory is of the line that made it."""
    program = workspace.directory / "leaks.py"
    program.write_text(LEAKS)
    ran = workspace.harness("run", str(program), "--ranks", "2", "--deepen")
    (found,) = [one for one in ran.report["outcomes"][0]["findings"] if one["code"] == "deepened"]
    statement = LEAKS.splitlines()[found["place"]["line"] - 1].strip()
    assert statement == "features = inputs.repeat(1, 4).sin()"
    assert found["claim"].startswith("with tracemalloc, and the objects alive after two steps (attempt 2) ")


LEAKS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
history = []
for _ in range(160):
    inputs = torch.randn(512, 64)
    features = inputs.repeat(1, 4).sin()
    model(features).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(features)
dist.destroy_process_group()
"""
