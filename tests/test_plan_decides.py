"""What the scenarios that ship can decide: each claim has its pair of runs, each gate its runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness.core.comparison.comparison import compared
from nsa_harness.core.comparison.decisions import GateState, decided
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.planning import Invocation, planned

sys.path.append(str(Path(__file__).parent / "core"))
from runs import run

LAPTOP = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")
TWO_GPUS = MachineFacts(host="node8", cpus=16, gpus=("A100", "A100"), torch="2.13.0+cu126")


def healthy(machine: MachineFacts, *tags: str) -> Iterator[Outcome]:
    """Every scenario of these tags as if it had passed on that machine."""
    question = Invocation(words=(), tags=tags, working_dir=Path(__file__).parents[1], environ={})
    for spec in planned(question, machine).specs:
        settings = dict(spec.settings)
        if isinstance(spec, Skip):
            yield run(spec.scenario, Status.SKIP, settings, backend="", device="")
        else:
            told = {"backend": spec.backend, "device": spec.device, "ranks": spec.ranks, "missing_gradients": ()}
            yield run(spec.scenario, Status.PASS, settings, **told)


def silent_gates(machine: MachineFacts, *tags: str) -> set[str]:
    decisions = decided(tuple(healthy(machine, *tags)), PLAYBOOK.gates)
    return {one.gate.name for one in decisions if one.answer.state is GateState.NOT_CHECKABLE}


@pytest.mark.parametrize(
    ("machine", "tags", "silent"),
    [
        (TWO_GPUS, ("plan",), {"attention", "depth", "fsdp"}),
        (LAPTOP, ("plan",), {"attention", "depth", "fsdp", "nccl_only"}),
        (LAPTOP, ("plan", "control", "variants", "sweep"), {"nccl_only"}),
    ],
    ids=["plan on two GPUs", "plan on a laptop", "everything on a laptop"],
)
def test_the_plan_answers_every_gate_of_the_decision_tree(
    machine: MachineFacts, tags: tuple[str, ...], silent: set[str]
) -> None:
    assert silent_gates(machine, *tags) == silent


def test_every_claim_has_a_pair_of_runs_among_the_scenarios() -> None:
    outcomes = tuple(healthy(TWO_GPUS, "plan", "control", "variants", "sweep", "debug", "branch"))
    assert {row.claim.text for row in compared(outcomes, PLAYBOOK.claims) if row.pair is None} == {"FSDP is the cause"}
