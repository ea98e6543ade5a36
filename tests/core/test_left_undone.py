"""What a run left undone without a word: a run for each rule, and what the probe's records must say for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import case, ended, evidence, finding_of, rank_evidence, whole

from nsa_harness.core.diagnosis.rules import silent_faults
from nsa_harness.core.evidence.evidence import RankEvidence
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import Arrived, GivenUp, HealthSamples, Unwaited
from nsa_harness.core.report import Place

LINE = Place(file="/home/ada/train.py", line=18, function="step")
OTHER = Place(file="/home/ada/train.py", line=30, function="step")


def rank(number: int, looks: HealthSamples | None = None) -> RankEvidence:
    return rank_evidence(number, exit=ended(number), looks=looks)


def found(rule: Any, *ranks: RankEvidence) -> Any:
    explanation = rule(case(evidence(*ranks)))
    return finding_of(explanation) if explanation else None


def arrived(**changes: Any) -> HealthSamples:
    return HealthSamples(arrived=(Arrived(**{"model": "Net", "looks": 6, **changes}),))


def test_a_line_whose_handles_nobody_asks_is_told_with_the_ranks_that_have_it() -> None:
    mine = HealthSamples(unwaited=(Unwaited(op="all_reduce", place=LINE, calls=48),))
    both = HealthSamples(unwaited=(*mine.unwaited, Unwaited(op="irecv", place=OTHER, calls=6)))
    one = found(
        silent_faults.unwaited_collective,
        rank(0, mine),
        rank(1, both),
        rank(2, HealthSamples(unwaited=both.unwaited[1:])),
    )
    assert (one.code, one.ranks, one.place, one.confidence) == ("unwaited_collective", (0, 1), LINE, 0.85)
    assert one.claim == (
        "ranks 0, 1 started 48 asynchronous all_reduces at ada/train.py:18, and asked none of them whether it is done,"
        " and 1 more line did not either"
    )


def test_an_exception_that_all_ranks_caught_alike_is_told_with_the_batches_that_it_cost() -> None:
    lost = HealthSamples(given_up=(GivenUp(type="IndexError", place=LINE, batches=2, step=4),))
    later = GivenUp(type="KeyError", place=OTHER, batches=1, step=9)
    one = found(
        silent_faults.batches_given_up,
        rank(0, lost),
        rank(1, HealthSamples(given_up=(later, *lost.given_up))),
        rank(2, HealthSamples(given_up=(later,))),
    )
    assert (one.code, one.ranks, one.place, one.confidence) == ("swallowed_exception", (0, 1), LINE, 0.85)
    assert one.claim == (
        "IndexError was raised at ada/train.py:18 in step 4 on ranks 0, 1 and caught; it cost 2 batches, with no step"
        " for them, as did 1 other exception"
    )


def test_an_exception_that_reached_a_rank_as_it_was_ended_is_not_taken_for_one_that_was_caught() -> None:
    lost = HealthSamples(given_up=(GivenUp(type="RuntimeError", place=LINE, batches=1, step=4),))
    ended_by_a_signal = replace(rank(0, lost), exit=ended(0, -15))
    assert silent_faults.batches_given_up(case(evidence(ended_by_a_signal, rank(1, HealthSamples())))) is None


def test_parameters_that_hold_what_nobody_begins_with_are_told() -> None:
    unset = arrived(unset=("0.scale", "0.shift"), unset_value="2.2e+32")
    one = found(silent_faults.uninitialised_parameters, rank(0, unset), rank(1, arrived()))
    assert (one.code, one.ranks, one.place.parameter) == ("uninitialised_parameters", (0,), "0.scale")
    assert one.claim.startswith("0.scale and 1 more parameter of Net held 2.2e+32 on rank 0 before the first step")


def test_a_rank_whose_own_gradients_are_zero_is_told_though_the_sum_over_all_is_not() -> None:
    one = found(silent_faults.no_gradient, rank(0, arrived()), rank(1, arrived(still=8)))
    assert (one.code, one.ranks, one.place) == ("no_gradient", (1,), None)
    assert one.claim == (
        "each backward pass that was looked at, 6 of them, left Net on rank 1 with gradients that were all zero"
    )


def test_parameters_without_a_gradient_are_told_of_a_program_that_steps_by_hand() -> None:
    without = arrived(never=("encoder.0.weight", "encoder.0.bias"), never_count=5)
    one = found(silent_faults.no_gradient, rank(0, without), rank(1, without))
    assert (one.ranks, one.place.parameter) == ((0, 1), "encoder.0.weight")
    assert whole(one).endswith("; they are kept out of training on purpose, by detach")
    alone = found(silent_faults.no_gradient, rank(0, arrived()), rank(1, without))
    assert not whole(alone).endswith("by detach")
    assert (one.confidence, alone.confidence) == (0.75, 0.85)
    assert one.claim.startswith("5 parameters of Net never had a gradient at any of 6 looks on ranks 0, 1, although")


@pytest.mark.parametrize(
    "looks", [None, HealthSamples(), arrived(), arrived(still=8, looks=3), arrived(never_count=2, looks=3)]
)
def test_nothing_is_said_of_what_was_seen_too_seldom_or_not_at_all(looks: HealthSamples | None) -> None:
    rules = (
        silent_faults.unwaited_collective,
        silent_faults.batches_given_up,
        silent_faults.uninitialised_parameters,
        silent_faults.no_gradient,
    )
    assert [found(one, rank(0, looks), rank(1, HealthSamples())) for one in rules] == [None] * 4


def test_what_the_probe_tells_at_the_end_is_read_back() -> None:
    place = "/home/ada/train.py:18:step"
    looks = read_health_samples(
        [
            {"at": "unwaited", "op": "irecv", "place": place, "calls": 3},
            {"at": "given up", "type": "ValueError", "place": place, "batches": 1, "step": 2},
            {
                "at": "gradients",
                "model": "Net",
                "looks": 5,
                "still": 4,
                "never": 9,
                "never_names": ["a"],
                "unset": ["b"],
                "unset_value": "nan",
            },
        ]
    )
    assert looks is not None
    assert looks.unwaited == (Unwaited(op="irecv", place=LINE, calls=3),)
    assert looks.given_up == (GivenUp(type="ValueError", place=LINE, batches=1, step=2),)
    assert looks.arrived == (
        Arrived(model="Net", looks=5, still=4, never=("a",), never_count=9, unset=("b",), unset_value="nan"),
    )
