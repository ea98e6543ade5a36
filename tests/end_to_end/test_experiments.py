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
# A file of each rank decides who makes the extra call, so the call is an effect.
EFFECT = """
    import pathlib
    pathlib.Path(f"noise{rank}").write_text(str(rank))
    for step in range(40):
        dist.all_reduce(x)
        noise = int(pathlib.Path(f"noise{rank}").read_text())
        if noise > 0 and step == 4:
            counter.add()
        counter.add()
        if counter.n % 4 == 0:
            dist.broadcast(x, 0)
"""
COUNTER = """
class Counter:
    n = 0

    def add(self):
        self.n += 1


counter = Counter()
"""
# Fails in the first runs only, like a race that goes the other way later.
FLAKY = """
    import pathlib
    runs = pathlib.Path("runs")
    count = len(runs.read_text()) if runs.exists() else 0
    dist.barrier()
    if rank == 0:
        runs.write_text("x" * (count + 1))
    limit = 5.5 + (rank if count < FAILURES else 0)
    for step in range(30):
        dist.all_reduce(x)
        if step > limit:
            dist.broadcast(x, 0)
"""
SHARDED = """
    items = list(range(61))[rank::2]
    for item in items:
        dist.all_reduce(x)
"""
PLAN = """
def usable(items):
    kept = []
    for item in items:
        if item % 7:
            kept.append(item)
    return kept


class Plan:
    def __init__(self, rank):
        self.rank = rank
        self.items = list(range(60))

    def of_epoch(self):
        return usable(self.items[self.rank :: 2])


class Source:
    def __init__(self, rank):
        items = list(range(60))
        items = items[rank::2]



        self.items = usable(items)

    def __iter__(self):
        return iter(self.items)
"""
PLANNED = """
    plan = Plan(rank)
    for item in plan.of_epoch():
        dist.all_reduce(x)
"""
DEALT = """
    source = Source(rank)
    for item in source:
        dist.all_reduce(x)
"""
# The number of items comes from a file of each rank, so the list is an effect.
COUNTED = """
    import pathlib
    pathlib.Path(f"count{rank}").write_text(str(30 + rank))
    count = int(pathlib.Path(f"count{rank}").read_text())
    items = list(range(count))
    for item in items:
        dist.all_reduce(x)
"""
CHECK = """
def checked(sample):
    if sample.isnan().any():
        raise ValueError("nan")
    return sample
"""
HANDLED = """
    data = torch.zeros(40, 4)
    if rank == 1:
        data[12] = float("nan")
    for step in range(40):
        try:
            sample = checked(data[step])
        except ValueError:
            continue
        dist.all_reduce(x)
"""
SCORE = """
def score(data):
    return float(data.mean())
"""
SCORED = """
    data = torch.arange(80.0).view(40, 2) + 7 * rank
    for step in range(40):
        dist.all_reduce(x)
        worst = score(data[step])
        if worst > 24:
            dist.broadcast(x, 0)
"""
# The data of a rank are the same, but an object that cannot be read holds the limit of each rank.
LIMIT = """
class Limit:
    __slots__ = ("_value",)

    def __init__(self, rank):
        self._value = lambda: 12 + rank

    def get(self):
        return self._value()
"""
LIMITED = """
    limit = Limit(rank)
    for step in range(40):
        dist.all_reduce(x)
        last = limit.get()
        if step > last:
            dist.broadcast(x, 0)
"""
ROLE = """
    for step in range(40):
        dist.all_reduce(x)
        if step >= 12:
            if rank == 0:
                dist.broadcast(x, 0)
"""
DATABASE = """
    import sqlite3
    sqlite3.connect("shared.db").close()
"""


def why(workspace, body: str, before: str = ""):
    (workspace.directory / "train.py").write_text(before + START + body + END)
    failed = workspace.harness("run", "--script", "train.py")
    assert failed.outcome["verdict"] == "HANG"
    ran = workspace.harness("why", str(failed.run_dir))
    return ran, json.loads((ran.run_dir / "why.json").read_text())


