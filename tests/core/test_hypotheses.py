"""Hypotheses against contrasts: runs that differ in one thing say something, one run says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import BAD, RUNS, failed_in, run

from nsa_harness.core.comparison.contrasts import FailureCounts, configuration, differences, setting
from nsa_harness.core.comparison.hypotheses import HypothesisAnswer, HypothesisKind, HypothesisRow, hypothesis_rows
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.plan import DiagnosticRerun
from nsa_harness.core.report import Finding, Outcome, Status
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.texts.words import hypothesis_reason_alone

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
STATIC = {"parallel.static_graph": "true"}
MANUAL = {"parallel.wrapper": "manual"}


def rows(outcomes: Sequence[Outcome], hypothesis: str) -> list[HypothesisRow]:
    return [row for row in hypothesis_rows(outcomes, PLAYBOOK.hypotheses) if row.hypothesis.text == hypothesis]


def answer(outcomes: Sequence[Outcome], hypothesis: str) -> tuple[str, str]:
    (row,) = rows(outcomes, hypothesis)
    return row.answer.value, hypothesis_reason_alone(row)


@pytest.mark.parametrize(
    ("control", "changed", "result", "reason"),
    [
        (PASS, HANG, "supported", "fails with it"),
        (PASS, FAIL, "supported", "fails with it"),
        (HANG, PASS, "refuted", "passes with it, not without it"),
        (PASS, PASS, "refuted", "passes with and without it"),
        (HANG, HANG, "refuted", "ends the same way with and without it"),
        (FAIL, HANG, "undecided", "fails with and without it, in different ways"),
        (SKIP, HANG, "not tested", "manual was SKIP"),
        (PASS, ERROR, "not tested", "ddp was ERROR"),
        (SKIP, ERROR, "not tested", "manual was SKIP; ddp was ERROR"),
        (PASS, "killed", "not tested", "ddp was killed"),
    ],
)
def test_a_cause_is_supported_only_where_the_control_passes_and_the_changed_run_does_not(
    control: Status, changed: Status | str, result: str, reason: str
) -> None:
    ddp = run("ddp", changed) if isinstance(changed, Status) else run("ddp", FAIL, cause=changed)
    outcomes = [ddp, run("manual", control, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == (result, reason)


@pytest.mark.parametrize(
    ("without", "with_it", "result"),
    [
        (HANG, PASS, "supported"),
        (PASS, HANG, "supported"),
        (PASS, PASS, "refuted"),
        (HANG, HANG, "refuted"),
        (FAIL, HANG, "undecided"),
    ],
)
def test_a_change_is_supported_where_it_repairs_and_where_it_breaks(
    without: Status, with_it: Status, result: str
) -> None:
    outcomes = [run("plain", without), run("static", with_it, STATIC)]
    assert answer(outcomes, "static_graph changes it")[0] == result


def test_both_sides_are_named_with_their_runs() -> None:
    outcomes = [run("static", PASS, STATIC), run("plain", HANG)]
    (row,) = rows(outcomes, "static_graph changes it")
    assert row.control
    assert row.changed
    assert (row.control.run.spec.scenario, row.changed.run.spec.scenario) == ("plain", "static")


@pytest.mark.parametrize("more", [{"gc.layers": "all"}, {"train.seed": "3"}, {"fault.kind": "raise"}])
def test_a_pair_that_differs_in_anything_else_is_no_pair(more: dict[str, str]) -> None:
    outcomes = [run("plain", HANG, {**more}), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == ("not tested", "no control run")


def test_runs_on_different_devices_are_no_pair() -> None:
    outcomes = [run("plain", HANG, device="cuda"), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause")[0] == "not tested"


OTHER = run("another", HANG, {"run.program": "train.py"})


def test_what_is_not_tested_comes_with_the_command_that_tests_it_and_what_a_run_takes() -> None:
    slow = replace(run("ddp one", HANG).timing, wall_s=8.0)
    outcomes = [run("ddp one", HANG, timing=slow), OTHER]
    (row,) = rows(outcomes, "DDP is the cause")
    assert row.command == "nsa-harness claim 'ddp one' parallel.wrapper=manual,ddp"
    assert row.cost_s == 8.0
    (row,) = rows(outcomes, "more than one rank is the cause")
    assert row.command is None, "a second rank alone is in no run under DDP"
    (row,) = rows([run("by hand", HANG, MANUAL), OTHER], "more than one rank is the cause")
    assert row.command == "nsa-harness run 'by hand' parallel.wrapper=none run.ranks=1"


def test_a_failure_in_which_it_was_on_goes_before_a_run_that_passed() -> None:
    outcomes = [run("passed", PASS), run("deep", HANG, {"model.layers": "12", "gc.layers": "0:6"})]
    (row,) = rows(outcomes, "gradient checkpointing is the cause")
    assert row.command == "nsa-harness claim deep gc.layers=none,0:6"


@pytest.mark.parametrize(
    "harmless",
    [
        run("ddp", HANG, expected=True),
        run("ddp", HANG, {"run.program": "train.py"}),
        run("ddp", HANG, {"parallel.wrapper": "none"}),
        run("ddp", HANG, flaky=True),
    ],
    ids=["announced", "foreign", "neither with nor without", "flaky"],
)
def test_no_test_is_proposed_where_it_would_tell_nothing(harmless: Outcome) -> None:
    (row,) = rows([harmless, OTHER], "DDP is the cause")
    assert (row.answer, row.command) == (HypothesisAnswer.NOT_TESTED, None)


def test_what_this_machine_could_not_run_it_is_not_asked_for_again() -> None:
    planted = {"fault.kind": "raise"}
    outcomes = [run("ddp", PASS, planted), run("nccl", SKIP, {"needs.backend": "nccl"}, backend="", device="")]
    (row,) = rows(outcomes, "NCCL is the cause")
    assert (row.answer, row.reason, row.command) == (HypothesisAnswer.NOT_TESTED, "nccl was SKIP", None)


def test_a_single_run_has_no_contrast_and_no_table() -> None:
    assert hypothesis_rows([run("ddp", HANG)], PLAYBOOK.hypotheses) == ()


def test_runs_of_one_configuration_are_counted_together_whatever_their_scenario() -> None:
    outcomes = [run("ddp", PASS), run("gloo", PASS, {"needs.backend": "gloo"}), run("manual", PASS, MANUAL)]
    (row,) = rows(outcomes, "DDP is the cause")
    assert row.control
    assert row.changed
    assert (row.control.counts, row.changed.counts) == (
        FailureCounts(failed=0, attempts=1),
        FailureCounts(failed=0, attempts=2),
    )


def attempts(name: str, endings: str, settings: dict[str, str] | None = None) -> list[Outcome]:
    """ "P" and "H": each attempt of one launch."""
    given = [run(name, PASS if one == "P" else HANG, settings) for one in endings]
    numbered = [replace(one, attempt=number) for number, one in enumerate(given, start=1)]
    return list(with_flakiness([replace(one, final=one is numbered[-1]) for one in numbered]))


@pytest.mark.parametrize(
    ("manual", "ddp", "said"),
    [
        ("P", "H", "supported"),
        ("P", "PH", "undecided"),
        ("PPPPP", "PHPHP", "undecided"),
        ("PPPPPPPPPP", "PHHPHHPHHP", "supported"),
        ("PPPPPPPPPP", "HHHHHHHHHH", "supported"),
        ("HHHHHHHHHH", "PPPPPPPPPP", "refuted"),
    ],
)
def test_what_fails_by_chance_is_told_by_counts_and_not_by_one_run_of_each(manual: str, ddp: str, said: str) -> None:
    outcomes = [*attempts("ddp", ddp), *attempts("manual", manual, MANUAL)]
    (row,) = rows(outcomes, "DDP is the cause")
    assert row.answer == said
    assert row.changed
    assert row.changed.counts == FailureCounts(failed=ddp.count("H"), attempts=len(ddp))


def test_as_long_as_something_fails_by_chance_two_passes_refute_nothing() -> None:
    by_chance = attempts("elsewhere", "PPH", {"model.attention": "stock"})
    outcomes = [*by_chance, run("ddp", PASS), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause")[0] == "undecided"
    outcomes = [*by_chance, *attempts("ddp", "P" * 8), *attempts("manual", "P" * 8, MANUAL)]
    assert answer(outcomes, "DDP is the cause")[0] == "refuted"


def test_a_look_that_changed_nothing_is_an_attempt_and_one_that_changed_something_is_none() -> None:
    def look(change: str) -> Outcome:
        asked = DiagnosticRerun(of=1, change=change, says="")
        return run("ddp", PASS, attempt=2, final=False, deepening=asked)

    again = [run("ddp", HANG), look("again"), run("manual", PASS, MANUAL)]
    assert answer(again, "DDP is the cause")[0] == "undecided"
    other = [run("ddp", HANG), look("other_backend"), run("manual", PASS, MANUAL)]
    assert answer(other, "DDP is the cause")[0] == "supported"


def test_what_was_not_judged_is_no_attempt() -> None:
    outcomes = [run("ddp", ERROR, final=False), run("ddp", PASS, attempt=2), run("manual", PASS, MANUAL)]
    (row,) = rows(outcomes, "DDP is the cause")
    assert row.changed
    assert row.changed.counts == FailureCounts(failed=0, attempts=1)


NEED = "find_unused_parameters is needed"
SEARCHES = {"parallel.find_unused_parameters": "true"}


@pytest.mark.parametrize(
    ("without", "result"),
    [
        (run("ddp", PASS, missing_gradients=()), "refuted"),
        (run("ddp", PASS, {"train.steps": "2"}), "refuted"),
        (run("ddp", PASS), "not tested"),
        (run("ddp", PASS, missing_gradients=("a.weight",)), "not tested"),
        (run("manual", PASS, MANUAL, missing_gradients=()), "not tested"),
        (run("ddp", HANG, missing_gradients=()), "not tested"),
    ],
    ids=["all gradients", "two steps", "unknown", "one is missing", "not under DDP", "failed"],
)
def test_what_is_needed_is_refuted_by_a_run_that_passes_without_it(without: Outcome, result: str) -> None:
    assert answer([without, OTHER], NEED)[0] == result


def test_what_fails_without_it_may_need_it_whatever_else_passes() -> None:
    one_branch = run("cmp", PASS, {"model.branch": "cmp"}, missing_gradients=())
    assert answer([one_branch, run("ddp", HANG)], NEED)[0] == "not tested"


@pytest.mark.parametrize(
    ("without", "with_it", "result"),
    [(HANG, PASS, "supported"), (PASS, HANG, "refuted"), (PASS, PASS, "refuted"), (HANG, HANG, "refuted")],
)
def test_a_need_is_supported_where_it_fails_without_and_passes_with_it(
    without: Status, with_it: Status, result: str
) -> None:
    assert answer([run("off", without), run("on", with_it, SEARCHES)], NEED)[0] == result


def test_a_second_rank_is_not_blamed_for_what_the_wrapper_does() -> None:
    alone = run("alone", PASS, {"parallel.wrapper": "none", "run.ranks": "1"})
    assert answer([alone, run("ddp", HANG)], "more than one rank is the cause")[0] == "not tested"
    outcomes = [alone, run("ddp", HANG), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "more than one rank is the cause")[0] == "refuted"
    assert answer(outcomes, "DDP is the cause")[0] == "supported"


def test_a_backend_that_auto_chose_is_the_backend_that_ran() -> None:
    outcomes = [run("auto", HANG), run("gloo", HANG, {"needs.backend": "gloo"})]
    assert differences(*outcomes) == set()
    over_nccl = run("auto", HANG, backend="nccl", device="cuda")
    over_gloo = run("gloo", PASS, {"needs.backend": "gloo"}, device="cuda")
    assert answer([over_nccl, over_gloo], "NCCL is the cause") == ("supported", "fails with it")


def test_settings_of_nccl_belong_to_it_and_names_that_only_log_to_nobody() -> None:
    wanted = {"needs.backend": "nccl", "run.env.NCCL_P2P_DISABLE": "0", "run.env.NCCL_DEBUG": "INFO"}
    over_nccl = run("nccl", HANG, wanted, backend="nccl")
    over_gloo = run("gloo", PASS, {"run.env.TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert "run.env.NCCL_DEBUG" not in configuration(over_nccl)
    assert answer([over_nccl, over_gloo], "NCCL is the cause")[0] == "supported"
    detailed = run("nccl", HANG, {**wanted, "run.env.TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, backend="nccl")
    assert answer([detailed, over_gloo], "NCCL is the cause")[0] == "not tested"


def test_a_level_of_debugging_that_only_logs_is_no_difference_and_one_that_checks_is() -> None:
    level = "run.env.TORCH_DISTRIBUTED_DEBUG"
    over_gloo = run("gloo", PASS, {level: "INFO"}, device="cuda")
    for value, told in (("INFO", "supported"), ("OFF", "supported"), ("DETAIL", "not tested")):
        over_nccl = run("nccl", HANG, {level: value}, backend="nccl", device="cuda")
        assert answer([over_nccl, over_gloo], "NCCL is the cause")[0] == told


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
    assert answer([run("shape", PASS), ten], "the layer count is the cause")[0] == "not tested"


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
    assert (answer([shorter, longer], "static_graph changes it")[0] != "not tested") is counts


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
    other = replace(
        same,
        spec=replace(same.spec, criteria=tuple(sorted({**dict(same.spec.criteria), key: "7"}.items()))),
    )
    assert answer([bad, same], "DDP is the cause")[0] == "supported"
    assert (answer([bad, other], "DDP is the cause")[0] == "supported") is counts


def test_what_breaks_it_in_one_place_is_not_refuted_by_another_but_by_what_fails_without_it() -> None:
    deep = {"model.layers": "12"}
    outcomes = [
        run("ddp", PASS),
        run("manual", PASS, MANUAL),
        run("deep_ddp", HANG, deep),
        run("deep_manual", PASS, {**deep, **MANUAL}),
    ]
    (row,) = rows(outcomes, "DDP is the cause")
    assert (row.answer.value, row.contrast_counts, row.reason) == (
        "supported",
        (1, 2),
        "fails with it; no difference in ddp",
    )
    outcomes += [run("wide_ddp", HANG, {"model.seq_len": "512"}), run("wide", HANG, {"model.seq_len": "512", **MANUAL})]
    told = [(row.answer.value, row.contrast_counts) for row in rows(outcomes, "DDP is the cause")]
    assert told == [("supported", (1, 3)), ("refuted", (1, 3))]


def test_an_attempt_of_another_launch_is_no_evidence() -> None:
    before = run("ddp", HANG, final=False, spec_hash="before an edit")
    outcomes = [before, run("ddp", PASS, attempt=2), run("manual", PASS, MANUAL)]
    assert answer(outcomes, "DDP is the cause") == ("refuted", "passes with and without it")


@given(RUNS)
def test_no_answer_rests_on_a_skip_an_error_or_an_attempt_that_does_not_count(outcomes: list[Outcome]) -> None:
    for row in hypothesis_rows(outcomes, PLAYBOOK.hypotheses):
        assert (row.control is None) is (row.answer is HypothesisAnswer.NOT_TESTED)
        for side in (row.control, row.changed):
            if side:
                assert side.run.verdict.status in (PASS, *BAD)
                assert side.run.final
                assert 0 <= side.counts.failed <= side.counts.attempts


@given(RUNS)
def test_every_contrast_differs_in_exactly_the_keys_of_its_factor(outcomes: list[Outcome]) -> None:
    for row in hypothesis_rows(outcomes, PLAYBOOK.hypotheses):
        if row.control and row.changed:
            variable = row.hypothesis.variable
            assert differences(row.control.run, row.changed.run) - {"train.steps"} == set(variable.keys)
            assert variable.is_control_value(setting(row.control.run, variable.keys[0]))
            assert variable.is_changed_value(setting(row.changed.run, variable.keys[0]))


@given(RUNS)
def test_a_cause_is_never_supported_where_its_control_did_not_pass(outcomes: list[Outcome]) -> None:
    for row in hypothesis_rows(outcomes, PLAYBOOK.hypotheses):
        if row.answer is HypothesisAnswer.SUPPORTED and row.hypothesis.kind is HypothesisKind.CAUSE:
            assert row.control
            assert row.changed
            assert (row.control.counts.failed, row.changed.counts.failed) == (0, row.changed.counts.attempts)


@given(RUNS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_changes_no_answer(outcomes: list[Outcome], random: Random) -> None:
    shuffled = random.sample(outcomes, len(outcomes))
    assert hypothesis_rows(shuffled, PLAYBOOK.hypotheses) == hypothesis_rows(outcomes, PLAYBOOK.hypotheses)


def test_no_hypothesis_stands_twice() -> None:
    assert len({one.text for one in PLAYBOOK.hypotheses}) == len(PLAYBOOK.hypotheses)


def at_deadline(name: str, settings: dict[str, str] | None = None, left_s: float | None = None) -> Outcome:
    """A run that was still active at its deadline of 60 s, and would have taken `left_s` longer."""
    ended = run(name, FAIL, settings, cause="slow")
    pace = {"steps_done": 3, "step_s": 4.0, "left_s": left_s, "steps_planned": 50}
    told = Finding(code="slow", claim="", ranks=(), place=None, confidence=0.95, proof=(), advice="", facts={})
    return replace(ended, findings=(replace(told, facts={"deadline_s": 60.0, "pace": pace}),))


def took(outcome: Outcome, wall_s: float) -> Outcome:
    return replace(outcome, timing=replace(outcome.timing, wall_s=wall_s))


@pytest.mark.parametrize(
    ("control", "changed", "result", "reason"),
    [
        (took(run("manual", PASS, MANUAL), 5.0), at_deadline("ddp", left_s=140.0), "supported",
         "fails with it; ddp reached its deadline of 60 s, which is no cause: at this rate it would end after 200 s"),
        (took(run("manual", PASS, MANUAL), 58.0), at_deadline("ddp", left_s=4.0), "undecided",
         "slow with it; ddp reached its deadline of 60 s, which is no cause: at this rate it would end after 64 s"),
        (at_deadline("manual", MANUAL), at_deadline("ddp", left_s=4.0), "undecided",
         "slow both ways; manual reached its deadline of 60 s, which is no cause: its rate is not known;"
         " ddp reached its deadline of 60 s, which is no cause: at this rate it would end after 64 s"),
    ],
)  # fmt: skip
def test_a_deadline_is_no_cause_and_only_a_much_longer_run_supports_anything(
    control: Outcome, changed: Outcome, result: str, reason: str
) -> None:
    assert answer([control, changed], "DDP is the cause") == (result, reason)


def test_a_supported_row_says_that_its_scenario_expects_the_failure() -> None:
    outcomes = [run("manual", PASS, MANUAL), run("ddp", FAIL, expected=True)]
    assert answer(outcomes, "DDP is the cause") == ("supported", "fails with it; its scenario expects this failure")


def test_a_variable_without_effect_is_not_compared() -> None:
    reentrant = {"gc.mode": "reentrant"}
    outcomes = [run("plain", PASS), run("reentrant", PASS, reentrant)]
    (row,) = rows(outcomes, "reentrant gradient checkpointing under DDP is the cause")
    assert row.answer is HypothesisAnswer.NOT_TESTED
    assert row.command == "nsa-harness claim plain gc.layers=all gc.mode=non_reentrant,reentrant"
    outcomes = [run("gc", PASS, {"gc.layers": "all"}), run("gc_reentrant", FAIL, {"gc.layers": "all", **reentrant})]
    assert answer(outcomes, "reentrant gradient checkpointing under DDP is the cause")[0] == "supported"
    assert answer(outcomes, "reentrant gradient checkpointing without DDP is the cause")[0] == "not tested"


def test_a_proposal_for_a_variant_of_a_matrix_repeats_its_values_as_overrides() -> None:
    variant = run("sweep@gc.layers=0:2", HANG, {"gc.layers": "0:2"})
    (row,) = rows([variant, OTHER], "DDP is the cause")
    assert row.command == "nsa-harness claim sweep gc.layers=0:2 parallel.wrapper=manual,ddp"
