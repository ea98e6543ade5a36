"""Several attempts: whether all of them ended at one line is said, with how many did."""

from __future__ import annotations

from random import Random

import pytest
from builders import worded
from runs import run

from nsa_harness.core.experiment.repeats import same_place_finding, with_flakiness
from nsa_harness.core.report import Culprit, Outcome, Place, Status

PASS, FAIL, HANG, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.ERROR


def attempts(*ends: tuple[Status, int | None]) -> list[Outcome]:
    return [ended(number, status, line) for number, (status, line) in enumerate(ends, start=1)]


def ended(number: int, status: Status, line: int | None) -> Outcome:
    place = None if line is None else Place(file="/home/ada/model.py", line=line)
    culprit = Culprit(ranks=(0,), step=1, collective=None, place=place)
    return run("ddp", status, attempt=number, culprit=culprit, spec_hash="a", dir=f"ddp~{number}")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([(HANG, 40)] * 5, "5 of 5 attempts hang at the same line ada/model.py:40"),
        (
            [(HANG, 40)] * 4 + [(HANG, 9)],
            "4 of 5 attempts hang at the same line ada/model.py:40; 1 hangs at ada/model.py:9",
        ),
        ([(HANG, 40), (PASS, None)], "1 of 2 attempts hangs at ada/model.py:40; 1 passed"),
        ([(HANG, 40), (FAIL, 40)], "1 of 2 attempts fails at ada/model.py:40; 1 hangs at ada/model.py:40"),
        (
            [(FAIL, 7), (FAIL, 7), (FAIL, None)],
            "2 of 3 attempts fail at the same line ada/model.py:7; 1 at no known line",
        ),
    ],
)
def test_the_line_is_compared_over_all_attempts(ends: list[tuple[Status, int | None]], said: str) -> None:
    told = same_place_finding(attempts(*ends))
    assert told is not None
    assert worded(told).claim == said


@pytest.mark.parametrize(
    "ends", [[(HANG, 40)], [(PASS, None), (PASS, None)], [(HANG, None), (HANG, None)], [(ERROR, 4)] * 2]
)
def test_one_attempt_or_none_that_ended_badly_compares_nothing(ends: list[tuple[Status, int | None]]) -> None:
    assert same_place_finding(attempts(*ends)) is None


def test_the_attempt_that_counts_carries_it_once_whatever_the_order() -> None:
    given = attempts((HANG, 40), (PASS, None), (HANG, 40))
    told = with_flakiness(given)
    assert [[one.code for one in outcome.findings] for outcome in told] == [[], [], ["same_place"]]
    assert with_flakiness(told) == told
    shuffled = with_flakiness(Random(3).sample(given, len(given)))
    assert sorted(shuffled, key=repr) == sorted(told, key=repr)
