"""The gates that ship: when each one fires or holds, what it says to do, and what it needs to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import PLAN, RUNS, failed_in, run, sure

from nsa_harness.core.comparison.decision_rules import has_failed
from nsa_harness.core.comparison.decisions import answer_rules, explained_failures, matched_rules, next_commands
from nsa_harness.core.diagnosis.causes import Cause, DecisionTreePolicy
from nsa_harness.core.report import Outcome, RuleAnswer, RuleState, Status, Verdict

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
STATIC = {"parallel.static_graph": "true"}
ALONE = {"run.ranks": "1", "parallel.wrapper": "none"}


OURS_SKIPPED = run("skipped", SKIP, {"run.env.X": "1"}, backend="", device="")
NCCL = run("nccl", HANG, backend="nccl", device="cuda")


def branch(name: str) -> dict[str, str]:
    return {"model.branch": name}


def layers(name: str) -> dict[str, str]:
    return {"gc.layers": name, "model.layers": "12", **ALONE}


def answer(gate: str, *outcomes: Outcome) -> RuleAnswer:
    return next(one for one in answer_rules(outcomes, PLAN) if one.name == gate)


FIRES: list[tuple[str, list[Outcome], str, list[str]]] = [
    ("unstable", [run("ddp", FAIL, flaky=True, attempt=2)], "ddp FAIL", ["run ddp --repeat=5"]),
    ("slow", [run("ddp", FAIL, cause="slow")], "ddp FAIL", ["run ddp limits.deadline_s=1800"]),
    (
        "ready_twice",
        [
            run(
                "gc",
                FAIL,
                {"gc.layers": "all", "gc.mode": "reentrant", "parallel.find_unused_parameters": "true"},
                summary="rank 0 raised RuntimeError: Expected to mark a variable ready only once.",
            )
        ],
        "gc FAIL",
        [
            "claim gc gc.mode=reentrant,non_reentrant",
            "claim gc parallel.find_unused_parameters=true,false",
            "bisect gc --gc-range",
        ],
    ),
    (
        "static_graph",
        [run("plain", HANG), run("static", PASS, STATIC)],
        "static PASS, plain HANG",
        ["run static train.steps=100"],
    ),
    (
        "single_branch",
        [run("cmp", PASS, branch("cmp")), run("sel", HANG, branch("sel")), run("win", PASS, branch("win"))],
        "cmp PASS, sel HANG, win PASS",
        ["run sel parallel.wrapper=none run.ranks=1"],
    ),
    (
        "branches_together",
        [run(name, PASS, branch(name)) for name in ("cmp", "sel", "win")] + [run("whole", HANG)],
        "cmp PASS, sel PASS, win PASS, whole HANG",
        ["run whole model.branch=cmp+sel"],
    ),
    (
        "missing_gradients",
        [run("one", FAIL, missing_gradients=("a.w", "b.w")), run("two", PASS, STATIC, missing_gradients=("b.w",))],
        "b.w in one FAIL, two PASS",
        ["run one parallel.find_unused_parameters=true"],
    ),
    ("gloo_too", [run("gloo", HANG)], "gloo HANG", ["run gloo parallel.wrapper=manual"]),
    ("not_nccl", [run("gloo", HANG, {"needs.backend": "gloo"}, device="cuda"), NCCL], "nccl HANG, gloo HANG", []),
    (
        "nccl_only",
        [run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda"), NCCL],
        "gloo PASS, nccl HANG",
        ["run nccl run.env.NCCL_P2P_DISABLE=1"],
    ),
    (
        "checkpointed_layers",
        [run("low", HANG, layers("0:6")), run("high", PASS, layers("6:12"))],
        "high PASS, low HANG",
        ["bisect low --gc-range"],
    ),
    ("checkpointing", [run("gc", HANG, {"gc.layers": "all"})], "gc HANG", ["bisect gc --gc-range"]),
    ("one_process", [run("one", HANG, ALONE)], "one HANG", ["run one model.attention=vanilla"]),
    (
        "attention",
        [run("vanilla", PASS, {"model.attention": "vanilla"}), run("nsa", HANG)],
        "vanilla PASS, nsa HANG",
        ["run nsa model.branch=win"],
    ),
    (
        "depth",
        [run("four", PASS, {"model.layers": "4"}), run("five", HANG, {"model.layers": "5"})],
        "four PASS, five HANG",
        ["bisect five --layers"],
    ),
    (
        "fsdp",
        [run("ddp", HANG), run("fsdp", PASS, {"parallel.wrapper": "fsdp"})],
        "fsdp PASS, ddp HANG",
        ["run fsdp train.steps=200"],
    ),
]


@pytest.mark.parametrize(("gate", "outcomes", "why", "commands"), FIRES, ids=[case[0] for case in FIRES])
def test_a_gate_that_fires_names_the_runs_and_the_next_commands(
    gate: str, outcomes: list[Outcome], why: str, commands: list[str]
) -> None:
    told = answer(gate, *outcomes)
    assert (told.state, told.why) == (RuleState.MATCHED, why)
    assert told.commands == tuple(f"nsa-harness {one}" for one in commands)
    assert {one.dir for one in outcomes} == set(told.runs)


def test_every_gate_has_a_case_in_which_it_fires() -> None:
    assert [case[0] for case in FIRES] == [*PLAN.gates]


NEEDS_RUNS = [name for name in PLAN.gates if name not in ("unstable", "slow", "ready_twice")]


@pytest.mark.parametrize("gate", NEEDS_RUNS)
def test_a_gate_without_its_runs_is_not_reached_and_says_which_are_missing(gate: str) -> None:
    """The one run that was made can be asked for nothing: its program is another one."""
    told = answer(gate, run("foreign", PASS, {"run.program": "train.py"}, backend="any"), OURS_SKIPPED)
    assert told.state is RuleState.UNANSWERED
    assert told.why.startswith("missing: ")
    assert told.commands == told.runs == ()


@pytest.mark.parametrize(("gate", "outcomes"), [case[:2] for case in FIRES], ids=[case[0] for case in FIRES])
def test_no_gate_fires_where_all_passed_or_was_announced(gate: str, outcomes: list[Outcome]) -> None:
    well = [
        run(one.spec.scenario, PASS, dict(one.spec.settings), backend=one.spec.backend, device=one.spec.device)
        for one in outcomes
    ]
    assert answer(gate, *well).state is not RuleState.MATCHED
    if gate not in ("unstable", "missing_gradients"):
        announced = [
            run(
                one.spec.scenario,
                one.verdict.status,
                dict(one.spec.settings),
                backend=one.spec.backend,
                device=one.spec.device,
                expected=True,
                cause=one.verdict.cause,
                summary=one.verdict.summary,
            )
            for one in outcomes
        ]
        assert answer(gate, *announced).state is not RuleState.MATCHED


def test_the_run_that_was_skipped_is_named() -> None:
    skipped = run("nccl", SKIP, {"needs.backend": "nccl"}, backend="", device="")
    assert answer("nccl_only", run("gloo", HANG), skipped).why == "nccl was SKIP"


def test_what_steers_nccl_is_no_difference_from_a_run_over_gloo() -> None:
    gloo = run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda")
    steered = run("nccl", HANG, {"run.env.NCCL_IB_DISABLE": "1"}, backend="nccl", device="cuda")
    assert answer("nccl_only", gloo, steered).state is RuleState.MATCHED
    assert (
        answer(
            "nccl_only",
            gloo,
            replace(
                steered,
                spec=replace(steered.spec, settings=(("run.env.X", "1"),)),
            ),
        ).state
        is RuleState.UNANSWERED
    )


def test_ready_twice_of_another_program_may_have_been_checkpointed() -> None:
    """What it has set nobody knows, so nothing is held against it."""
    foreign = run(
        "train", FAIL, {"run.program": "train.py"}, cause="ready_twice", repeat_command="nsa-harness run r/spec.json"
    )
    assert answer("ready_twice", foreign).commands == ("nsa-harness run r/spec.json",)


def test_ready_twice_without_checkpointing_is_no_matter_of_its_form() -> None:
    told = answer("ready_twice", run("shared", FAIL, cause="ready_twice"))
    assert (told.state, told.why) == (
        RuleState.NOT_MATCHED,
        "no run with gc.layers other than none failed with this cause",
    )


def test_ready_twice_proposes_no_claim_from_what_the_run_has_not() -> None:
    once = run("gc", FAIL, {"gc.layers": "all", "gc.mode": "reentrant"}, cause="ready_twice")
    assert answer("ready_twice", once).commands == (
        "nsa-harness claim gc gc.mode=reentrant,non_reentrant",
        "nsa-harness bisect gc --gc-range",
    )


def test_static_graph_that_hangs_too_is_no_mitigation() -> None:
    told = answer("static_graph", run("plain", HANG), run("static", HANG, STATIC))
    assert (told.state, told.why) == (RuleState.NOT_MATCHED, "static HANG, plain HANG")


def test_branches_that_all_fail_point_at_none_of_them() -> None:
    outcomes = [run(name, HANG, branch(name)) for name in ("cmp", "sel", "win")]
    assert answer("single_branch", *outcomes).state is RuleState.NOT_MATCHED


@pytest.mark.parametrize(("fails", "passes"), [("all", "6:12"), ("0:6", "none")])
def test_only_the_runs_that_a_gate_names_are_its_ends(fails: str, passes: str) -> None:
    """Of a range of layers neither all of them nor none tells which."""
    told = answer("checkpointed_layers", run("bad", HANG, layers(fails)), run("good", PASS, layers(passes)))
    assert told.state is RuleState.UNANSWERED


def test_two_branches_that_pass_do_not_show_that_all_of_them_do() -> None:
    outcomes = [run("cmp", PASS, branch("cmp")), run("sel", PASS, branch("sel")), run("whole", HANG)]
    assert answer("branches_together", *outcomes).state is RuleState.UNANSWERED


def test_a_branch_that_fails_alone_is_no_matter_of_the_sum() -> None:
    alone = [run("cmp", PASS, branch("cmp")), run("sel", HANG, branch("sel")), run("win", PASS, branch("win"))]
    assert answer("branches_together", *alone, run("whole", HANG)).state is RuleState.NOT_MATCHED


def test_parameters_that_change_from_run_to_run_are_no_module_to_mend() -> None:
    told = answer(
        "missing_gradients",
        run("one", FAIL, missing_gradients=("a",)),
        run("two", FAIL, STATIC, missing_gradients=("b",)),
    )
    assert (told.state, told.why) == (RuleState.NOT_MATCHED, "the parameters differ: one FAIL, two FAIL")


@pytest.mark.parametrize("key", ["train.freeze", "model.branch", "model.stop_gradient_gates"])
def test_parameters_left_without_gradient_on_purpose_are_no_finding(key: str) -> None:
    one = run("one", PASS, {key: "x"}, missing_gradients=("a",))
    assert answer("missing_gradients", one).state is RuleState.UNANSWERED


def test_a_fsdp_run_with_accumulation_does_not_answer_for_ddp_without() -> None:
    more = {"train.accumulate": "4"}
    outcomes = [run("ddp", HANG, more), run("fsdp", PASS, {**more, "parallel.wrapper": "fsdp"})]
    assert answer("fsdp", *outcomes).state is RuleState.UNANSWERED


def test_a_foreign_program_is_repeated_as_it_is() -> None:
    foreign = run(
        "train", FAIL, {"run.program": "train.py"}, cause="slow", repeat_command="nsa-harness run r/spec.json"
    )
    assert answer("slow", foreign).commands == ("nsa-harness run r/spec.json",)


def test_runs_of_another_program_are_not_asked_what_only_ours_can_answer() -> None:
    foreign = run("train", HANG, {"run.program": "train.py"})
    asked = [one.name for one in answer_rules([foreign], PLAN)]
    assert asked == ["unstable", "slow", "ready_twice", "gloo_too", "not_nccl", "nccl_only", "one_process"]


def test_the_plan_of_the_seeds_is_decided_whatever_the_number_of_its_steps() -> None:
    plain = run("ddp_onestep", HANG, culprit=failed_in(1))
    static = run("ddp_static_graph", PASS, {**STATIC, "train.steps": "2"})
    told = matched_rules(answer_rules([plain, static], PLAN))
    assert [(one.name, one.leads) for one in told] == [("static_graph", True), ("gloo_too", False)]


# A certain cause comes first.


def test_it_is_not_nccl_is_said_only_where_nccl_ran_and_ended_alike() -> None:
    gloo = run("gloo", HANG, {"needs.backend": "gloo"}, device="cuda")
    assert answer("not_nccl", gloo).state is RuleState.UNANSWERED
    otherwise = replace(NCCL, verdict=replace(NCCL.verdict, cause="transport"))
    assert answer("not_nccl", gloo, otherwise).state is RuleState.NOT_MATCHED
    assert answer("not_nccl", gloo, NCCL).state is RuleState.MATCHED
    for gate in matched_rules(answer_rules([gloo], PLAN)):
        assert "not NCCL" not in gate.then.replace("not NCCL alone", "")


FROM_OUTSIDE = [one.value for one in Cause if one.row.verdicts and one.row.enters_tree is DecisionTreePolicy.NEVER]


def test_what_comes_from_outside_is_known_by_the_table_of_causes() -> None:
    named = {"killed", "slow", "host_oom", "cuda_oom", "expectation_missed", "infra", "disk_full", "harness_error"}
    assert named < set(FROM_OUTSIDE)


@pytest.mark.parametrize("gate", [case[0] for case in FIRES[3:] if case[0] != "missing_gradients"])
def test_no_gate_reads_anything_from_a_run_that_was_ended_from_outside(gate: str) -> None:
    outcomes = next(case[1] for case in FIRES if case[0] == gate)
    for cause in FROM_OUTSIDE:
        ended = Verdict(status=FAIL, kind=None, cause=cause, summary="")
        told = answer(gate, *(replace(one, verdict=ended) if has_failed(one) else one for one in outcomes))
        others = "cmp PASS, win PASS" if gate == "single_branch" else None  # two that passed are left
        assert told.state is (RuleState.NOT_MATCHED if others else RuleState.UNANSWERED)
        assert told.why == others or told.why.endswith(f"{cause} says nothing about the program")


def test_a_certain_cause_leads_and_no_gate_that_asks_for_causes_beside_it() -> None:
    ends = [sure(run("plain", HANG)), run("static", PASS, STATIC)]
    gates = answer_rules(ends, PLAN)
    assert [one.name for one in matched_rules(gates)] == ["static_graph"]  # a mitigation that was seen stays one
    assert not any(one.leads for one in gates)
    assert next_commands(gates) == ()
    assert [(one.spec.scenario, finding.advice) for one, finding in explained_failures(ends)] == [
        ("plain", "untie the knot")
    ]
    assert answer("gloo_too", *ends).why == "plain HANG: lock_cycle is certain"


def test_a_certain_ready_twice_leads_to_its_own_gate() -> None:
    gc = {"gc.layers": "all", "gc.mode": "reentrant"}
    gates = answer_rules([sure(run("gc", FAIL, gc, cause="ready_twice")), run("static", PASS, {**gc, **STATIC})], PLAN)
    assert [(one.name, one.leads) for one in matched_rules(gates)] == [("ready_twice", True), ("static_graph", False)]
    assert next_commands(gates)[0] == "nsa-harness claim gc gc.mode=reentrant,non_reentrant"


def test_one_failure_that_is_not_explained_is_enough_to_ask_on() -> None:
    gates = answer_rules([sure(run("known", HANG, STATIC)), run("open", HANG)], PLAN)
    assert [one.name for one in gates if one.leads] == ["gloo_too"]
    assert answer("gloo_too", sure(run("known", HANG, STATIC)), run("open", HANG)).why == "open HANG"


@pytest.mark.parametrize("cause", ["exception", "unknown", "bad_exit", "segfault", "aborted"])
def test_that_something_was_raised_is_certain_and_explains_nothing(cause: str) -> None:
    outcome = sure(run("ddp", FAIL, cause=cause))
    assert explained_failures([outcome]) == ()
    assert answer("gloo_too", outcome).state is RuleState.MATCHED


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_decision(outcomes: list[Outcome], random: Random) -> None:
    assert answer_rules(random.sample(outcomes, len(outcomes)), PLAN) == answer_rules(outcomes, PLAN)


@given(RUNS)
def test_a_gate_fires_only_where_a_run_failed_or_is_flaky_or_lacks_gradients(outcomes: Sequence[Outcome]) -> None:
    counting = [one for one in outcomes if one.final]
    if not any(has_failed(one) or one.flaky for one in counting):
        assert matched_rules(answer_rules(outcomes, PLAN)) == ()
