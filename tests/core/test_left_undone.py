"""What a run left undone without a word: a run for each rule, and what the probe's records must say for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import case, ended, evidence, finding_of, rank_evidence

from nsa_harness.core.diagnosis.rules import silent_faults
from nsa_harness.core.evidence.evidence import RankEvidence
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import DroppedBatches, GradientArrivals, HealthSamples, UnawaitedCall
from nsa_harness.core.report import Place

LINE = Place(file="/home/ada/train.py", line=18, function="step")
OTHER = Place(file="/home/ada/train.py", line=30, function="step")


def rank(number: int, looks: HealthSamples | None = None) -> RankEvidence:
    return rank_evidence(number, exit=ended(number), health=looks)


def found(rule: Any, *ranks: RankEvidence) -> Any:
    explanation = rule(case(evidence(*ranks)))
    return finding_of(explanation) if explanation else None


def arrived(**changes: Any) -> HealthSamples:
    return HealthSamples(gradient_arrivals=(GradientArrivals(**{"model": "Net", "sample_count": 6, **changes}),))


def test_a_line_whose_handles_nobody_asks_is_told_with_the_ranks_that_have_it() -> None:
    mine = HealthSamples(unawaited_calls=(UnawaitedCall(op="all_reduce", place=LINE, calls=48),))
    both = HealthSamples(unawaited_calls=(*mine.unawaited_calls, UnawaitedCall(op="irecv", place=OTHER, calls=6)))
    one = found(
        silent_faults.unwaited_collective,
        rank(0, mine),
        rank(1, both),
        rank(2, HealthSamples(unawaited_calls=both.unawaited_calls[1:])),
    )
    assert (one.code, one.ranks, one.place, one.confidence) == ("unwaited_collective", (0, 1), LINE, 0.85)
    assert (one.facts["op"], one.facts["calls"], one.facts["more_lines"]) == ("all_reduce", 48, 1)


def test_an_exception_that_all_ranks_caught_alike_is_told_with_the_batches_that_it_cost() -> None:
    lost = HealthSamples(dropped_batches=(DroppedBatches(type="IndexError", place=LINE, batches=2, step=4),))
    later = DroppedBatches(type="KeyError", place=OTHER, batches=1, step=9)
    one = found(
        silent_faults.batches_given_up,
        rank(0, lost),
        rank(1, HealthSamples(dropped_batches=(later, *lost.dropped_batches))),
        rank(2, HealthSamples(dropped_batches=(later,))),
    )
    assert (one.code, one.ranks, one.place, one.confidence) == ("swallowed_exception", (0, 1), LINE, 0.85)
    facts = one.facts
    assert (facts["exception"], facts["batches"], facts["other_exceptions"]) == ("IndexError", 2, 1)


def test_an_exception_that_reached_a_rank_as_it_was_ended_is_not_taken_for_one_that_was_caught() -> None:
    lost = HealthSamples(dropped_batches=(DroppedBatches(type="RuntimeError", place=LINE, batches=1, step=4),))
    ended_by_a_signal = replace(rank(0, lost), exit=ended(0, -15))
    assert silent_faults.batches_given_up(case(evidence(ended_by_a_signal, rank(1, HealthSamples())))) is None


def test_parameters_that_hold_what_nobody_begins_with_are_told() -> None:
    unset = arrived(unset=("0.scale", "0.shift"), unset_value="2.2e+32")
    one = found(silent_faults.uninitialised_parameters, rank(0, unset), rank(1, arrived()))
    assert (one.code, one.ranks, one.place.parameter) == ("uninitialised_parameters", (0,), "0.scale")
    assert (one.facts["parameter"], one.facts["more_parameters"]) == ("0.scale", 1)
    assert (one.facts["model"], one.facts["value"]) == ("Net", "2.2e+32")


def test_a_rank_whose_own_gradients_are_zero_is_told_though_the_sum_over_all_is_not() -> None:
    one = found(silent_faults.no_gradient, rank(0, arrived()), rank(1, arrived(zero_gradient_count=8)))
    assert (one.code, one.ranks, one.place) == ("no_gradient", (1,), None)
    facts = one.facts
    assert (facts["variant"], facts["model"], facts["samples"]) == ("backward_left_zeros", "Net", 6)


def test_parameters_without_a_gradient_are_told_of_a_program_that_steps_by_hand() -> None:
    without = arrived(without_gradient=("encoder.0.weight", "encoder.0.bias"), without_gradient_count=5)
    one = found(silent_faults.no_gradient, rank(0, without), rank(1, without))
    assert (one.ranks, one.place.parameter) == ((0, 1), "encoder.0.weight")
    assert one.left_open == ("detach may keep these parameters out of training on purpose",)
    alone = found(silent_faults.no_gradient, rank(0, arrived()), rank(1, without))
    assert alone.left_open == ()
    assert (one.confidence, alone.confidence) == (0.75, 0.85)
    assert (one.facts["variant"], one.facts["count"], one.facts["samples"]) == ("backward_left_none", 5, 6)


@pytest.mark.parametrize(
    "looks",
    [
        None,
        HealthSamples(),
        arrived(),
        arrived(zero_gradient_count=8, sample_count=3),
        arrived(without_gradient_count=2, sample_count=3),
    ],
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
    assert looks.unawaited_calls == (UnawaitedCall(op="irecv", place=LINE, calls=3),)
    assert looks.dropped_batches == (DroppedBatches(type="ValueError", place=LINE, batches=1, step=2),)
    assert looks.gradient_arrivals == (
        GradientArrivals(
            model="Net",
            sample_count=5,
            zero_gradient_count=4,
            without_gradient=("a",),
            without_gradient_count=9,
            unset=("b",),
            unset_value="nan",
        ),
    )
