"""The cases that a dry run lists: at most so many probes, or about so many where runs fail only sometimes."""

from __future__ import annotations

from statistics import median

import pytest
from bisected import BAD, at_least, bisected, needs, ordered, question, sometimes

from nsa_harness.core.search.effort import possible_cases
from nsa_harness.core.search.question import AnswerKind, QuestionKind, SearchQuestion


def _probes(asked: SearchQuestion, name: str) -> int:
    return next(one.probes for one in possible_cases(asked) if one.name == name)


@pytest.mark.parametrize("asked", [question(12), question(7, repeat=2), question(12, at_once=3), question(1)])
def test_one_alone_takes_at_most_what_is_said_and_not_much_less(asked: SearchQuestion) -> None:
    worst = max(bisected(asked, needs({culprit}))[1].count() for culprit in range(asked.items))
    assert worst <= _probes(asked, "one item is enough") <= worst + 4


def test_whatever_is_found_took_at_most_the_probes_of_its_case() -> None:
    asked = question(12)
    pair = _probes(asked, "two items or a range are needed")
    triple = pair + _probes(asked, "each further item that is needed with them")
    two = pair + _probes(asked, "each further item that is enough on its own")
    count = _probes(asked, "only the number of items matters")
    for other in range(5, 12):
        assert bisected(asked, needs({3, other}))[1].count() <= pair
        assert bisected(asked, needs({1, 4, other}))[1].count() <= triple
        assert bisected(asked, needs({3}, {other}))[1].count() <= two
        assert bisected(asked, at_least(other - 3))[1].count() <= count


def test_of_a_range_there_are_cases_of_its_own() -> None:
    asked = question(12, kind=QuestionKind.RANGE)
    whole, one = _probes(asked, "a whole range is needed"), _probes(asked, "one item is enough")
    for first in range(0, 12, 2):
        assert bisected(asked, needs({first}))[1].count() <= one
        assert bisected(asked, needs(range(first, min(first + 4, 12))))[1].count() <= whole


def test_a_threshold_and_a_choice_take_what_is_said() -> None:
    asked = ordered(24)
    worst = max(bisected(asked, at_least(length))[1].count() for length in range(1, 25))
    assert worst <= _probes(asked, "there is a threshold") <= worst + 2
    choice = question(5, kind=QuestionKind.CHOICE)
    assert bisected(choice, needs({2}))[1].count() == _probes(choice, "each value always fails or always passes")
    assert bisected(choice, needs())[1].count() <= _probes(choice, "some values fail only sometimes")
    rule = sometimes(lambda _: BAD, 0.5, 1)
    assert bisected(choice, rule)[1].count() <= _probes(choice, "some values fail only sometimes")
    assert _probes(choice, "no value ever fails") == 15


@pytest.mark.parametrize(("words", "rate"), [("half", 0.5), ("a fifth", 0.2)])
@pytest.mark.parametrize("asked", [question(12, controls=14), ordered(48, controls=14)])
def test_what_a_flaky_failure_takes_is_foretold_within_a_factor_of_two(
    asked: SearchQuestion, words: str, rate: float
) -> None:
    rule = needs({7}) if asked.kind is QuestionKind.SET else at_least(7)
    searches = [bisected(asked, sometimes(rule, rate, seed)) for seed in range(9)]
    taken = median(probe.count() for answer, probe in searches if answer.kind is not AnswerKind.NONE)
    foretold = _probes(asked, f"it fails in {words} of its runs")
    assert taken / 2 <= foretold <= taken * 2
