"""Attempts of one launch together: the last one counts, and where they disagree none is believed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import run

from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.report import Outcome, Status

PASS, FAIL, HANG, SKIP, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR


def attempts(*statuses: Status, name: str = "ddp", **changes: object) -> list[Outcome]:
    return [run(name, status, attempt=number, **changes) for number, status in enumerate(statuses, start=1)]


def test_the_last_attempt_counts() -> None:
    told = with_flakiness([*attempts(HANG, HANG), *attempts(PASS, name="other")])
    assert [(one.final, one.flaky) for one in told] == [(False, False), (True, False), (True, False)]
    assert told[1].verdict.status is HANG


def test_attempts_that_disagree_are_flaky_and_the_last_one_fails() -> None:
    first, second = with_flakiness(attempts(HANG, PASS))
    assert (first.verdict.status, first.final, first.flaky) == (HANG, False, True)
    assert (second.verdict.status, second.verdict.cause, second.final, second.flaky) == (FAIL, "flaky", True, True)
    assert second.verdict.summary == "the same launch ended differently: attempt 1 HANG, attempt 2 PASS"
    assert not second.expected


@pytest.mark.parametrize(
    ("statuses", "last"), [((ERROR, PASS), PASS), ((PASS, ERROR), ERROR), ((SKIP, PASS), PASS), ((FAIL, FAIL), FAIL)]
)
def test_what_was_not_judged_disagrees_with_nothing(statuses: tuple[Status, ...], last: Status) -> None:
    told = with_flakiness(attempts(*statuses))
    assert (told[-1].verdict.status, [one.flaky for one in told]) == (last, [False, False])


def test_an_error_stays_one_beside_attempts_that_disagree() -> None:
    told = with_flakiness(attempts(PASS, FAIL, ERROR))
    assert (told[-1].verdict.status, told[-1].flaky) == (ERROR, True)


def test_another_launch_of_the_same_name_is_not_the_same_thing_done_twice() -> None:
    told = with_flakiness([run("ddp", PASS, spec_hash="a"), run("ddp", HANG, attempt=2, spec_hash="b")])
    assert [(one.final, one.flaky) for one in told] == [(False, False), (True, False)]


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ((("expect.verdict", "FAIL"),), True),
        ((("expect.cause", "flaky"), ("expect.verdict", "FAIL")), True),
        ((("expect.cause", "exception"), ("expect.verdict", "FAIL")), False),
        ((("expect.verdict", "PASS"),), False),
        ((), False),
    ],
)
def test_flaky_is_expected_only_where_it_was_announced(criteria: tuple[tuple[str, str], ...], expected: bool) -> None:
    assert with_flakiness(attempts(PASS, HANG, criteria=criteria))[-1].expected is expected


_ATTEMPTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(list(Status))), max_size=6).map(
    lambda drawn: [
        run(name, status, attempt=sum(other == name for other, _ in drawn[: index + 1]))
        for index, (name, status) in enumerate(drawn)
    ]
)


@given(_ATTEMPTS)
def test_each_scenario_has_one_attempt_that_counts_and_none_is_lost(outcomes: list[Outcome]) -> None:
    told = with_flakiness(outcomes)
    assert [(one.spec.scenario, one.attempt) for one in told] == [(one.spec.scenario, one.attempt) for one in outcomes]
    assert sorted(one.spec.scenario for one in told if one.final) == sorted({one.spec.scenario for one in outcomes})


@given(_ATTEMPTS, st.randoms(use_true_random=False))
def test_it_changes_nothing_when_applied_again_or_in_another_order(outcomes: list[Outcome], random: Random) -> None:
    told = with_flakiness(outcomes)
    assert with_flakiness(told) == told
    shuffled = with_flakiness(random.sample(outcomes, len(outcomes)))
    assert sorted(shuffled, key=repr) == sorted(told, key=repr)
