"""The matrix of configurations, the files of all runs, and the severity of what was found."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import RUNS, run

from nsa_harness.core.comparison.config_matrix import config_matrix
from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.report import Artifact, Finding, Outcome, Status
from nsa_harness.render.documents.report_sections import file_rows

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
ALONE = {"run.ranks": "1", "parallel.wrapper": "none"}


def test_rows_are_what_was_set_and_columns_how_the_ranks_worked_together() -> None:
    outcomes = [
        run("plain", HANG),
        run("nccl", SKIP, {"needs.backend": "nccl"}, backend="", device=""),
        run("one_gc", PASS, {"gc.layers": "all", **ALONE}),
        run("gc", FAIL, {"gc.layers": "all"}),
        run("again", PASS, {"needs.backend": "gloo"}),
        run("wide", PASS, {"run.ranks": "4", "gc.layers": "all"}),
        run("foreign", PASS, {"run.program": "train.py"}, backend="any"),
    ]
    matrix = config_matrix(outcomes)
    assert matrix is not None
    assert matrix.columns == ("one process", "2 ranks", "ddp · gloo", "ddp · gloo · 4 ranks", "ddp · nccl")
    assert [(row.name, [[one.spec.scenario for one in cell] for cell in row.cells]) for row in matrix.rows] == [
        ("plain", [[], [], ["again", "plain"], [], ["nccl"]]),
        ("gc.layers=all", [["one_gc"], [], ["gc"], ["wide"], []]),
        ("run.program=train.py", [[], ["foreign"], [], [], []]),
    ]


def test_what_all_runs_have_in_common_is_said_once() -> None:
    same = {"train.steps": "3", "model.shape": "ci"}
    matrix = config_matrix([run("a", PASS, same), run("b", PASS, {**same, "gc.layers": "all"})])
    assert matrix is not None
    assert matrix.same == (("model.shape", "ci"), ("train.steps", "3"))
    assert (matrix.columns, [row.name for row in matrix.rows]) == (("gc.layers=all", "gc.layers=none"), ["plain"])


def test_a_sweep_of_two_settings_is_a_table_of_both_with_numbers_by_their_size() -> None:
    outcomes = [
        run(f"{layers} {seq_len}", PASS, {"model.layers": f"{layers}", "model.seq_len": f"{seq_len}"})
        for layers in (12, 5, 1, 10)
        for seq_len in (1024, 128)
        if (layers, seq_len) != (12, 1024)
    ]
    matrix = config_matrix(outcomes)
    assert matrix is not None
    assert matrix.columns == ("model.layers=1", "model.layers=5", "model.layers=10", "model.layers=12")
    assert [(row.name, [len(cell) for cell in row.cells]) for row in matrix.rows] == [
        ("model.seq_len=128", [1, 1, 1, 1]),
        ("model.seq_len=1024", [1, 1, 1, 0]),
    ]


def test_a_setting_of_too_many_values_stays_down() -> None:
    matrix = config_matrix([run(f"l{count}", PASS, {"model.layers": f"{count}"}) for count in range(1, 12)])
    assert matrix is not None
    assert matrix.columns == ("ddp · gloo",)
    assert [row.name for row in matrix.rows] == [f"model.layers={count}" for count in range(1, 12)]


@pytest.mark.parametrize("outcomes", [[], [run("a")], [run("a"), run("a", attempt=2, final=False)]])
def test_one_run_is_no_matrix(outcomes: list[Outcome]) -> None:
    assert config_matrix(outcomes) is None


@given(RUNS, st.randoms(use_true_random=False))
def test_every_run_that_counts_stands_in_exactly_one_cell_in_any_order(outcomes: list[Outcome], random: Random) -> None:
    matrix = config_matrix(outcomes)
    counting = sorted(one.spec.scenario for one in outcomes if one.final)
    assert config_matrix(random.sample(outcomes, len(outcomes))) == matrix
    if matrix is None:
        assert len(counting) < 2
        return
    assert sorted(one.spec.scenario for row in matrix.rows for cell in row.cells for one in cell) == counting
    assert {len(row.cells) for row in matrix.rows} == {len(matrix.columns)}
    assert all(any(row.cells) for row in matrix.rows)


def test_the_files_of_all_attempts_are_counted_and_each_absence_has_its_reason() -> None:
    def having(name: str, *artifacts: Artifact) -> Outcome:
        return run(name, artifacts=artifacts)

    outcomes = [
        having("a", Artifact(path="x", count=3, absent=None), Artifact(path="y", count=None, absent="off")),
        having("b", Artifact(path="x", count=4, absent=None), Artifact(path="y", count=None, absent="not reached")),
        having("c", Artifact(path="x", count=0, absent=None), Artifact(path="y", count=None, absent="off")),
        run("skipped", SKIP),
    ]
    assert list(file_rows(outcomes)) == [
        ("x", "3 of 3", "7", ""),
        ("y", "0 of 3", "none", "off (2); not reached (1)"),
    ]


def found(code: str) -> Finding:
    return Finding(code=code, claim="", ranks=(), place=None, confidence=1.0, proof=(), advice="")


@pytest.mark.parametrize(
    ("outcome", "code", "level"),
    [
        (run("a", HANG, cause="lock_cycle"), "lock_cycle", "critical"),
        (run("a", FAIL, cause="exception"), "exception", "critical"),
        (run("a", FAIL, cause="unknown"), "unknown", "critical"),
        (run("a", FAIL, cause="slow"), "slow", "critical"),
        (run("a", FAIL, cause="expectation_missed"), "expectation_missed", "critical"),
        (run("a", FAIL, cause="exception"), "orphan_process", "warning"),
        (run("a", FAIL, cause="exception", expected=True), "exception", "critical"),
        (run("a", ERROR, cause="harness_error", expected=True), "harness_error", "info"),
        (run("a", PASS), "no_gradient", "warning"),
        (run("a", ERROR, cause="interrupted"), "interrupted", "info"),
        (run("a", ERROR, cause="harness_error"), "harness_error", "warning"),
    ],
)
def test_a_finding_weighs_what_it_means_for_the_run(outcome: Outcome, code: str, level: str) -> None:
    assert severity(found(code), outcome).value == level
