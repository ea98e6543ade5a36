"""Claims against pairs of runs: two runs that differ in one thing say something, one run says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import BAD, RUNS, failed_in, run

from nsa_harness.core.comparison.comparison import ClaimResult, ClaimRow, compared
from nsa_harness.core.comparison.configuration import configuration, differences, setting
from nsa_harness.core.report import Outcome, Status
from nsa_harness.subject.playbook import PLAYBOOK

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
STATIC = {"parallel.static_graph": "true"}
MANUAL = {"parallel.wrapper": "manual"}


def rows(outcomes: Sequence[Outcome], claim: str) -> list[ClaimRow]:
    return [row for row in compared(outcomes, PLAYBOOK.claims) if row.claim.text == claim]


def answer(outcomes: Sequence[Outcome], claim: str) -> tuple[str, str]:
    (row,) = rows(outcomes, claim)
    return row.result.value, row.reason


@pytest.mark.parametrize(
    ("control", "changed", "result", "reason"),
    [
        (PASS, HANG, "supported", "breaks it"),
        (PASS, FAIL, "supported", "breaks it"),
        (HANG, PASS, "ruled out", "passes with it, not without it"),
        (PASS, PASS, "ruled out", "passes with and without it"),
        (HANG, HANG, "ruled out", "ends the same way with and without it"),
        (FAIL, HANG, "undecided", "ends badly with and without it, not alike"),
        (SKIP, HANG, "not checked", "manual was SKIP"),
        (PASS, ERROR, "not checked", "ddp was ERROR"),
        (SKIP, ERROR, "not checked", "manual was SKIP; ddp was ERROR"),
    ],
)
def test_a_cause_is_supported_only_where_the_control_passes_and_the_changed_run_does_not(
    control: Status, changed: Status, result: str, reason: str
) -> None:
    outcomes = [run("ddp", changed), run("manual", control, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == (result, reason)


@pytest.mark.parametrize(
    ("without", "with_it", "result"),
    [
        (HANG, PASS, "supported"),
        (PASS, HANG, "supported"),
        (PASS, PASS, "ruled out"),
        (HANG, HANG, "ruled out"),
        (FAIL, HANG, "undecided"),
    ],
)
def test_a_change_is_supported_where_it_repairs_and_where_it_breaks(
    without: Status, with_it: Status, result: str
) -> None:
    outcomes = [run("plain", without), run("static", with_it, STATIC)]
    assert answer(outcomes, "static_graph changes it")[0] == result


def test_the_pair_is_named_the_control_first() -> None:
    outcomes = [run("static", PASS, STATIC), run("plain", HANG)]
    (row,) = rows(outcomes, "static_graph changes it")
    assert row.pair is not None
    assert (row.pair.control.scenario, row.pair.changed.scenario) == ("plain", "static")


@pytest.mark.parametrize("more", [{"gc.layers": "all"}, {"train.seed": "3"}, {"fault.kind": "raise"}])
def test_a_pair_that_differs_in_anything_else_is_no_pair(more: dict[str, str]) -> None:
    outcomes = [run("plain", HANG, {**more}), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == ("not checked", "no control run")


def test_runs_on_different_devices_are_no_pair() -> None:
    outcomes = [run("plain", HANG, device="cuda"), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause")[0] == "not checked"


def test_the_missing_control_run_is_given_as_a_command() -> None:
    (row,) = rows([run("ddp one", HANG)], "DDP is the cause")
    assert row.command == "nsa-harness run 'ddp one' parallel.wrapper=manual"
    (row,) = rows([run("ddp", HANG)], "more than one rank is the cause")
    assert row.command == "nsa-harness run ddp parallel.wrapper=none run.ranks=1"


@pytest.mark.parametrize(
    "harmless",
    [
        run("ddp", PASS),
        run("ddp", HANG, expected=True),
        run("ddp", HANG, {"run.program": "train.py"}),
        run("ddp", HANG, MANUAL),
        run("ddp", HANG, flaky=True),
    ],
    ids=["passed", "announced", "foreign", "already without", "flaky"],
)
def test_no_control_run_is_proposed_where_it_would_tell_nothing(harmless: Outcome) -> None:
    (row,) = rows([harmless], "DDP is the cause")
    assert (row.result, row.command) == (ClaimResult.NOT_CHECKED, None)


def test_a_backend_that_auto_chose_is_the_backend_that_ran() -> None:
    outcomes = [run("auto", HANG), run("gloo", HANG, {"needs.backend": "gloo"})]
    assert differences(*outcomes) == set()
    over_nccl = run("auto", HANG, backend="nccl", device="cuda")
    over_gloo = run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda")
    assert answer([over_nccl, over_gloo], "NCCL is the cause") == ("supported", "breaks it")


def test_settings_of_nccl_belong_to_it_and_names_that_only_log_to_nobody() -> None:
    wanted = {"needs.backend": "nccl", "run.env.NCCL_P2P_DISABLE": "0", "run.env.NCCL_DEBUG": "INFO"}
    over_nccl = run("nccl", HANG, wanted, backend="nccl")
    over_gloo = run("gloo", PASS, {"run.env.TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert "run.env.NCCL_DEBUG" not in configuration(over_nccl)
    assert answer([over_nccl, over_gloo], "NCCL is the cause")[0] == "supported"
    detailed = run("nccl", HANG, {**wanted, "run.env.TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, backend="nccl")
    assert answer([detailed, over_gloo], "NCCL is the cause")[0] == "not checked"


BRANCH = "the selection branch is the cause"


@pytest.mark.parametrize(
    ("without", "with_it", "counts"),
    [
        ("cmp", "sel", True),
        ("cmp", "cmp+sel", True),
        ("cmp+win", "all", True),
        ("cmp", "all", False),
        ("cmp+win", "cmp+sel", False),
        ("cmp", "sel+win", False),
        ("sel", "cmp+sel", False),
    ],
)
def test_a_branch_is_compared_alone_or_added_and_never_with_another_one(
    without: str, with_it: str, counts: bool
) -> None:
    outcomes = [run("a", PASS, {"model.branch": without}), run("b", HANG, {"model.branch": with_it})]
    assert (answer(outcomes, BRANCH)[0] == "supported") is counts


def test_more_layers_are_the_changed_run_and_unknown_numbers_are_no_pair() -> None:
    four, ten = run("four", PASS, {"model.layers": "4"}), run("ten", HANG, {"model.layers": "10"})
    assert answer([ten, four], "the layer count is the cause")[0] == "supported"
    assert answer([run("shape", PASS), ten], "the layer count is the cause")[0] == "not checked"


@pytest.mark.parametrize(
    ("shorter", "longer", "counts"),
    [
        (run("plain", HANG), run("static", PASS, {**STATIC, "train.steps": "2"}), True),
        (run("plain", PASS), run("static", HANG, {**STATIC, "train.steps": "2"}, culprit=failed_in(1)), True),
        (run("plain", PASS), run("static", HANG, {**STATIC, "train.steps": "2"}, culprit=failed_in(2)), False),
        (run("plain", PASS), run("static", HANG, {**STATIC, "train.steps": "2"}), False),
        (run("plain", PASS), run("static", FAIL, {**STATIC, "train.steps": "x"}, culprit=failed_in(1)), True),
        (run("plain", FAIL, cause="expectation_missed"), run("static", PASS, {**STATIC, "train.steps": "2"}), False),
    ],
)
def test_more_steps_are_no_difference_where_the_run_failed_before_or_not_at_all(
    shorter: Outcome, longer: Outcome, counts: bool
) -> None:
    assert (answer([shorter, longer], "static_graph changes it")[0] != "not checked") is counts


@pytest.mark.parametrize(
    ("cause", "key", "counts"),
    [
        ("slow", "limits.deadline_s", False),
        ("slow", "expect.missing_grads", True),
        ("expectation_missed", "expect.missing_grads", False),
        ("expectation_missed", "limits.deadline_s", True),
        ("exception", "limits.deadline_s", True),
    ],
)
def test_a_verdict_that_rests_on_a_number_needs_the_same_number_in_the_control(
    cause: str, key: str, counts: bool
) -> None:
    bad = run("ddp", FAIL, cause=cause)
    same = run("manual", PASS, MANUAL)
    other = replace(same, criteria=tuple(sorted({**dict(same.criteria), key: "7"}.items())))
    assert answer([bad, same], "DDP is the cause")[0] == "supported"
    assert (answer([bad, other], "DDP is the cause")[0] == "supported") is counts


def test_pairs_that_disagree_are_both_shown_with_their_number() -> None:
    deep = {"model.layers": "12"}
    outcomes = [
        run("ddp", PASS),
        run("manual", PASS, MANUAL),
        run("deep_ddp", HANG, deep),
        run("deep_manual", PASS, {**deep, **MANUAL}),
    ]
    told = [(row.result.value, row.of_pairs) for row in rows(outcomes, "DDP is the cause")]
    assert told == [("supported", (1, 2)), ("ruled out", (1, 2))]


def test_an_attempt_that_does_not_count_is_no_evidence() -> None:
    outcomes = [run("ddp", HANG, final=False), run("ddp", PASS, attempt=2), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == ("ruled out", "passes with and without it")


@given(RUNS)
def test_no_claim_rests_on_a_skip_an_error_a_flaky_run_or_an_attempt_that_does_not_count(
    outcomes: list[Outcome],
) -> None:
    for row in compared(outcomes, PLAYBOOK.claims):
        assert (row.pair is None) is (row.result is ClaimResult.NOT_CHECKED)
        for one in (row.pair.control, row.pair.changed) if row.pair else ():
            assert one.verdict.status in (PASS, *BAD)
            assert one.final
            assert not one.flaky


@given(RUNS)
def test_every_pair_differs_in_exactly_the_keys_of_its_claim(outcomes: list[Outcome]) -> None:
    for row in compared(outcomes, PLAYBOOK.claims):
        if row.pair:
            told = differences(row.pair.control, row.pair.changed) - {"train.steps"}
            assert told == set(row.claim.contrast.keys)
            key = row.claim.contrast.keys[0]
            assert row.claim.contrast.without(setting(row.pair.control, key))
            assert row.claim.contrast.with_it(setting(row.pair.changed, key))


@given(RUNS)
def test_a_cause_is_never_supported_where_its_control_did_not_pass(outcomes: list[Outcome]) -> None:
    for row in compared(outcomes, PLAYBOOK.claims):
        if row.pair and row.result is ClaimResult.SUPPORTED:
            assert PASS in (row.pair.control.verdict.status, row.pair.changed.verdict.status)
            if row.claim.kind == "cause":
                assert row.pair.control.verdict.status is PASS
                assert row.pair.changed.verdict.status in BAD


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_answer(outcomes: list[Outcome], random: Random) -> None:
    shuffled = random.sample(outcomes, len(outcomes))
    assert compared(shuffled, PLAYBOOK.claims) == compared(outcomes, PLAYBOOK.claims)


def test_no_claim_is_made_twice() -> None:
    assert len({claim.text for claim in PLAYBOOK.claims}) == len(PLAYBOOK.claims)
