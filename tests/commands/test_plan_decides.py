"""What the scenarios that ship can decide: each claim has its pair of runs, each gate its runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from runs import PLAN, run

from nsa_harness.core.comparison.decisions import answer_rules
from nsa_harness.core.comparison.hypotheses import HypothesisAnswer, hypothesis_rows
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, RuleState, Status
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches
from nsa_harness.supervisor.launch.sides import plan_sides

LAPTOP = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")
TWO_GPUS = MachineFacts(host="node8", cpus=16, gpus=("A100", "A100"), torch="2.13.0+cu126")


def healthy(machine: MachineFacts, *tags: str, names: tuple[str, ...] = ()) -> Iterator[Outcome]:
    """Every scenario of these tags or names as if it had passed on that machine."""
    question = Invocation(arguments=names, tags=tags, working_dir=Path(__file__).parents[2], environ={})
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


def test_the_plan_tests_what_the_seeds_blamed_in_nineteen_runs_and_proposes_a_test_of_the_rest() -> None:
    runs = tuple(healthy(LAPTOP, "plan"))
    assert len(runs) <= 19
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


CHECKPOINTED_UNDER_DDP = ("ddp_gc", "ddp_gc_find_unused", "ddp_gc_reentrant_plain", "ddp_gc_reentrant")


def test_the_plan_combines_ddp_with_both_kinds_of_checkpointing_with_and_without_find_unused_parameters() -> None:
    settings = {one.spec.scenario: dict(one.spec.settings) for one in healthy(LAPTOP, "plan")}
    keys = ("gc.mode", "parallel.find_unused_parameters")
    defaults = {"gc.mode": "non_reentrant", "parallel.find_unused_parameters": "false"}
    assert all(settings[name]["gc.layers"] == "all" for name in CHECKPOINTED_UNDER_DDP)
    assert [tuple(settings[name].get(key, defaults[key]) for key in keys) for name in CHECKPOINTED_UNDER_DDP] == [
        ("non_reentrant", "false"),
        ("non_reentrant", "true"),
        ("reentrant", "false"),
        ("reentrant", "true"),
    ]


def failing(passed: Outcome, cause: str) -> Outcome:
    return replace(passed, verdict=replace(passed.verdict, status=Status.FAIL, cause=cause), expected=False)


def plan_reports(machine: MachineFacts) -> Iterator[Sequence[Outcome]]:
    """The healthy plan, and the plan with each of its runs failing once."""
    runs = tuple(healthy(machine, "plan"))
    yield runs
    for failed in (one for one in runs if one.verdict.status is Status.PASS):
        yield tuple(failing(one, "ready_twice") if one is failed else one for one in runs)


def single_reports(machine: MachineFacts) -> Iterator[Sequence[Outcome]]:
    """Every scenario alone, passing and failing, beside a run of another program."""
    foreign = run("another", Status.FAIL, {"run.program": "train.py"})
    for passed in healthy(machine, names=("*",)):
        if passed.verdict.status is Status.PASS:
            yield from ((one, foreign) for one in (passed, failing(passed, "unknown")))


def proposals(reports: Iterable[Sequence[Outcome]]) -> set[str]:
    """Every `claim` and `run` that the table of hypotheses or a decision rule proposes in these reports."""
    commands = [
        command
        for report in reports
        for command in (
            *(row.command for row in hypothesis_rows(report, PLAYBOOK.hypotheses)),
            *(command for gate in answer_rules(report, PLAN) for command in gate.commands),
        )
        if command
    ]
    return {command for command in commands if " claim " in command or " run " in command}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("machine", "reports", "at_least"),
    [
        (LAPTOP, plan_reports, 30),
        pytest.param(LAPTOP, single_reports, 2000, marks=pytest.mark.slow),
        pytest.param(TWO_GPUS, plan_reports, 30, marks=pytest.mark.slow),
        pytest.param(TWO_GPUS, single_reports, 2000, marks=pytest.mark.slow),
    ],
)
def test_both_sides_of_every_proposal_differ_in_the_setting_that_it_names(
    machine: MachineFacts, reports: Callable[[MachineFacts], Iterator[Sequence[Outcome]]], at_least: int
) -> None:
    proposed = proposals(reports(machine))
    assert len(proposed) > at_least
    for command in sorted(proposed):
        _, verb, name, *words = shlex.split(command)
        question = Invocation(arguments=(name, *words), tags=(), working_dir=Path(__file__).parents[2], environ={})
        if verb == "claim":
            sides = plan_sides(question, machine)
            assert sides.key == words[-1].partition("=")[0], command
            assert launched(sides.first.spec) != launched(sides.second.spec), command
        else:
            base, changed = (
                plan_launches(replace(question, arguments=of), machine) for of in ((name,), (name, *words))
            )
            assert {*map(launched, base.specs)}.isdisjoint(map(launched, changed.specs)), command


def launched(spec: RunSpec | Skip) -> object:
    return (spec.program, spec.env, spec.ranks, spec.limits) if isinstance(spec, RunSpec) else spec.reason
