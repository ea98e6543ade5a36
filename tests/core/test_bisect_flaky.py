"""Bisect among flaky runs: every answer is evidence, and nothing is named before the ends are seen to differ."""

from __future__ import annotations

from statistics import mean

import pytest
from bisected import BAD, GOOD, UNRESOLVED, at_least, bisected, needs, ordered, question, shown, sometimes, unjudged

from nsa_harness.core.search.bayesian import Belief
from nsa_harness.core.search.exact_search import Chain
from nsa_harness.core.search.question import AnswerKind, ProbeResult, Purpose, SearchQuestion, Subset

SEEDS = range(40)


def asked(items: int = 12, **changes: object) -> SearchQuestion:
    """With as many controls as it takes to see one failure of five."""
    return question(items, controls=14, **changes)


@pytest.mark.parametrize(
    ("rate", "background", "right", "probes"),
    [
        (0.5, 0.0, 38, 70),
        (0.5, 0.01, 38, 70),
        (0.8, 0.01, 38, 30),
        (0.9, 0.1, 38, 40),
        (0.9, 0.2, 38, 55),
        (0.2, 0.0, 24, 190),
    ],
)
def test_a_flaky_culprit_is_found(rate: float, background: float, right: int, probes: float) -> None:
    """At 0.2 the fourteen controls all pass in one of twenty searches, and the ends are often too close to tell."""
    found, wrong, taken = 0, 0, []
    for seed in SEEDS:
        culprit = seed * 5 % 12
        answer, probe = bisected(asked(), sometimes(needs({culprit}), rate, seed, background))
        found += shown(answer) == (AnswerKind.SINGLE, (culprit,))
        wrong += bool(answer.items) and shown(answer) != (AnswerKind.SINGLE, (culprit,))
        taken.append(probe.plan())
    assert found >= right
    assert wrong <= 2
    assert mean(taken) <= probes


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("kind", [question, ordered])
def test_a_failure_that_does_not_depend_on_what_is_varied_is_said_not_to(rate: float, kind: object) -> None:
    """A coin toss is no threshold: nothing is named, whatever the first runs look like."""
    answers = [
        bisected(kind(12, max_probes=1000, flaky=True), sometimes(needs(), rate, seed, rate))[0] for seed in SEEDS
    ]  # type: ignore[operator]
    kinds = [answer.kind for answer in answers]
    assert sum(bool(answer.items) for answer in answers) <= 1
    assert kinds.count(AnswerKind.INDEPENDENT) >= (30 if rate > 0.1 else 10)
    one = answers[kinds.index(AnswerKind.INDEPENDENT)]
    assert "times, the good end" in one.why


def test_a_good_end_that_failed_once_is_no_reason_to_give_up() -> None:
    ends = [BAD]
    answer, probe = bisected(asked(), lambda subset: ends.pop() if ends and not subset else needs({7})(subset))
    assert shown(answer) == (AnswerKind.SINGLE, (7,))
    assert probe.count(Purpose.CONTROL_GOOD) >= 4
    assert answer.confidence >= 0.95


def test_a_good_end_that_fails_more_often_is_said_to() -> None:
    answer, _ = bisected(asked(flaky=True), lambda subset: GOOD if subset else BAD)
    assert (answer.kind, answer.why.partition(":")[0]) == (
        AnswerKind.UNDECIDED,
        "the good end fails more often than the bad one",
    )


@pytest.mark.parametrize("rule", [needs(range(4, 9)), needs({3, 8}), needs({2}, {9})])
def test_a_flaky_failure_of_any_shape_is_found(rule: object) -> None:
    exact = bisected(question(12), rule)[0]  # type: ignore[arg-type]
    answers = [bisected(asked(), sometimes(rule, 0.6, seed))[0] for seed in range(10)]  # type: ignore[arg-type]
    assert sum(shown(answer) == shown(exact) for answer in answers) >= 8


def test_a_flaky_threshold_is_found() -> None:
    answers = [bisected(ordered(24, controls=14), sometimes(at_least(17), 0.5, seed))[0] for seed in range(20)]
    assert sum(shown(answer) == (AnswerKind.THRESHOLD, (17,)) for answer in answers) >= 19


def test_a_flaky_threshold_without_a_known_bad_end_is_found() -> None:
    without_end = ordered(24, unbounded=True, controls=14)
    answers = [bisected(without_end, sometimes(at_least(5), 0.5, seed))[0] for seed in range(20)]
    assert sum(shown(answer) == (AnswerKind.THRESHOLD, (5,)) for answer in answers) >= 19


def test_a_number_among_flaky_runs_is_told_as_a_number() -> None:
    """One set of the size that passed by chance, and the answer would be a few of many sets that fail."""
    rules = [(count, sometimes(at_least(count), 0.5, seed)) for seed in range(4) for count in (2, 4, 5)]
    answers = [(count, bisected(asked(8, max_probes=1000), rule)[0]) for count, rule in rules]
    assert sum(shown(answer) == (AnswerKind.COUNT, (count,)) for count, answer in answers) >= 11


def test_several_probes_at_once_tell_no_two_the_same() -> None:
    answer, probe = bisected(question(12, at_once=4), sometimes(needs({7}), 0.5, 4))
    assert shown(answer) == (AnswerKind.SINGLE, (7,))
    searched = [one.subsets for one in probe.rounds if one.purpose is Purpose.RIGHT_EDGE]
    assert all(len(set(subsets)) == len(subsets) for subsets in searched)


