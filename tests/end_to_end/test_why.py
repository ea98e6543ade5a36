"""`nsa-harness why` under torchrun: a state that an extra call changes, an early stop by the rank's own loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
# The preview on rank 0 advances a counter that all ranks use to decide when to synchronize.
LEAK = """
import torch
import torch.distributed as dist


class Sampler:
    def __init__(self):
        self.drawn = 0

    def draw(self):
        self.drawn += 1
        return self.drawn


def preview(sampler):
    return sampler.draw()


def train(rank, sampler):
    for step in range(12):
        number = sampler.draw()
        if rank == 0 and step == 4:
            preview(sampler)
        if number % 3 == 0:
            dist.all_reduce(torch.ones(1))
    dist.barrier()


dist.init_process_group("gloo")
train(dist.get_rank(), Sampler())
dist.destroy_process_group()
"""
EARLY_STOP = """
import torch
import torch.distributed as dist


def validate(rank, step):
    return 1.0 / (1 + step) if rank == 0 or step < 3 else 1.0


def train(rank):
    best, bad = float("inf"), 0
    for step in range(20):
        dist.all_reduce(torch.ones(1))
        loss = validate(rank, step)
        bad = bad + 1 if loss >= best else 0
        best = min(best, loss)
        if bad >= 3:
            break
    dist.barrier()


dist.init_process_group("gloo")
train(dist.get_rank())
dist.destroy_process_group()
"""


# Only the worker of rank 1 meets a sample that never has enough mass.
SPINNING_WORKER = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    def __init__(self, rank):
        self.mass = [1.0] * 6
        if rank == 1:
            self.mass[4] = 0.0

    def __len__(self):
        return len(self.mass)

    def __getitem__(self, index):
        while True:
            crop = torch.rand(4) * self.mass[index]
            if crop.sum() > 0:
                return crop


dist.init_process_group("gloo")
for batch in DataLoader(Crops(dist.get_rank()), num_workers=1):
    dist.all_reduce(batch.sum())
dist.destroy_process_group()
"""
HEAD_TOO_LATE = """
import torch
import torch.distributed as dist
from torch import nn


class Average:
    def __init__(self, model):
        self.parameters = list(model.parameters())

    def average(self):
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


def build():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    average = Average(model)
    model.head = nn.Linear(4, 1)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model, average


def train(rank, model, average):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        (model(torch.randn(4, 4)) - rank).square().mean().backward()
        average.average()
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
torch.manual_seed(0)
train(dist.get_rank(), *build())
dist.barrier()
dist.destroy_process_group()
"""


def line_of(program: str, text: str) -> int:
    return next(number for number, line in enumerate(program.splitlines(), start=1) if text in line)


def answer(workspace, program: str):
    (workspace.directory / "train.py").write_text(program)
    failed = workspace.harness("run", "--script", "train.py")
    assert failed.outcome["verdict"] in ("HANG", "FAIL")
    ran = workspace.harness("why", str(failed.run_dir))
    return ran, json.loads((ran.run_dir / "why.json").read_text())


@pytest.mark.slow
def test_the_extra_call_that_changes_a_counter_is_found_and_proven(workspace):
    ran, why = answer(workspace, LEAK)
    lines = [one["place"]["line"] for one in why["explanation"]["candidates"]]
    origins = {line_of(LEAK, "self.drawn += 1"), line_of(LEAK, "            preview(sampler)")}
    assert ran.code == 0
    assert origins & set(lines[:3]), why["claim"]
    assert why["result"] == "certain"
    assert lines[why["origin"]] in origins
    assert "## Why train of" in (ran.run_dir / "SUMMARY.md").read_text()


@pytest.mark.slow
def test_an_early_stop_by_the_loss_of_one_rank_is_explained_from_its_origin(workspace):
    ran, why = answer(workspace, EARLY_STOP)
    lines = [one["place"]["line"] for one in why["explanation"]["candidates"]]
    origins = {
        line_of(EARLY_STOP, text) for text in ("return 1.0 /", "loss = validate", "bad = bad + 1", "if bad >= 3")
    }
    assert ran.code == 0
    assert origins & set(lines[:3]), why["claim"]
    assert why["result"] in ("certain", "decision", "likely")
    assert why["explanation"]["division"]["place"]["line"] == line_of(EARLY_STOP, "if bad >= 3")


