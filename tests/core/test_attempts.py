"""When a scenario is run once more, and when a plan ends early."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from builders import evidence, rank_evidence, spec

from nsa_harness.commands.judge import judge_evidence
from nsa_harness.commands.scheduler import Execution, RunRequest
from nsa_harness.commands.session import Session
from nsa_harness.core.report import Outcome, Status, Verdict
from nsa_harness.core.schedule import ONCE, Policy, failed_enough, needs_another_attempt
from nsa_harness.supervisor.storage.rundir import RunOptions


def attempt(status: str, *, expected: bool | None = None, cause: str | None = None) -> Outcome:
    plain = judge_evidence(
        spec(), evidence(rank_evidence(0)), attempt=1, directory="s", artifacts=(), metrics={}, repeat=""
    )
    verdict = Verdict(status=Status(status), kind=None, cause=cause, summary="")
    return replace(plain, verdict=verdict, expected=status == "PASS" if expected is None else expected)


PASS, FAIL, ERROR = attempt("PASS"), attempt("FAIL"), attempt("ERROR", expected=True)
WANTED_FAIL, CUT = attempt("FAIL", expected=True), attempt("ERROR", cause="interrupted")


@pytest.mark.parametrize(
    ("policy", "attempts", "wanted"),
    [
        (ONCE, [], True),
        (ONCE, [FAIL], False),
        (ONCE, [CUT], False),
        (Policy(repeat=2), [PASS], True),
        (Policy(repeat=2), [PASS, PASS], False),
        (Policy(repeat=2), [PASS, CUT], False),
        (Policy(retries=1), [CUT], True),
        (Policy(retries=1), [CUT, CUT], False),
        (Policy(retries=1), [FAIL], True),
        (Policy(retries=1), [ERROR], True),
        (Policy(retries=1), [PASS], False),
        (Policy(retries=1), [WANTED_FAIL], False),
        (Policy(retries=1), [FAIL, FAIL], False),
        (Policy(repeat=2, retries=1), [FAIL, PASS], False),
        (Policy(repeat=2, retries=1), [PASS, FAIL], True),
    ],
)
def test_another_attempt(policy: Policy, attempts: list[Outcome], wanted: bool) -> None:
    assert needs_another_attempt(policy, attempts) is wanted


def test_a_plan_ends_with_the_first_failure_too_many() -> None:
    assert not failed_enough(ONCE, [[FAIL], [FAIL]])
    assert not failed_enough(Policy(maxfail=2), [[FAIL], [PASS], [WANTED_FAIL], []])
    assert failed_enough(Policy(maxfail=2), [[FAIL], [PASS], [ERROR]])


def test_a_scenario_that_goes_on_has_not_failed_yet() -> None:
    assert not failed_enough(Policy(maxfail=1, retries=1), [[FAIL]])
    assert failed_enough(Policy(maxfail=1, retries=1), [[FAIL, replace(FAIL, attempt=2)]])


def test_attempts_that_disagree_are_a_failure_though_the_last_one_passed() -> None:
    assert failed_enough(Policy(maxfail=1, retries=1), [[FAIL, replace(PASS, attempt=2)]])


def test_only_what_an_earlier_session_left_unfinished_is_made_again() -> None:
    request = RunRequest(specs=(), options=RunOptions(command="run"))
    name, launch = CUT.spec.scenario, replace(spec(), scenario=CUT.spec.scenario)
    execution = Execution(session=cast("Session", None), request=request)
    execution.remember([CUT])
    assert execution._wanted(launch)
    execution.attempts[name].append(replace(CUT, attempt=2))
    assert not execution._wanted(launch)