def test_a_flaky_answer_tells_how_often_it_fails_and_is_never_certain() -> None:
    answer, _ = bisected(asked(), sometimes(needs({7}), 0.5, 3))
    assert answer.p_bad is not None
    assert 0.25 < answer.p_bad < 0.75
    assert 0.9 < answer.confidence < 1.0


def test_an_end_that_passed_once_has_both_ends_asked_until_they_are_apart() -> None:
    ends = [GOOD, BAD, GOOD, GOOD, BAD]

    def late(subset: Subset) -> ProbeResult:
        return ends.pop(0) if len(subset) == 12 and ends else needs({7})(subset)

    answer, probe = bisected(question(12), late)
    assert shown(answer) == (AnswerKind.SINGLE, (7,))
    assert 8 <= probe.count(Purpose.CONTROL_BAD) <= 16
    assert abs(probe.count(Purpose.CONTROL_BAD) - probe.count(Purpose.CONTROL_GOOD)) <= 1
    assert answer.p_bad is not None


def test_the_good_half_of_a_contradiction_is_asked_again_before_runs_are_called_flaky() -> None:
    lies = [True]

    def lied_once(subset: Subset) -> ProbeResult:
        if len(subset) == 9 and lies:
            lies.clear()
            return GOOD
        return needs({7})(subset)

    answer, probe = bisected(question(12), lied_once)
    assert (shown(answer), answer.p_bad is not None) == ((AnswerKind.SINGLE, (7,)), True)
    assert probe.count(Purpose.REPEAT) >= 1


def test_a_failure_too_rare_to_search_for_is_said_to_be() -> None:
    seen: list[int] = []

    def once(subset: Subset) -> ProbeResult:
        seen.append(len(subset))
        return BAD if len(subset) == 12 and seen.count(12) == 3 else GOOD

    answer, _ = bisected(question(12), once)
    assert answer.why.startswith("it fails too rarely to search for the cause: the bad end failed 1 of ")


@pytest.mark.parametrize("launches", range(3, 40, 4))
def test_flaky_runs_that_can_no_longer_be_judged_do_not_go_on_for_ever(launches: int) -> None:
    rule = sometimes(needs({7}), 0.5, 1)
    left = iter(range(launches))
    answer, probe = bisected(question(12), lambda subset: UNRESOLVED if next(left, None) is None else rule(subset))
    assert answer.kind in (AnswerKind.UNDECIDED, AnswerKind.SINGLE)
    assert probe.count() < 500


def test_every_kind_of_set_is_evidence_for_the_edges_it_tells_of() -> None:
    chain, end, ends = Chain(base=frozenset(), order=(0, 1, 2, 3)), frozenset(range(4)), {frozenset[int](): (8, 0)}
    failing = {**ends, end: (0, 8)}
    belief = Belief(chain, end, {**failing, frozenset({1, 2}): (0, 1)})  # so it begins at 3 or before
    assert belief.edge_probabilities()[3] < 0.05
    belief = Belief(chain, end, {**failing, frozenset({0, 3}): (3, 0)})  # tells of edge 1 alone
    first, second, third, *_ = belief.edge_probabilities()
    assert first < 0.01 < second == pytest.approx(third)


def test_what_was_found_before_may_turn_out_not_to_fail() -> None:
    chain, end = Chain(base=frozenset(), order=(0, 1, 2)), frozenset(range(6))
    ends = {frozenset[int](): (8, 0), end: (0, 8)}
    assert Belief(chain, end, ends).best_lengths(3, frozenset({0, 1})) == [2, 3]  # so the whole chain may be asked
    belief = Belief(chain, end, {**ends, frozenset({0, 1, 2}): (4, 0)})
    assert belief.edge_probabilities().index(max(belief.edge_probabilities())) == 3


def test_where_a_rate_is_hardly_known_an_end_tells_more_than_any_length() -> None:
    """Half of all runs of the first item fail, and of no item four passed: is the lower rate a half as well?"""
    chain, end = Chain(base=frozenset(), order=tuple(range(8))), frozenset(range(8))
    belief = Belief(chain, end, {frozenset(): (4, 0), end: (0, 4), frozenset({0}): (31, 36)})
    assert belief.best_lengths(1, frozenset()) == [0]


@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_another_failure_beside_a_flaky_one_has_its_borders_bisected_too(rate: float) -> None:
    blind = range(30, 81)
    for seed in range(3):
        rule = unjudged(sometimes(at_least(81), rate, seed), *blind, counts_as=ProbeResult.DIFFERENT)
        answer, probe = bisected(ordered(96, max_probes=1000, controls=14), rule)
        told = [(zone.start, zone.stop, zone.counts_as) for zone in answer.zones]
        assert told == [(0, 30, GOOD), (30, 81, ProbeResult.DIFFERENT), (81, 97, BAD)]
        assert answer.open == tuple(range(29, 81))
        assert (answer.passing, answer.failing) == (frozenset(range(29)), frozenset(range(81)))
        assert sum(len(subset) in blind for one in probe.rounds for subset in one.subsets) <= 30
        assert probe.count() <= 95


def test_among_flaky_sets_what_cannot_be_judged_is_named() -> None:
    rule = unjudged(sometimes(needs({7}), 0.6, 1), *range(5, 11))
    answer, probe = bisected(asked(), rule)
    assert answer.kind is AnswerKind.UNDECIDED
    assert (
        answer.why == "everything between the passing and the failing end could not be judged or failed in another way"
    )
    assert 7 in answer.open
    assert probe.count() <= 150
