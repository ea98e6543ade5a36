"""Bisect among flaky runs: every answer is evidence, few enough probes, and a confidence that is less than certain."""

from __future__ import annotations

from statistics import mean

import pytest
from bisected import GOOD, UNRESOLVED, at_least, bisected, needs, ordered, question, shown, sometimes

from nsa_harness.core.bisect.chain import Chain
from nsa_harness.core.bisect.noisy import Belief, tries
from nsa_harness.core.bisect.question import AnswerKind, CountsAs, ProbeAnswer, Purpose, Subset

SEEDS = range(40)


@pytest.mark.parametrize(
    ("rate", "false_bad", "right", "probes"),
    [(0.5, 0.0, 38, 1.6 * 23), (0.5, 0.01, 38, 1.6 * 23), (0.8, 0.01, 38, 23), (0.2, 0.01, 36, 1.6 * 72)],
)
def test_a_flaky_culprit_is_found(rate: float, false_bad: float, right: int, probes: float) -> None:
    """At 0.2 the fourteen controls all pass in one of twenty searches: these are told to have nothing to bisect."""
    found, taken = 0, []
    for seed in SEEDS:
        culprit = seed * 5 % 12
        answer, probe = bisected(question(12), sometimes(needs({culprit}), rate, seed, false_bad))
        found += shown(answer) == (AnswerKind.SINGLE, (culprit,))
        taken.append(probe.plan())
    assert found >= right
    assert mean(taken) <= probes


@pytest.mark.parametrize("rule", [needs(range(4, 9)), needs({3, 8}), needs({2}, {9})])
def test_a_flaky_failure_of_any_shape_is_found(rule: object) -> None:
    exact = bisected(question(12), rule)[0]  # type: ignore[arg-type]
    answers = [bisected(question(12), sometimes(rule, 0.6, seed))[0] for seed in range(10)]  # type: ignore[arg-type]
    assert sum(shown(answer) == shown(exact) for answer in answers) >= 8


def test_a_flaky_threshold_is_found() -> None:
    answers = [bisected(ordered(24), sometimes(at_least(17), 0.5, seed))[0] for seed in range(20)]
    assert sum(shown(answer) == (AnswerKind.THRESHOLD, (17,)) for answer in answers) >= 19


def test_a_flaky_threshold_without_a_known_bad_end_is_found() -> None:
    asked = ordered(24, unbounded=True)
    answers = [bisected(asked, sometimes(at_least(5), 0.5, seed))[0] for seed in range(20)]
    assert sum(shown(answer) == (AnswerKind.THRESHOLD, (5,)) for answer in answers) >= 19


def test_several_probes_at_once_tell_no_two_the_same() -> None:
    answer, probe = bisected(question(12, at_once=4), sometimes(needs({7}), 0.5, 4))
    assert shown(answer) == (AnswerKind.SINGLE, (7,))
    searched = [one.subsets for one in probe.rounds if one.purpose is Purpose.RIGHT_EDGE]
    assert all(len(set(subsets)) == len(subsets) for subsets in searched)


def test_a_flaky_answer_tells_how_often_it_fails_and_is_never_certain() -> None:
    answer, _ = bisected(question(12), sometimes(needs({7}), 0.5, 3))
    assert answer.p_bad is not None
    assert 0.25 < answer.p_bad < 0.75
    assert 0.9 < answer.confidence < 1.0


def test_a_bad_end_that_passed_once_is_measured_until_three_failures() -> None:
    ends = [GOOD, CountsAs.BAD, GOOD, GOOD, CountsAs.BAD]

    def late(subset: Subset) -> CountsAs:
        return ends.pop(0) if len(subset) == 12 and ends else needs({7})(subset)

    answer, probe = bisected(question(12), late)
    assert (shown(answer), probe.count(Purpose.CONTROL_BAD)) == ((AnswerKind.SINGLE, (7,)), 6)
    assert answer.p_bad is not None


def test_the_good_half_of_a_contradiction_is_asked_again_before_runs_are_called_flaky() -> None:
    lies = [True]

    def lied_once(subset: Subset) -> CountsAs:
        if len(subset) == 9 and lies:
            lies.clear()
            return GOOD
        return needs({7})(subset)

    answer, probe = bisected(question(12), lied_once)
    assert (shown(answer), answer.p_bad is not None) == ((AnswerKind.SINGLE, (7,)), True)
    assert probe.count(Purpose.REPEAT) >= 1


def test_a_failure_too_rare_to_search_for_is_said_to_be() -> None:
    asked: list[int] = []

    def once(subset: Subset) -> CountsAs:
        asked.append(len(subset))
        return CountsAs.BAD if len(subset) == 12 and asked.count(12) == 3 else GOOD

    answer, _ = bisected(question(12), once)
    assert answer.why == "the bad end fails in less than one of twenty runs: make it fail more often first"


@pytest.mark.parametrize("launches", range(3, 40, 4))
def test_flaky_runs_that_can_no_longer_be_judged_do_not_go_on_for_ever(launches: int) -> None:
    rule = sometimes(needs({7}), 0.5, 1)
    left = iter(range(launches))
    answer, probe = bisected(question(12), lambda subset: UNRESOLVED if next(left, None) is None else rule(subset))
    assert answer.kind in (AnswerKind.UNDECIDED, AnswerKind.SINGLE)
    assert probe.count() < 500


def test_every_kind_of_set_is_evidence_for_the_edges_it_tells_of() -> None:
    belief = Belief(Chain(base=frozenset(), order=(0, 1, 2, 3)), false_bad=0.01)
    belief.learn(ProbeAnswer(subset=frozenset({1, 2}), counts_as=CountsAs.BAD))  # so it begins at 3 or before
    assert belief.edges()[3] < 0.01
    belief.learn(ProbeAnswer(subset=frozenset({0, 3}), counts_as=GOOD))  # tells of edge 1 alone
    first, second, third, _ = belief.edges()
    assert first < second == pytest.approx(third)


def test_so_many_tries_show_what_happens_so_often() -> None:
    assert (tries(0.5, 0.95), tries(0.2, 0.95)) == (5, 14)
