"""What is planted into the plan can be planted there, and its answers are held against what is then true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import failed_in, run, sure

from evaluation import plan_truth
from evaluation.experiments import PAGES
from evaluation.plan_truth import EXPERIMENT, Plant
from nsa_harness.core.comparison.hypotheses import hypothesis_rows
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.core.scenario.layers import layers_of
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches

LAPTOP = MachineFacts(host="laptop", cpus=2, gpus=(), torch="2.13.0+cpu")
BOX = MachineFacts(host="box", cpus=16, gpus=("A100", "A100"), torch="2.13.0+cu126")
KNOWN = EXPERIMENT.load()
PLANTS = tuple(plan_truth.PLANTS.values())

DDP = "DDP is the cause"
RANKS = "more than one rank is the cause"
GC = "gradient checkpointing is the cause"
ATTENTION = "NSA's attention is the cause"
SELECTION = "the selection branch is the cause"
NCCL = "NCCL is the cause"


def test_names_are_given_once_and_each_fault_is_another_one() -> None:
    assert len({plant.name for plant in PLANTS}) == len({plant.words for plant in PLANTS}) == len(PLANTS)


# Each kind of words once; the others take the same path.
QUICK = ("layer_7_on", "selection_slow", "ready_twice")
EACH = [plant if plant.name in QUICK else pytest.param(plant, marks=pytest.mark.slow) for plant in PLANTS]


@pytest.mark.parametrize("plant", EACH, ids=lambda plant: plant.name)
def test_what_is_planted_reaches_every_run_of_the_plan(plant: Plant) -> None:
    question = Invocation(arguments=plant.words, tags=("plan",), working_dir=Path(__file__).parent, environ={})
    specs = [spec for spec in plan_launches(question, LAPTOP).specs if isinstance(spec, RunSpec)]
    kinds = {spec.fault.kind if spec.fault else None for spec in specs}
    word = next((word.partition("=")[2] for word in plant.words if word.startswith("fault.kind=")), None)
    assert len(specs) >= 8
    assert kinds == {word}


def cell(*rows: tuple[str, str], gpus: int = 0) -> dict[str, Any]:
    told = [{"text": text, "answer": answer, "runs": []} for text, answer in rows]
    return {"hypotheses": told, "gpus": gpus, "runs": {"a": "HANG livelock", "b": "PASS"}, "seconds": 61.4}


SELECTED, OVER_NCCL = plan_truth.PLANTS["selection"], plan_truth.PLANTS["nccl"]


@pytest.mark.parametrize(
    ("plant", "found", "wrong"),
    [
        (SELECTED, cell((SELECTION, "supported"), (ATTENTION, "supported"), (GC, "refuted")), []),
        (SELECTED, cell((SELECTION, "supported"), (ATTENTION, "not tested"), (GC, "undecided")), []),
        (SELECTED, cell((SELECTION, "supported"), (GC, "supported")), [f"wrongly supported: {GC}"]),
        (SELECTED, cell((SELECTION, "refuted")), [f"wrongly refuted: {SELECTION}"]),
        (SELECTED, cell((SELECTION, "supported"), (ATTENTION, "refuted")), [f"wrongly refuted: {ATTENTION}"]),
        (SELECTED, cell((SELECTION, "not tested")), [f"not supported: {SELECTION}"]),
        (SELECTED, cell((SELECTION, "supported"), (SELECTION, "refuted")), []),
        (PLANTS[0], cell((DDP, "refuted"), (RANKS, "not tested")), []),
        (PLANTS[0], cell((DDP, "supported")), [f"wrongly supported: {DDP}"]),
        (OVER_NCCL, cell((DDP, "refuted")), []),
        (OVER_NCCL, cell((DDP, "refuted"), gpus=2), [f"not supported: {NCCL}"]),
    ],
)
def test_each_answer_is_held_against_the_truth(plant: Plant, found: dict[str, Any], wrong: list[str]) -> None:
    assert plan_truth.mistakes(plant, found) == wrong


CAUSES = {
    "deadlock": (Status.HANG, "backward_function_blocked"),
    "raise": (Status.FAIL, "exception"),
    "slow_step": (Status.FAIL, "slow"),
    "sigkill": (Status.FAIL, "killed"),
}


def acts(spec: RunSpec) -> bool:
    """Whether its fault happens, as harness/nsa_harness/faults would find in the model and the job."""
    if spec.fault is None:
        return False
    when, of = spec.fault.when, {"parallel.wrapper": "ddp", "gc.layers": "none", "model.branch": "all"}
    of |= {**dict(spec.settings), **dict(spec.chosen)}
    if when is None:
        return True
    layers, wrapper = int(of["model.layers"]), of["parallel.wrapper"]
    modules = {"DistributedDataParallel"} if wrapper == "ddp" else set()
    if of.get("model.attention", "nsa") == "nsa":
        modules |= {"NSAttention"} | ({"SelectedBranch"} if of["model.branch"] in ("all", "sel") else set())
    again = set(layers_of(of["gc.layers"], layers))
    told = {name: of.get(f"parallel.{name}", "false") == "true" for name in ("static_graph", "find_unused_parameters")}
    return (
        (when.module is None or when.module in modules)
        and layers >= (when.layers or 0)
        and spec.ranks >= (when.ranks or 0)
        and when.backend in (None, spec.backend)
        and len(again) >= (when.recomputed_layers or 0)
        and (not when.any_recomputed or bool(again & set(when.any_recomputed)))
        and all(getattr(when, key) in (None, value if wrapper == "ddp" else "none") for key, value in told.items())
    )


def without_fault(spec: RunSpec) -> tuple[Status, str | None]:
    """How a healthy run ends: torch's DDP cannot train with this one combination."""
    of = {"parallel.wrapper": "ddp", **dict(spec.settings)}
    is_reentrant = of.get("gc.layers", "none") != "none" and of.get("gc.mode") == "reentrant"
    under_ddp = of["parallel.wrapper"] == "ddp" and of.get("parallel.find_unused_parameters") == "true"
    under_ddp &= of.get("parallel.static_graph") != "true"
    return (Status.FAIL, "ready_twice") if is_reentrant and under_ddp else (Status.PASS, None)


