"""The gates of the decision tree: when each one applies, what it says to do, and what it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import RUNS, failed_in, run

from nsa_harness.core.comparison.decisions import GateAnswer, GateState, decided, failed, fired
from nsa_harness.core.report import Outcome, Status
from nsa_harness.subject.playbook import PLAYBOOK

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
STATIC = {"parallel.static_graph": "true"}
ALONE = {"run.ranks": "1", "parallel.wrapper": "none"}


def branch(name: str) -> dict[str, str]:
    return {"model.branch": name}


def layers(name: str) -> dict[str, str]:
    return {"gc.layers": name, "model.layers": "12", **ALONE}


def answer(gate: str, *outcomes: Outcome) -> GateAnswer:
    return next(one.answer for one in decided(outcomes, PLAYBOOK.gates) if one.gate.name == gate)


APPLIES: list[tuple[str, list[Outcome], str, str | None]] = [
    (
        "unstable",
        [run("ddp", FAIL, flaky=True, attempt=2)],
        "ddp FAIL",
        "nsa-harness run ddp --repeat=5",
    ),
    ("slow", [run("ddp", FAIL, cause="slow")], "ddp FAIL", "nsa-harness run ddp limits.deadline_s=1800"),
    (
        "static_graph",
        [run("plain", HANG), run("static", PASS, STATIC)],
        "plain HANG, static PASS",
        "nsa-harness run static train.steps=100",
    ),
    (
        "single_branch",
        [run("cmp", PASS, branch("cmp")), run("sel", HANG, branch("sel")), run("win", PASS, branch("win"))],
        "cmp PASS, sel HANG, win PASS",
        "nsa-harness run sel parallel.wrapper=none run.ranks=1",
    ),
    (
        "branches_together",
        [run(name, PASS, branch(name)) for name in ("cmp", "sel", "win")] + [run("whole", HANG)],
        "cmp PASS, sel PASS, win PASS, whole HANG",
        "nsa-harness run whole model.branch=cmp+sel",
    ),
    (
        "missing_gradients",
        [run("one", FAIL, missing_gradients=("a.w", "b.w")), run("two", PASS, STATIC, missing_gradients=("b.w",))],
        "b.w in one FAIL, two PASS",
        "nsa-harness run one parallel.find_unused_parameters=true",
    ),
    ("gloo_too", [run("gloo", HANG)], "gloo HANG", "nsa-harness run gloo parallel.wrapper=manual"),
    (
        "nccl_only",
        [run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda"), run("auto", HANG, backend="nccl", device="cuda")],
        "gloo PASS, auto HANG",
        "nsa-harness run auto run.env.NCCL_P2P_DISABLE=1",
    ),
    (
        "ready_twice",
        [
            run(
                "gc",
                FAIL,
                {"gc.layers": "all"},
                summary="rank 0 raised RuntimeError: Expected to mark a variable ready only once.",
            )
        ],
        "gc FAIL",
        "nsa-harness run gc gc.mode=non_reentrant",
    ),
    (
        "checkpointed_layers",
        [run("low", HANG, layers("0:6")), run("high", PASS, layers("6:12"))],
        "high PASS, low HANG · layers 0-5 [0:6]",
        "nsa-harness run low gc.layers=0:3",
    ),
    ("one_process", [run("one", HANG, ALONE)], "one HANG", "nsa-harness run one model.attention=vanilla"),
    (
        "attention",
        [run("vanilla", PASS, {"model.attention": "vanilla"}), run("nsa", HANG)],
        "vanilla PASS, nsa HANG",
        "nsa-harness run nsa model.branch=win",
    ),
    (
        "depth",
        [run("four", PASS, {"model.layers": "4"}), run("five", HANG, {"model.layers": "5"})],
        "four PASS, five HANG",
        "nsa-harness run five",
    ),
    (
        "fsdp",
        [run("ddp", HANG), run("fsdp", PASS, {"parallel.wrapper": "fsdp"})],
        "ddp HANG, fsdp PASS",
        "nsa-harness run fsdp train.steps=200",
    ),
]


@pytest.mark.parametrize(("gate", "outcomes", "seen", "command"), APPLIES, ids=[case[0] for case in APPLIES])
def test_a_gate_that_applies_names_the_runs_and_the_next_command(
    gate: str, outcomes: list[Outcome], seen: str, command: str
) -> None:
    assert answer(gate, *outcomes) == GateAnswer(state=GateState.APPLIES, seen=seen, command=command)


def test_every_gate_has_a_case_in_which_it_applies() -> None:
    assert [case[0] for case in APPLIES] == [gate.name for gate in PLAYBOOK.gates]


NEEDS_RUNS = [gate.name for gate in PLAYBOOK.gates if gate.name not in ("unstable", "slow", "ready_twice")]


@pytest.mark.parametrize("gate", NEEDS_RUNS)
def test_a_gate_without_its_runs_is_not_checkable_and_says_which_are_missing(gate: str) -> None:
    told = answer(gate, run("foreign", PASS, {"run.program": "train.py"}, backend="any"))
    assert told.state is GateState.NOT_CHECKABLE
    assert told.seen.startswith("missing: ")
    assert told.command is None


@pytest.mark.parametrize(("gate", "outcomes"), [case[:2] for case in APPLIES], ids=[case[0] for case in APPLIES])
def test_no_gate_applies_where_all_passed_or_was_announced(gate: str, outcomes: list[Outcome]) -> None:
    well = [run(one.scenario, PASS, dict(one.settings), backend=one.backend, device=one.device) for one in outcomes]
    assert answer(gate, *well).state is not GateState.APPLIES
    if gate not in ("unstable", "missing_gradients"):
        announced = [
            run(
                one.scenario,
                one.verdict.status,
                dict(one.settings),
                backend=one.backend,
                device=one.device,
                expected=True,
                cause=one.verdict.cause,
                summary=one.verdict.summary,
            )
            for one in outcomes
        ]
        assert answer(gate, *announced).state is not GateState.APPLIES


def test_the_run_that_was_skipped_is_named() -> None:
    skipped = run("nccl", SKIP, {"needs.backend": "nccl"}, backend="", device="")
    assert answer("nccl_only", run("gloo", HANG), skipped).seen == "nccl was SKIP"


def test_ready_twice_without_checkpointing_is_no_matter_of_its_form() -> None:
    told = answer("ready_twice", run("shared", FAIL, cause="ready_twice"))
    assert told.state is GateState.DOES_NOT_APPLY
    assert told.seen == "shared FAIL: nothing is checkpointed there, so a module is used twice"


def test_ready_twice_is_known_by_its_cause_whatever_its_words() -> None:
    told = answer("ready_twice", run("gc", FAIL, {"gc.layers": "all"}, cause="ready_twice"))
    assert told == GateAnswer(
        state=GateState.APPLIES, seen="gc FAIL", command="nsa-harness run gc gc.mode=non_reentrant"
    )


def test_static_graph_that_hangs_too_is_no_mitigation() -> None:
    told = answer("static_graph", run("plain", HANG), run("static", HANG, STATIC))
    assert told == GateAnswer(state=GateState.DOES_NOT_APPLY, seen="plain HANG, static HANG")


def test_branches_that_all_fail_point_at_none_of_them() -> None:
    outcomes = [run(name, HANG, branch(name)) for name in ("cmp", "sel", "win")]
    assert answer("single_branch", *outcomes).state is GateState.DOES_NOT_APPLY


def test_two_branches_that_pass_do_not_show_that_all_of_them_do() -> None:
    outcomes = [run("cmp", PASS, branch("cmp")), run("sel", PASS, branch("sel")), run("whole", HANG)]
    assert answer("branches_together", *outcomes).state is GateState.NOT_CHECKABLE


def test_parameters_that_change_from_run_to_run_are_no_module_to_mend() -> None:
    told = answer(
        "missing_gradients",
        run("one", FAIL, missing_gradients=("a",)),
        run("two", FAIL, STATIC, missing_gradients=("b",)),
    )
    assert told == GateAnswer(state=GateState.DOES_NOT_APPLY, seen="not the same parameters in one FAIL, two FAIL")


@pytest.mark.parametrize("key", ["train.freeze", "model.branch", "model.stop_gradient_gates"])
def test_parameters_left_without_gradient_on_purpose_are_no_finding(key: str) -> None:
    one = run("one", PASS, {key: "x"}, missing_gradients=("a",))
    assert answer("missing_gradients", one).state is GateState.NOT_CHECKABLE


def test_a_fsdp_run_with_accumulation_does_not_answer_for_ddp_without() -> None:
    more = {"train.accumulate": "4"}
    outcomes = [run("ddp", HANG, more), run("fsdp", PASS, {**more, "parallel.wrapper": "fsdp"})]
    assert answer("fsdp", *outcomes).state is GateState.NOT_CHECKABLE


@pytest.mark.parametrize(
    ("chosen", "half"), [("0:6", "gc.layers=0:3"), ("7:8", "gc.layers=7:8"), ("2,6,9", "'gc.layers=[2]'")]
)
def test_the_next_range_is_the_first_half(chosen: str, half: str) -> None:
    told = answer("checkpointed_layers", run("bad", HANG, layers(chosen)), run("good", PASS, layers("10:12")))
    assert told.command == f"nsa-harness run bad {half}"


def test_a_foreign_program_is_repeated_as_it_is() -> None:
    foreign = run("train", FAIL, {"run.program": "train.py"}, cause="slow", repeat="nsa-harness run r/spec.json")
    assert answer("slow", foreign).command == "nsa-harness run r/spec.json"


def test_the_plan_of_the_seeds_is_decided_whatever_the_number_of_its_steps() -> None:
    plain = run("ddp_onestep", HANG, culprit=failed_in(1))
    static = run("ddp_static_graph", PASS, {**STATIC, "train.steps": "2"})
    assert [one.gate.name for one in fired(decided([plain, static], PLAYBOOK.gates))] == ["static_graph", "gloo_too"]


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_decision(outcomes: list[Outcome], random: Random) -> None:
    assert decided(random.sample(outcomes, len(outcomes)), PLAYBOOK.gates) == decided(outcomes, PLAYBOOK.gates)


@given(RUNS)
def test_a_gate_applies_only_where_a_run_failed_or_is_flaky_or_lacks_gradients(outcomes: Sequence[Outcome]) -> None:
    counting = [one for one in outcomes if one.final]
    if not any(failed(one) or one.flaky for one in counting):
        assert fired(decided(outcomes, PLAYBOOK.gates)) == ()
