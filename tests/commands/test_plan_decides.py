"""What the scenarios that ship can decide: each claim has its pair of runs, each gate its runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import PLAN, run

from nsa_harness.core.comparison.decisions import answer_rules
from nsa_harness.core.comparison.hypotheses import HypothesisAnswer, hypothesis_rows
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import MachineFacts, Outcome, RuleState, Status
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches

LAPTOP = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")
TWO_GPUS = MachineFacts(host="node8", cpus=16, gpus=("A100", "A100"), torch="2.13.0+cu126")


def healthy(machine: MachineFacts, *tags: str) -> Iterator[Outcome]:
    """Every scenario of these tags as if it had passed on that machine."""
    question = Invocation(arguments=(), tags=tags, working_dir=Path(__file__).parents[2], environ={})
    for spec in plan_launches(question, machine).specs:
        settings = dict(spec.settings)
        if isinstance(spec, Skip):
            yield run(spec.scenario, Status.SKIP, settings, backend="", device="")
        else:
            told = {
                "chosen": spec.chosen,
                "backend": spec.backend,
                "device": spec.device,
                "ranks": spec.ranks,
                "missing_gradients": (),
            }
            yield run(spec.scenario, Status.PASS, settings, **told)


def silent_gates(machine: MachineFacts, *tags: str) -> set[str]:
    gates = answer_rules(tuple(healthy(machine, *tags)), PLAN)
    return {one.name for one in gates if one.state is RuleState.UNANSWERED}


@pytest.mark.parametrize(
    ("machine", "tags", "silent"),
    [
        (TWO_GPUS, ("plan",), {"depth", "fsdp"}),
        (LAPTOP, ("plan",), {"fsdp", "nccl_only", "not_nccl"}),
        (LAPTOP, ("plan", "control", "variants", "sweep"), {"nccl_only", "not_nccl"}),
    ],
    ids=["plan on two GPUs", "plan on a laptop", "everything on a laptop"],
)
def test_the_plan_answers_every_gate_of_the_decision_tree(
    machine: MachineFacts, tags: tuple[str, ...], silent: set[str]
) -> None:
    assert silent_gates(machine, *tags) == silent


def untested(machine: MachineFacts, *tags: str) -> set[str]:
    rows = hypothesis_rows(tuple(healthy(machine, *tags)), PLAYBOOK.hypotheses)
    return {row.hypothesis.text for row in rows if row.answer is HypothesisAnswer.NOT_TESTED}


def test_every_hypothesis_has_a_contrast_among_the_scenarios() -> None:
    assert untested(TWO_GPUS, "plan", "control", "variants", "sweep", "debug", "branch") == {"FSDP is the cause"}


def test_the_plan_tests_what_the_seeds_blamed_in_fourteen_runs_and_proposes_a_test_of_the_rest() -> None:
    runs = tuple(healthy(LAPTOP, "plan"))
    assert len(runs) <= 14
    prominent = [row for row in hypothesis_rows(runs, PLAYBOOK.hypotheses) if row.hypothesis.always_shown]
    assert {row.hypothesis.text for row in prominent if row.answer is HypothesisAnswer.REFUTED} == {
        "DDP is the cause",
        "more than one rank is the cause",
        "gradient checkpointing is the cause",
        "NSA's attention is the cause",
        "the layer count is the cause",
        "find_unused_parameters is needed",
    }
    rest = {
        row.hypothesis.text: row.command or row.reason for row in prominent if row.answer is HypothesisAnswer.NOT_TESTED
    }
    assert rest == {
        "FSDP is the cause": "nsa-harness claim manual_average parallel.wrapper=manual,fsdp",
        "NCCL is the cause": "ddp_nccl was SKIP",
    }