@pytest.mark.slow
def test_a_program_that_does_not_fail_again_is_told_so_and_a_healthy_run_has_no_why(workspace):
    (workspace.directory / "train.py").write_text(EARLY_STOP)
    failed = workspace.harness("run", "--script", "train.py")
    (workspace.directory / "train.py").write_text(EARLY_STOP.replace("step < 3", "True"))
    ran = workspace.harness("why", str(failed.run_dir), "--repeat", "1")
    why = json.loads((ran.run_dir / "why.json").read_text())
    assert (ran.code, why["result"], why["explanation"]) == (125, "passed", None)
    assert ran.report["outcomes"][0]["findings"] == []
    healthy = workspace.harness("run", "--script", "train.py")
    assert workspace.harness("why", str(healthy.run_dir)).code == 2


@pytest.mark.slow
def test_a_worker_that_never_ends_is_named_with_its_rank(workspace):
    (workspace.directory / "train.py").write_text(SPINNING_WORKER)
    failed = workspace.harness("run", "--script", "train.py", "limits.deadline_s=30")
    ran = workspace.harness("why", str(failed.run_dir), "--no-experiment", "--repeat", "1")
    why = json.loads((ran.run_dir / "why.json").read_text())
    loop = range(line_of(SPINNING_WORKER, "while True"), line_of(SPINNING_WORKER, "return crop"))
    assert any(end[2] == "its DataLoader worker 0" for end in why["explanation"]["ends"])
    assert why["explanation"]["candidates"][0]["place"]["line"] in loop
    assert why["explanation"]["candidates"][0]["ranks"] == [1]
    assert list(ran.run_dir.glob("*/rank1/recording-*.gz"))


@pytest.mark.slow
def test_a_run_that_passed_with_a_silent_fault_is_explained_and_its_healthy_twin_is_not(workspace):
    (workspace.directory / "train.py").write_text(HEAD_TOO_LATE)
    passed = workspace.harness("run", "--script", "train.py")
    assert [finding["code"] for finding in passed.outcome["findings"]] == ["replica_divergence"]
    ran = workspace.harness("why", str(passed.run_dir))
    why = json.loads((ran.run_dir / "why.json").read_text())
    assert (ran.code, why["result"]) == (0, "likely")
    candidate = why["explanation"]["candidates"][0]
    assert (candidate["kind"], candidate["place"]["line"]) == (
        "stale_parameters", line_of(HEAD_TOO_LATE, "model.head = "),
    )  # fmt: skip
    collected = "    average = Average(model)\n"
    twin = HEAD_TOO_LATE.replace(collected, "").replace(
        "    for parameter in model.p", f"{collected}    for parameter in model.p"
    )
    (workspace.directory / "train.py").write_text(twin)
    healthy = workspace.harness("run", "--script", "train.py")
    assert healthy.outcome["findings"] == []
    assert workspace.harness("why", str(healthy.run_dir)).code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "kind", "statement"),
    [
        ("silent_replicas_not_written_back", "discarded_result", "dist.all_reduce(sent)"),
        ("silent_buffers_of_own_load", "skipped_collective", "if self.is_summed:"),
        ("silent_replicas_head_late", "stale_parameters", "model.head = nn.Linear(1, 1)"),
    ],
)
def test_the_statement_that_leaves_replicas_unequal_is_named(workspace, program, kind, statement):
    for name in (program, "_job"):
        (workspace.directory / f"{name}.py").write_text((FAULTS / f"{name}.py").read_text())
    passed = workspace.harness("run", "--script", f"{program}.py", "--", "fault")
    assert [finding["code"] for finding in passed.outcome["findings"]] == ["replica_divergence"]
    ran = workspace.harness("why", str(passed.run_dir))
    why = json.loads((ran.run_dir / "why.json").read_text())
    candidate = why["explanation"]["candidates"][0]
    line = (FAULTS / f"{program}.py").read_text().splitlines()[candidate["place"]["line"] - 1]
    assert (ran.code, candidate["kind"], line.strip()) == (0, kind, statement)