def said(ran) -> str:
    return " ".join(ran.out.split())


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
def test_a_sequence_that_is_longer_on_one_rank_is_cut(workspace):
    ran, answer = why(workspace, SHARDED)
    assert (answer["result"], experiments(answer)) == ("certain", [("equal_length", "origin")]), said(ran)
    assert answer["explanation"]["candidates"][answer["origin"]]["name"] == "items"
    assert "items = items[: min(shared)]" in workspace.harness("why", "--patch", str(ran.run_dir)).out


@pytest.mark.slow
@pytest.mark.parametrize(("program", "dealing"), [(PLANNED, "self.items[self.rank :: 2]"), (DEALT, "items[rank::2]")])
def test_data_that_were_dealt_out_and_then_filtered_lead_to_where_they_were_dealt_out(workspace, program, dealing):
    ran, answer = why(workspace, program, PLAN)
    named = [candidate["place"]["text"] for candidate in answer["explanation"]["candidates"][:3]]
    assert any(dealing in text for text in named), said(ran)


@pytest.mark.slow
def test_a_sequence_that_is_longer_because_of_a_number_is_no_proven_origin(workspace):
    ran, answer = why(workspace, COUNTED)
    assert answer["result"] != "certain" or experiments(answer)[-1][0] == "set_value", said(ran)


@pytest.mark.slow
def test_a_handler_of_one_rank_is_the_origin_if_the_ranks_go_on_without_the_exception(workspace):
    ran, answer = why(workspace, HANDLED, CHECK)
    assert (answer["result"], experiments(answer)) == ("certain", [("force_branch", "origin")]), said(ran)
    origin = answer["explanation"]["candidates"][answer["origin"]]
    assert "except ValueError" in origin["place"]["text"], said(ran)


@pytest.mark.slow
def test_a_number_that_a_function_makes_of_data_is_proven_in_the_function(workspace):
    ran, answer = why(workspace, SCORED, SCORE)
    assert (answer["result"], experiments(answer)) == ("certain", [("set_value", "origin")]), said(ran)
    origin = answer["explanation"]["candidates"][answer["origin"]]
    assert origin["place"]["text"] == "return float(data.mean())", said(ran)
    assert "returns different values on the ranks" in said(ran)


@pytest.mark.slow
def test_a_number_out_of_an_object_that_cannot_be_read_is_no_proven_origin(workspace):
    ran, answer = why(workspace, LIMITED, LIMIT)
    assert answer["result"] == "decision", said(ran)


@pytest.mark.slow
def test_a_role_that_alone_makes_an_operation_of_all_ranks_is_the_origin(workspace):
    ran, answer = why(workspace, ROLE)
    assert (answer["result"], experiments(answer)) == ("certain", [("force_branch", "origin")]), said(ran)
    assert answer["explanation"]["candidates"][answer["origin"]]["place"]["text"] == "if rank == 0:", said(ran)


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


@pytest.mark.slow
def test_an_extra_call_that_is_only_an_effect_is_no_proven_origin(workspace):
    ran, answer = why(workspace, EFFECT, COUNTER)
    assert answer["result"] == "decision", said(ran)
    assert {proof for _, proof in experiments(answer)} == {"decision"}
    assert "this proves the decision, not its origin" in said(ran)


@pytest.mark.slow
def test_a_race_is_told_with_its_rate(workspace):
    ran, answer = why(workspace, FLAKY.replace("FAILURES", "2"))
    assert (answer["result"], experiments(answer)[-1][1]) == ("likely", "race"), said(ran)
    assert "The program fails only sometimes (1 of 2 unchanged runs), so a run that goes on proves nothing." in said(
        ran
    )


@pytest.mark.slow
def test_a_program_whose_second_run_passes_gets_no_experiment(workspace):
    ran, answer = why(workspace, FLAKY.replace("FAILURES", "1"))
    assert (answer["result"], experiments(answer)) == ("passed", []), said(ran)
    assert "NOT REPEATED 0 of 2 recorded runs failed in this way" in said(ran)


@pytest.mark.slow
def test_a_program_that_writes_to_a_database_gets_no_experiment(workspace):
    ran, answer = why(workspace, DATABASE + MEASURED)
    assert (answer["result"], experiments(answer)) == ("likely", []), said(ran)
    assert "the program uses the database shared.db; no experiment is made without --experiment" in said(ran)