def as_planted(plant: Plant, machine: MachineFacts) -> tuple[Outcome, ...]:
    """The plan's runs, each ended as the fault makes it end."""
    found = []
    question = Invocation(arguments=plant.words, tags=("plan",), working_dir=Path(__file__).parent, environ={})
    for spec in plan_launches(question, machine).specs:
        if isinstance(spec, Skip):
            found.append(run(spec.scenario, Status.SKIP, dict(spec.settings), backend="", device=""))
            continue
        status, cause = CAUSES[spec.fault.kind] if spec.fault and acts(spec) else without_fault(spec)
        told = {"chosen": spec.chosen, "backend": spec.backend, "device": spec.device, "ranks": spec.ranks}
        ended = run(spec.scenario, status, dict(spec.settings), cause=cause, missing_gradients=(), **told)
        found.append(ended if cause is None else sure(replace(ended, culprit=failed_in(1))))
    return tuple(found)


# With a GPU for each rank every run has twelve layers: none tells of fewer.
ENDED = [
    pytest.param(plant, machine, marks=pytest.mark.slow if machine is BOX else ())
    for plant in PLANTS
    for machine in (LAPTOP, BOX)
    if (plant.name, machine) != ("five_layers", BOX)
]


@pytest.mark.parametrize(("plant", "machine"), ENDED, ids=lambda one: getattr(one, "name", None) or one.host)
def test_where_runs_end_as_planted_the_true_hypothesis_is_supported_and_no_other(plant: Plant, machine: MachineFacts):
    rows = hypothesis_rows(as_planted(plant, machine), PLAYBOOK.hypotheses)
    told = [{"text": row.hypothesis.text, "answer": row.answer.value} for row in rows]
    assert plan_truth.mistakes(plant, {"gpus": len(machine.gpus), "hypotheses": told}) == []


def test_what_was_run_is_not_run_again_unless_it_is_planted_otherwise_since() -> None:
    first, *others = PLANTS
    cells = {plant.name: {"planted": plan_truth.digest(plant)} for plant in others} | {first.name: {"planted": "else"}}
    assert EXPERIMENT.due(cells) == [first.name]
    assert EXPERIMENT.due(cells, "find_unused_*") == ["find_unused_off", "find_unused_on"]


def test_the_report_of_a_run_is_read_as_what_it_says() -> None:
    side = {"scenario": "manual_average", "bad": 0, "of": 1}
    row = {
        "text": DDP,
        "answer": "supported",
        "because": "breaks it",
        "control": side,
        "changed": None,
        "command": None,
    }
    ended = {"scenario": "ddp_gloo", "verdict": "HANG", "cause": "lock_cycle", "final": True}
    report = {
        "machine": {"gpus": []},
        "outcomes": [ended, {**ended, "final": False}, {**ended, "scenario": "b", "verdict": "PASS", "cause": None}],
        "detail": {"hypotheses": [row]},
    }
    assert plan_truth.answers_in(report) == {
        "gpus": 0,
        "runs": {"ddp_gloo": "HANG lock_cycle", "b": "PASS"},
        "hypotheses": [{"text": DDP, "answer": "supported", "runs": ["manual_average"]}],
    }


def test_the_page_has_a_row_for_each_plant_and_a_line_for_each_mistake() -> None:
    told = plan_truth.section({"cells": {"selection": cell((SELECTION, "supported"), (GC, "supported"))}})
    assert (
        "| the selection branch fails in backward | the selection branch is the cause |"
        " the selection branch is the cause; gradient checkpointing is the cause | 0 | 1 HANG livelock of 2 | 61 |"
    ) in told
    assert f"1 of {len(PLANTS)} plans run: 0 right." in told
    assert f"- `selection`: wrongly supported: {GC}." in told


def test_the_stored_cells_are_of_plants_as_they_are_and_the_page_says_what_they_say() -> None:
    cells = KNOWN["cells"]
    assert set(cells) <= set(EXPERIMENT.cases)
    assert [name for name, cell in cells.items() if not EXPERIMENT.is_current(name, cell)] == []
    assert "\n".join(plan_truth.section(KNOWN)) in (PAGES / "accuracy.md").read_text()
