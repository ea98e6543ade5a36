"""A choice of one among many: each value by itself, and no value blamed where all fail alike often."""

from __future__ import annotations

from random import Random

import pytest
from bisected import BAD, DIFFERENT, GOOD, UNRESOLVED, bisected, question, sometimes

from nsa_harness.core.search.question import AnswerKind, ProbeResult, Purpose, QuestionKind, Subset

SEEDS = range(40)


def _choice(items: int, **changes: object):
    return question(items, kind=QuestionKind.CHOICE, **changes)


def _one_of(*values: int):
    return lambda subset: BAD if subset & frozenset(values) else GOOD


def _at_rates(*rates: float, seed: int):
    """Each value fails at a rate of its own."""
    rules = [sometimes(lambda _: BAD, rate, seed * 100 + value) for value, rate in enumerate(rates)]
    return lambda subset: rules[min(subset)](subset)


def test_each_value_is_asked_alone_once_and_once_more_as_a_proof_and_both_lists_are_answered() -> None:
    answer, probe = bisected(_choice(5), _one_of(1, 3))
    assert (answer.kind, answer.items, answer.open, answer.confidence) == (AnswerKind.CHOICE, (1, 3), (), 1.0)
    assert (answer.failing, answer.passing) == ({1}, {0})
    assert probe.by_purpose() == {Purpose.EACH: 5, Purpose.PROOF_BAD: 2, Purpose.PROOF_GOOD: 3}
    assert all(len(subset) == 1 for one in probe.rounds for subset in one.subsets)


def test_values_run_side_by_side_where_that_is_allowed() -> None:
    _, probe = bisected(_choice(5, at_once=4), _one_of(2))
    assert [len(one.subsets) for one in probe.rounds] == [4, 1, 1, 4]


def test_where_no_value_fails_the_search_stops_after_its_controls() -> None:
    answer, probe = bisected(_choice(4), _one_of())
    assert answer.kind is AnswerKind.NONE
    assert "each value passed 3 of 3" in answer.why
    assert probe.count() == 12
    assert bisected(_choice(4, controls=5), _one_of())[1].count() == 20


def test_a_value_that_fails_in_another_way_or_cannot_be_judged_is_left_open() -> None:
    answers = (BAD, DIFFERENT, GOOD, UNRESOLVED)
    answer, _ = bisected(_choice(4), lambda subset: answers[min(subset)])
    assert (answer.kind, answer.items, answer.open) == (AnswerKind.CHOICE, (0,), (1, 3))
    nothing, _ = bisected(_choice(2), lambda subset: (GOOD, DIFFERENT)[min(subset)])
    assert (nothing.kind, nothing.open) == (AnswerKind.UNDECIDED, (1,))


def test_where_each_value_fails_it_does_not_depend_on_the_value() -> None:
    answer, _ = bisected(_choice(3), _one_of(0, 1, 2))
    assert (answer.kind, answer.p_bad) == (AnswerKind.INDEPENDENT, None)
    assert "each value that could be judged fails: 6 of 6 runs" in answer.why


@pytest.mark.parametrize(("rates", "found"), [((0.0, 0.8, 0.0, 0.0), (1,)), ((0.9, 0.1, 0.9, 0.0), (0, 2))])
def test_a_value_that_fails_more_often_than_others_is_found(rates: tuple[float, ...], found: tuple[int, ...]) -> None:
    answers = [bisected(_choice(4), _at_rates(*rates, seed=seed))[0] for seed in SEEDS]
    right = [one for one in answers if one.kind is AnswerKind.CHOICE and set(one.items) == set(found)]
    assert len(right) >= 36
    assert all(one.confidence < 1 for one in right if one.p_bad is not None)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_no_value_is_blamed_where_all_fail_alike_often(rate: float) -> None:
    answers = [bisected(_choice(4, flaky=True), _at_rates(*[rate] * 4, seed=seed))[0] for seed in SEEDS]
    assert sum(one.kind is AnswerKind.CHOICE for one in answers) <= 2
    assert sum(one.kind is AnswerKind.INDEPENDENT for one in answers) >= 36


def test_where_flakiness_is_the_question_values_that_part_are_asked_until_their_rates_have() -> None:
    answer, probe = bisected(_choice(4, flaky=True), _one_of(2))
    assert (answer.kind, answer.items, answer.p_bad) == (AnswerKind.CHOICE, (2,), None)
    assert probe.by_purpose() == {Purpose.REPEAT: 5 * 4, Purpose.PROOF_BAD: 1, Purpose.PROOF_GOOD: 3}


def test_a_value_that_cannot_be_judged_is_not_asked_for_ever() -> None:
    rule = _at_rates(0.5, 0.5, seed=3)
    _, probe = bisected(_choice(3, flaky=True), lambda one: UNRESOLVED if 2 in one else rule(one))
    asked = [subset for one in probe.rounds for subset in one.subsets]
    assert asked.count(Subset({2})) == 2


def test_whatever_the_values_do_a_search_ends_and_contradicts_no_probe_of_its_own() -> None:
    for seed in range(100):
        random = Random(seed)
        # How likely it is good, bad, different, unresolved.
        ways = (
            [1, 0, 0, 0],
            [0, 1, 0, 0],
            [1, 1, 1, 1],
            [3, 1, 0, 0],
            [1, 0, 0, 9],
        )
        weights = [random.choice(ways) for _ in range(5)]
        asked = _choice(5, flaky=seed % 2 == 0, at_once=1 + seed % 3)
        answer, probe = bisected(asked, lambda one, w=weights, r=random: r.choices([*ProbeResult], w[min(one)])[0])
        assert probe.count() <= 5 * 4 * 14
        assert not set(answer.items) & set(answer.open)
        for value in answer.items:
            assert weights[value][1], "what is named has failed"
        if answer.confidence == 1.0 and answer.kind is AnswerKind.CHOICE:
            always = [value for value in range(5) if weights[value] == [0, 1, 0, 0]]
            assert set(always) <= set(answer.items)
