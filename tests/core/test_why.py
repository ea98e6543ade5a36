"""Why ranks part: which kind of answer the runs give, which run comes next, and the change as a patch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runs import run

from nsa_harness.core.experiment.why import (
    FirstAnswer,
    Proof,
    RunResult,
    WhyReport,
    WhyResult,
    WhyRun,
    first_answer,
    is_budget_used,
    needs_recorded_run,
    ranks_part,
    result_of,
    run_result,
    with_decision,
)
from nsa_harness.core.recording.explanation import (
    Candidate,
    Division,
    Explanation,
    OriginKind,
    RankValues,
)
from nsa_harness.core.report import Culprit, Outcome, Place, Status

PASS, FAIL, HANG, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.ERROR


def ended(status: Status, cause: str = "uneven_inputs", line: int = 9, ranks: tuple[int, ...] = (1,)) -> Outcome:
    place = Place(file="/own/train.py", line=line)
    return run("train", status, cause=cause, culprit=Culprit(ranks=ranks, step=1, collective=None, place=place))


def candidate(line: int) -> Candidate:
    return Candidate(place=Place(file="/own/train.py", line=line), kind=OriginKind.RANDOM, ranks=(1,))


def report(*runs: WhyRun, cause: str = "uneven_inputs", candidates: int = 2, **more: Any) -> WhyReport:
    explanation = Explanation(candidates=tuple(map(candidate, range(1, candidates + 1))), division=None, ends=())
    first = first_answer(ended(HANG, cause), "r", "/r", "")
    made = WhyReport(
        scenario="train", first=first, directory="/own", max_runs=6, explanation=explanation, runs=runs, **more
    )
    return replace(made, result=result_of(made))


def recorded(result: RunResult = RunResult.SAME) -> WhyRun:
    return WhyRun(dir="train", end="HANG", result=result, wall_s=2.0)


def tried(proof: Proof, index: int = 0) -> WhyRun:
    return replace(recorded(), experiment="set_value", candidate=index, proof=proof)


@pytest.mark.parametrize(
    ("made", "result", "origin"),
    [
        (report(), WhyResult.UNDECIDED, 1),
        (report(recorded(RunResult.UNJUDGED)), WhyResult.UNDECIDED, 1),
        (report(recorded(RunResult.PASSED)), WhyResult.PASSED, 1),
        (report(recorded(RunResult.PASSED), recorded(RunResult.OTHERWISE)), WhyResult.OTHERWISE, 1),
        (report(recorded()), WhyResult.LIKELY, 1),
        (report(recorded(), candidates=0), WhyResult.NOT_EXPLAINED, None),
        (report(recorded(), cause="pipe_full"), WhyResult.FIRST_LINE, 1),
        (report(recorded(), tried(Proof.ORIGIN)), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.ORIGIN), recorded()), WhyResult.CERTAIN, 1),
        (report(recorded(), tried(Proof.ORIGIN), recorded(RunResult.PASSED)), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.ORIGIN), recorded(), passed_before=1), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.RACE), recorded()), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.SECOND_CAUSE)), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.DROPPED), tried(Proof.ORIGIN, 1), recorded()), WhyResult.CERTAIN, 2),
        (report(recorded(), tried(Proof.DROPPED), tried(Proof.ORIGIN), recorded()), WhyResult.CERTAIN, 1),
        (report(recorded(), tried(Proof.DROPPED)), WhyResult.LIKELY, 2),
        (report(recorded(), tried(Proof.NONE)), WhyResult.LIKELY, 1),
        (report(recorded(), tried(Proof.DROPPED), tried(Proof.DROPPED, 1)), WhyResult.NOT_EXPLAINED, None),
        (report(recorded(), tried(Proof.DROPPED), tried(Proof.DECISION), recorded()), WhyResult.DECISION, 2),
        (
            report(recorded(), tried(Proof.DROPPED), tried(Proof.DECISION), recorded(), candidates=1),
            WhyResult.NOT_EXPLAINED,
            None,
        ),
    ],
)
def test_only_an_experiment_on_the_origin_makes_the_answer_certain(
    made: WhyReport, result: WhyResult, origin: int | None
) -> None:
    assert made.result is result
    line = made.origin.place.line if made.origin else None
    assert line == origin
    assert made.origin not in made.others


@pytest.mark.parametrize(
    ("again", "result"),
    [
        (ended(PASS), RunResult.PASSED),
        (ended(HANG), RunResult.SAME),
        (ended(HANG, "collective_order_mismatch", 9, (0,)), RunResult.SAME),
        (ended(HANG, "uneven_inputs", 4, (0,)), RunResult.SAME),
        (ended(HANG, "lock_cycle", 4), RunResult.SAME),
        (ended(HANG, "lock_cycle", 4, (0,)), RunResult.OTHERWISE),
        (ended(FAIL), RunResult.OTHERWISE),
        (ended(FAIL, "slow"), RunResult.SAME),  # at the same line
        (ended(FAIL, "slow", 4), RunResult.OTHERWISE),
        (ended(ERROR), RunResult.UNJUDGED),
    ],
)
def test_a_recorded_run_fails_alike_if_cause_line_or_ranks_are_the_same(again: Outcome, result: RunResult) -> None:
    assert run_result(ended(HANG), again) is result


def test_a_proven_decision_is_a_candidate_and_a_call_behind_it_only_an_effect() -> None:
    effect = replace(candidate(9), kind=OriginKind.CALL)
    values = (RankValues(name="bad", values=((0, "0"), (1, "3"))),)
    division = Division(
        place=Place(file="/own/train.py", line=7), occurrence=4, ways=(((1,), None), ((0,), None)),
        condition="bad >= 3", values=values,
    )  # fmt: skip
    found = Explanation(candidates=(effect,), division=division, ends=(((1,), effect.place, "barrier"),))
    decided = with_decision(found, division.place, "bad")
    assert [one.place.line for one in decided.candidates] == [9, 7]
    assert with_decision(decided, division.place, "bad") == decided
    made = replace(report(recorded(), tried(Proof.DECISION), recorded()), explanation=decided)
    assert made.origin is not None
    assert (made.origin.place.line, made.origin.name, made.origin.values) == (7, "bad", values)
    assert replace(made, runs=(recorded(),)).origin == effect


def test_a_run_that_also_passes_is_flaky() -> None:
    assert report(recorded(RunResult.PASSED), recorded()).is_flaky
    assert report(recorded(), passed_before=1).is_flaky
    assert not report(recorded()).is_flaky


def test_recorded_runs_end_with_the_first_that_fails_alike_and_the_budget_ends_all() -> None:
    assert needs_recorded_run(report(), 1)
    assert needs_recorded_run(report(recorded(RunResult.PASSED)), 2)
    assert not needs_recorded_run(report(recorded(RunResult.PASSED)), 1)
    assert not needs_recorded_run(report(recorded()), 2)
    assert needs_recorded_run(report(recorded(), tried(Proof.DECISION)), 2), "the control run"
    assert not needs_recorded_run(report(recorded(), tried(Proof.DECISION), recorded()), 2)
    assert not needs_recorded_run(report(recorded(), tried(Proof.DROPPED)), 2)
    assert not is_budget_used(report(recorded()))
    assert is_budget_used(replace(report(recorded()), max_runs=1))
    assert is_budget_used(replace(report(recorded()), budget_s=2.0))
    assert not is_budget_used(replace(report(recorded()), budget_s=2.1))


@pytest.mark.parametrize(
    ("outcome", "ranks", "parts"),
    [
        (ended(HANG), 2, True),
        (ended(HANG), 1, False),
        (ended(PASS), 2, False),
        (ended(HANG, "lock_cycle"), 2, False),
        (ended(FAIL, "exception", ranks=(0, 1)), 2, False),
        (ended(FAIL, "exception"), 2, True),
        (ended(FAIL, "cuda_oom"), 2, False),
    ],
)
def test_a_recorded_run_is_made_where_ranks_took_different_ways(outcome: Outcome, ranks: int, parts: bool) -> None:
    assert ranks_part(outcome, ranks) is parts


def test_the_first_answer_keeps_what_the_failed_run_said() -> None:
    first = first_answer(ended(HANG, "lock_cycle"), "r", "/r", "Release it.")
    assert first == FirstAnswer(
        run_id="r", path="/r", attempt="train", verdict=HANG, cause="lock_cycle", ranks=(1,), stands=True,
        place=Place(file="/own/train.py", line=9), advice="Release it.",
    )  # fmt: skip
