"""Experiments of `nsa-harness why` under torchrun: generators, values and branches, and a second cause."""

from __future__ import annotations

import json

import pytest

START = """
import random
import torch
import torch.distributed as dist


def sample(rank):
    if rank == 0:
        print("sample", random.random() > 2)


def report(x):
    dist.reduce(x, 0)


def main():
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(3)
    random.seed(3)
"""
END = """
    dist.barrier()
    dist.destroy_process_group()


main()
"""
DRAWN = """
    for step in range(30):
        if step % 8 == 7:
            sample(rank)
        if random.random() < 0.3:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)
"""
MEASURED = """
    limit = 5.5 + rank
    for step in range(30):
        dist.all_reduce(x)
        if step > limit:
            dist.broadcast(x, 0)
"""
REPORTED = """
    for step in range(30):
        dist.all_reduce(x)
        if rank == 0 and step == 12:
            report(x)
"""
TWICE = """
    limit = 5 + rank
    for step in range(30):
        dist.all_reduce(x)
        if step == limit:
            dist.barrier()
        other = 8 - rank
        if step == other:
            dist.broadcast(x, 0)
"""


def why(workspace, body: str):
    (workspace.directory / "train.py").write_text(START + body + END)
    failed = workspace.harness("run", "--script", "train.py")
    assert failed.outcome["verdict"] == "HANG"
    ran = workspace.harness("why", str(failed.run_dir))
    return ran, json.loads((ran.run_dir / "why.json").read_text())


def experiments(answer) -> list[tuple[str, str]]:
    return [(run["experiment"], run["proof"]) for run in answer["runs"] if run["experiment"]]


@pytest.mark.slow
def test_an_extra_draw_is_undone_and_the_patch_keeps_the_state(workspace):
    ran, answer = why(workspace, DRAWN)
    assert (answer["result"], experiments(answer)) == ("certain", [("undo_leak", "origin")])
    assert "random.setstate(kept)" in workspace.harness("why", "--patch", str(ran.run_dir)).out


@pytest.mark.slow
def test_a_value_of_one_rank_is_given_to_all(workspace):
    _, answer = why(workspace, MEASURED)
    assert answer["result"] in ("certain", "decision")
    assert experiments(answer)[-1][0] == "set_value"


@pytest.mark.slow
def test_a_forced_branch_proves_only_the_decision(workspace):
    _, answer = why(workspace, REPORTED)
    assert answer["result"] == "decision"
    assert experiments(answer) == [("force_branch", "decision")]


@pytest.mark.slow
def test_a_second_cause_is_no_proof_of_the_first(workspace):
    _, answer = why(workspace, TWICE)
    assert answer["result"] not in ("certain", "decision")
    assert "second_cause" in {proof for _, proof in experiments(answer)}
