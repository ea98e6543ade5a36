"""Bisect, where a run does the same each time: the right answer, its proof, and no probe more than promised."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from bisected import (
    BAD,
    DIFFERENT,
    EDGES,
    GOOD,
    UNRESOLVED,
    ProbeCache,
    Rule,
    at_least,
    bisected,
    named,
    needs,
    ordered,
    question,
    shown,
    unjudged,
)

from nsa_harness.core.search.answers import undecided_answer
from nsa_harness.core.search.effort import total_probes, worst_case_stages
from nsa_harness.core.search.exact_search import probe_points, worst_case_probes
from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    PROOFS,
    AnswerKind,
    OutOfBudget,
    ProbeResult,
    Purpose,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
)
from nsa_harness.core.search.question import ProbeCache as Observed

AT_ONCE = pytest.mark.parametrize("at_once", [1, 2, 4])
SIZES = [(12, 4), (48, 6), (96, 7)]
SMALL = [1, 2, 3, 5, 8, 12]


def spread(items: int) -> list[tuple[int, int]]:
    """Every pair of few items; of many those near the powers of two and the ends, where searches are longest."""
    if items <= 12:
        return list(combinations(range(items), 2))
    chosen = sorted({0, 1, 2, 7, 8, 15, 16, items // 2 - 1, items // 2, items - 17, items - 2, items - 1})
    return list(combinations(chosen, 2))


def proven(answer: SearchAnswer, rule: Rule) -> bool:
    assert answer.passing is not None
    assert answer.failing is not None
    return (rule(answer.passing), rule(answer.failing)) == (GOOD, BAD)


@AT_ONCE
@pytest.mark.parametrize("items", SMALL)
def test_every_single_culprit_is_found_and_proven(items: int, at_once: int) -> None:
    asked = question(items, at_once=at_once)
    for culprit in range(items):
        answer, probe = bisected(asked, needs({culprit}))
        assert (*shown(answer), answer.confidence, answer.why) == (AnswerKind.SINGLE, (culprit,), 1.0, "")
        assert answer.failing == {culprit}
        assert answer.passing == frozenset(range(items)) - {culprit}
        assert probe.count() <= total_probes(worst_case_stages(asked))


@AT_ONCE
@pytest.mark.parametrize("items", [2, 3, 5, 8, 12])
def test_every_range_is_found_and_proven(items: int, at_once: int) -> None:
    asked = question(items, at_once=at_once)
    for start, last in combinations(range(items), 2):
        rule = needs(range(start, last + 1))
        answer, probe = bisected(asked, rule)
        assert shown(answer) == (AnswerKind.RANGE, (start, last + 1))
        assert (answer.confidence == 1.0) == (last + 1 - start <= 8)
        assert proven(answer, rule)
        assert probe.count() <= total_probes(worst_case_stages(asked))


@AT_ONCE
@pytest.mark.parametrize("items", [3, 5, 8, 12])
def test_every_pair_is_found_and_proven(items: int, at_once: int) -> None:
    asked = question(items, at_once=at_once)
    for pair in combinations(range(items), 2):
        answer, probe = bisected(asked, needs(pair))
        assert (*shown(answer), answer.confidence) == (*named(pair), 1.0)
        assert answer.failing == frozenset(pair)
        assert probe.count() <= total_probes(worst_case_stages(asked))


@AT_ONCE
@pytest.mark.parametrize("items", [2, 3, 5, 8, 12])
def test_every_number_is_told_as_a_number(items: int, at_once: int) -> None:
    asked = question(items, at_once=at_once)
    sizes = next(part.probes for part in worst_case_stages(asked) if part.name == "sizes")
    for count in range(1, items):
        answer, probe = bisected(asked, at_least(count))
        assert shown(answer) == (AnswerKind.COUNT, (count,))
        assert 0.95 < answer.confidence < 1.0
        assert proven(answer, at_least(count))
        assert probe.count() <= total_probes(worst_case_stages(asked)) + sizes


@AT_ONCE
@pytest.mark.parametrize("items", [3, 5, 8, 12])
def test_two_independent_culprits_are_both_found(items: int, at_once: int) -> None:
    asked = question(items, at_once=at_once)
    more = sum(part.probes for part in worst_case_stages(asked) if part.name in ("next culprit", "sizes"))
    for pair in combinations(range(items), 2):
        answer, probe = bisected(asked, needs(pair[:1], pair[1:]))
        assert (*shown(answer), answer.confidence) == (AnswerKind.SEVERAL, pair, 1.0)
        assert set(answer.groups) == {frozenset({one}) for one in pair}
        assert answer.passing == frozenset(range(items)) - set(pair)
        assert probe.count() <= total_probes(worst_case_stages(asked)) + more


@pytest.mark.parametrize("items", [5, 8])
def test_every_interaction_of_three_is_found_and_proven(items: int) -> None:
    asked = question(items)
    more = sum(part.probes for part in worst_case_stages(asked) if part.name == "next member")
    for triple in combinations(range(items), 3):
        answer, probe = bisected(asked, needs(triple))
        assert (*shown(answer), answer.confidence) == (*named(triple), 1.0)
        assert probe.count() <= total_probes(worst_case_stages(asked)) + more


def test_a_culprit_inside_a_range_does_not_make_it_a_range() -> None:
    for middle in range(1, 23):
        assert shown(bisected(question(24), needs({0, middle, 23}))[0])[1] == (0, middle, 23)


@AT_ONCE
@pytest.mark.parametrize("items", SMALL)
@pytest.mark.parametrize("unbounded", [False, True])
def test_every_threshold_is_found_and_proven(items: int, at_once: int, unbounded: bool) -> None:
    asked = ordered(items, at_once=at_once, unbounded=unbounded)
    for smallest in range(1, items + 1):
        answer, probe = bisected(asked, at_least(smallest))
        assert (*shown(answer), answer.confidence) == (AnswerKind.THRESHOLD, (smallest,), 1.0)
        assert (answer.passing, answer.failing) == (frozenset(range(smallest - 1)), frozenset(range(smallest)))
        assert probe.count() <= total_probes(worst_case_stages(asked))
        assert all(subset == frozenset(range(len(subset))) for one in probe.rounds for subset in one.subsets)


@pytest.mark.parametrize(("items", "halvings"), SIZES)
def test_a_single_culprit_or_a_threshold_takes_a_halving_each(items: int, halvings: int) -> None:
    single = max(bisected(question(items), needs({one}))[1].count(*EDGES) for one in range(items))
    threshold = max(bisected(ordered(items), at_least(one))[1].search() for one in range(1, items + 1))
    assert (single, threshold) == (halvings, halvings)


@pytest.mark.parametrize(("items", "halvings"), SIZES)
def test_a_range_takes_two_searches_and_the_whole_plan_four_shape_tests_more(items: int, halvings: int) -> None:
    probes = [bisected(question(items), needs(range(start, last + 1)))[1] for start, last in spread(items)]
    assert max(probe.count(*EDGES) for probe in probes) <= 2 * halvings
    # One that begins with the first item may be a number: that others of its size pass is asked three times.
    more = [2 if start == 0 else 0 for start, _ in spread(items)]
    assert max(probe.plan() - two for probe, two in zip(probes, more, strict=True)) <= 2 + 2 * halvings + 4
    assert max(bisected(question(items), at_least(one))[1].plan() for one in (1, 2, 5, items - 1)) <= 6 + 2 * halvings


@pytest.mark.parametrize(("items", "halvings"), SIZES)
def test_a_pair_takes_two_searches_two_shape_tests_and_a_look_at_another_pair(items: int, halvings: int) -> None:
    pairs = [pair for pair in spread(items) if pair[0] > 0]  # {0, 1} is asked whether only the number counts
    assert max(bisected(question(items), needs(pair))[1].search() for pair in pairs) <= 2 * halvings + 3


@pytest.mark.parametrize("count", [4, 7, 9])
def test_a_number_is_told_as_one_though_a_run_passed_by_chance(count: int) -> None:
    """The prefix that would have shown it passed the one time that it was asked."""
    chance = frozenset(range(count))
    passed = False

    def fails(on: Subset) -> ProbeResult:
        nonlocal passed
        if on == chance and not passed:
            passed = True
            return GOOD
        return BAD if len(on) >= count else GOOD

    assert shown(bisected(question(12), fails)[0]) == (AnswerKind.COUNT, (count,))
    assert passed


@pytest.mark.parametrize(
    ("items", "rounds"), [(12, {1: 4, 2: 3, 3: 2, 8: 2, 11: 1}), (48, {2: 4, 4: 3, 7: 2}), (96, {2: 5, 3: 4, 8: 3})]
)
def test_more_at_once_take_fewer_rounds(items: int, rounds: dict[int, int]) -> None:
    for at_once, expected in rounds.items():
        probes = [bisected(ordered(items, at_once=at_once), at_least(one))[1] for one in range(1, items + 1)]
        searched = [[one for one in probe.rounds if one.purpose is Purpose.RIGHT_EDGE] for probe in probes]
        assert max(map(len, searched)) == expected
        assert all(len(one.subsets) <= at_once for probe in probes for one in probe.rounds)


def spent(smallest: int, cost: float) -> tuple[int, float]:
    """Probes and time of the search for one threshold of 96."""
    rule = at_least(smallest)
    probe = bisected(ordered(96, bad_cost=lambda: cost), rule)[1]
    searched = [one.subsets[0] for one in probe.rounds if one.purpose is Purpose.RIGHT_EDGE]
    return len(searched), sum(8.0 if rule(subset) is BAD else 1.0 for subset in searched)


def test_a_dear_bad_answer_moves_the_cut_but_takes_no_probe_more() -> None:
    assert [probe_points(12, 1, 4, cost)[0] for cost in (1.0, 8.0)] == [6, 5]
    blind, aware = ([spent(smallest, cost) for smallest in range(1, 97)] for cost in (1.0, 8.0))
    assert (max(probes for probes, _ in blind), max(probes for probes, _ in aware)) == (7, 7)
    assert sum(time for _, time in aware) < 0.96 * sum(time for _, time in blind)


def test_the_cost_is_read_after_both_controls() -> None:
    probe = ProbeCache(at_least(3))

    def cost() -> float:
        assert [one.purpose for one in probe.rounds[:2]] == [Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD]
        return 1.0

    assert find_smallest_difference(ordered(9, bad_cost=cost), probe).items == (3,)


def test_a_large_question_is_cut_by_the_proportions_of_a_smaller_one() -> None:
    worst = max(bisected(ordered(3000, bad_cost=lambda: 8.0), at_least(one))[1].search() for one in (1, 2999, 1500, 7))
    assert worst <= worst_case_probes(3000, 1) == 12


def test_a_round_tells_what_is_open_and_how_many_probes_are_left() -> None:
    probe = bisected(question(12), needs({7}))[1]
    told = [(one.purpose.value, one.open, one.probes_left) for one in probe.rounds]
    assert told[:7] == [
        ("control_good", (0, 12), 0),
        ("control_bad", (0, 12), 0),
        ("right_edge", (0, 12), 3),
        ("right_edge", (6, 12), 2),
        ("right_edge", (6, 9), 1),
        ("right_edge", (7, 9), 0),
        ("alone", (0, 8), 0),
    ]
    assert sorted(purpose for purpose, _, _ in told[7:]) == [
        "proof_bad", "proof_bad", "proof_good", "proof_good", "recheck_bad", "recheck_good",
    ]  # fmt: skip
    assert [(where, left) for _, where, left in told[7:]] == [((0, 12), left) for left in reversed(range(6))]


def test_items_that_travel_together_are_asked_together() -> None:
    groups = (frozenset({1, 8}), frozenset({8, 3}), frozenset({5, 6}))
    answer, probe = bisected(question(9, together=groups), needs({3}))
    assert shown(answer) == (AnswerKind.SET, (1, 3, 8))
    asked = [subset for one in probe.rounds for subset in one.subsets]
    assert all(len(subset & group) in (0, len(group)) for subset in asked for group in ({1, 3, 8}, {5, 6}))


def test_the_proof_is_run_as_often_as_asked() -> None:
    for at_once in (1, 2):
        probe = bisected(question(12, repeat=3, at_once=at_once), needs({7}))[1]
        assert (probe.count(Purpose.PROOF_BAD), probe.count(Purpose.PROOF_GOOD)) == (3, 3)


def test_a_range_with_an_independent_culprit_beside_it_are_two_groups() -> None:
    answer, _ = bisected(question(12), needs({2, 3, 4}, {9}))
    assert (answer.kind, set(answer.groups)) == (AnswerKind.SEVERAL, {frozenset({2, 3, 4}), frozenset({9})})


def test_a_set_that_failed_without_what_was_found_is_searched_too() -> None:
    """It shares a member with what was found, so the rest passes without it."""
    answer, _ = bisected(question(6), needs({0, 1}, {0, 5}))
    assert (answer.kind, set(answer.groups)) == (AnswerKind.SEVERAL, {frozenset({0, 1}), frozenset({0, 5})})


def test_a_healthy_program_has_nothing_to_bisect() -> None:
    answer, probe = bisected(question(12), needs())
    assert (answer.kind, answer.items, answer.failing) == (AnswerKind.NONE, (), None)
    assert answer.why == "the bad end passed 3 of 3 times; it may still fail in less than 63% of its runs"
    assert probe.count() == 4
    answer, probe = bisected(question(12, controls=14), needs())
    assert answer.why == "the bad end passed 14 of 14 times; it may still fail in less than 19% of its runs"


def test_a_value_that_never_fails_has_nothing_to_bisect() -> None:
    answer, probe = bisected(ordered(20, unbounded=True), needs())
    assert (answer.kind, probe.count(Purpose.GALLOP), probe.count(Purpose.CONTROL_BAD)) == (AnswerKind.NONE, 6, 3)


@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        (BAD, BAD, "the good end does not pass: 3 of 3 times it fails with the failure in question"),
        (UNRESOLVED, BAD, "the good end does not pass: it could not be judged"),
        (GOOD, DIFFERENT, "the bad end does not show the failure: 3 of 3 times it fails in another way"),
        (GOOD, UNRESOLVED, "the bad end does not show the failure: it could not be judged"),
    ],
)
def test_ends_that_are_not_what_they_should_be_are_not_searched_between(
    good: ProbeResult, bad: ProbeResult, why: str
) -> None:
    answer, probe = bisected(question(12), lambda subset: bad if subset else good)
    assert (answer.kind, answer.confidence, answer.why) == (AnswerKind.UNDECIDED, 0.0, why)
    assert probe.count() <= 4


def test_an_end_that_failed_otherwise_once_is_not_said_to_pass_each_time() -> None:
    ends = iter([GOOD, DIFFERENT, GOOD])
    answer, _ = bisected(question(12), lambda subset: next(ends) if len(subset) == 12 else GOOD)
    assert (answer.kind, answer.why) == (
        AnswerKind.UNDECIDED,
        "the bad end does not show the failure: 1 of 3 times it fails in another way",
    )


def test_points_that_cannot_be_judged_are_walked_around() -> None:
    for smallest in range(1, 13):
        for blind in set(range(1, 12)) - {smallest, smallest - 1}:
            answer, _ = bisected(ordered(12), unjudged(at_least(smallest), blind))
            assert (*shown(answer), answer.confidence) == (AnswerKind.THRESHOLD, (smallest,), 1.0)


@AT_ONCE
@pytest.mark.parametrize(
    ("counts_as", "why"),
    [
        (DIFFERENT, "a different failure occurs between the passing and the failing values, and hides where this"),
        (UNRESOLVED, "everything between the passing and the failing end could not be judged or failed in another way"),
    ],
)
def test_what_only_unjudged_points_keep_apart_stays_open(counts_as: ProbeResult, why: str, at_once: int) -> None:
    answer, _ = bisected(ordered(12, at_once=at_once), unjudged(at_least(5), 4, 5, 6, counts_as=counts_as))
    assert (answer.kind, answer.open) == (AnswerKind.UNDECIDED, (3, 4, 5, 6))
    assert answer.why.startswith(why)
    assert (answer.passing, answer.failing) == (frozenset(range(3)), frozenset(range(7)))
    assert told(answer) == [(0, 4, GOOD), (4, 7, counts_as), (7, 13, BAD)]


def told(answer: SearchAnswer) -> list[tuple[int, int, ProbeResult]]:
    return [(zone.start, zone.stop, zone.counts_as) for zone in answer.zones]


@AT_ONCE
@pytest.mark.parametrize(("items", "step"), [(12, 1), (48, 5), (165, 31)])
def test_the_borders_of_another_failure_are_bisected_too(items: int, step: int, at_once: int) -> None:
    asked = ordered(items, at_once=at_once)
    borders = next(part.probes for part in worst_case_stages(asked) if part.name == "borders")
    for good, bad in combinations(range(0, items + 1, step), 2):
        if bad - good > 1:
            others = range(good + 1, bad)
            answer, probe = bisected(asked, unjudged(at_least(bad), *others, counts_as=DIFFERENT))
            assert (answer.kind, answer.open) == (AnswerKind.UNDECIDED, tuple(range(good, bad)))
            assert told(answer) == [(0, good + 1, GOOD), (good + 1, bad, DIFFERENT), (bad, items + 1, BAD)]
            assert probe.count() <= total_probes(worst_case_stages(asked)) + borders


def test_both_sides_of_what_hides_it_are_run_once_more_for_the_commands_and_so_are_both_ends() -> None:
    answer, probe = bisected(ordered(500), unjudged(at_least(401), *range(250, 401), counts_as=DIFFERENT))
    proofs = [(one.purpose, len(one.subsets[0])) for one in probe.rounds if one.purpose in PROOFS]
    assert {*proofs} == {
        (Purpose.PROOF_BAD, 401),
        (Purpose.PROOF_GOOD, 249),
        (Purpose.RECHECK_GOOD, 0),
        (Purpose.RECHECK_BAD, 500),
    }
    assert (answer.passing, answer.failing) == (frozenset(range(249)), frozenset(range(401)))


def test_a_point_that_passes_within_what_looks_like_one_zone_shows_that_there_are_two() -> None:
    """The truth is 60: what cannot be judged around 50 and around 62 has a good and a bad stretch between."""
    blind = (*range(45, 56), *range(61, 75))
    answer, _ = bisected(ordered(100), unjudged(at_least(60), *blind, counts_as=DIFFERENT))
    assert (*shown(answer), answer.zones) == (AnswerKind.THRESHOLD, (60,), ())


def test_what_was_first_seen_between_and_passes_no_more_is_no_zone() -> None:
    rule = unjudged(at_least(9), *range(5, 9), counts_as=DIFFERENT)
    asked: list[int] = []

    def no_more(subset: Subset) -> ProbeResult:
        asked.append(len(subset))
        return DIFFERENT if len(subset) == 4 and asked.count(4) > 1 else rule(subset)

    answer, _ = bisected(ordered(12), no_more)
    assert (answer.kind, answer.zones) == (AnswerKind.UNDECIDED, ())
    assert answer.why == "the last passing value does not pass when it is launched again"


@pytest.mark.parametrize("items", [12, 48, 96])
def test_another_failure_in_most_sets_does_not_eat_the_probes_and_the_rest_is_named(items: int) -> None:
    """All but what holds these three fails otherwise: they are not found, but few are left that they may be among."""
    needed = {1, 3, items - 2}
    answer, probe = bisected(question(items), lambda one: (BAD if needed <= one else DIFFERENT) if one else GOOD)
    assert (answer.kind, answer.failing) == (AnswerKind.UNDECIDED, frozenset(answer.open))
    assert needed <= set(answer.open)
    assert len(answer.open) <= 8
    assert probe.count() <= 50


def test_a_set_whose_prefixes_cannot_be_judged_is_found_among_other_sets() -> None:
    def rule(subset: Subset) -> ProbeResult:
        return UNRESOLVED if 0 in subset and 6 <= len(subset) <= 9 else needs({7})(subset)

    answer, _ = bisected(question(12), rule)
    assert (*shown(answer), answer.confidence) == (AnswerKind.SINGLE, (7,), 1.0)


def test_a_member_that_could_not_be_left_out_leaves_it_undecided() -> None:
    answer, _ = bisected(question(12), lambda subset: UNRESOLVED if subset == {7} else needs({7})(subset))
    assert (answer.kind, answer.known, answer.open) == (AnswerKind.UNDECIDED, (7,), (6,))
    assert answer.why == "these items fail together, but without some of them the result could not be judged"


def test_more_items_that_turn_bad_into_good_leave_an_answer_that_was_asked_for_itself() -> None:
    def masked(subset: Subset) -> ProbeResult:
        return BAD if len(subset) == 12 or ({2, 9} <= subset and 5 not in subset) else GOOD

    answer, _ = bisected(question(12), masked)
    assert (*shown(answer), answer.failing) == (AnswerKind.SET, (2, 9), {2, 9})


def test_nothing_larger_is_tried_than_a_step_that_fails_in_another_way() -> None:
    answer, probe = bisected(ordered(64, unbounded=True), lambda subset: DIFFERENT if len(subset) >= 8 else GOOD)
    assert (answer.kind, answer.why) == (
        AnswerKind.UNDECIDED,
        "the bad end does not show the failure: it fails in another way",
    )
    assert probe.by_purpose() == {Purpose.CONTROL_GOOD: 1, Purpose.GALLOP: 4}
    assert answer.passing == frozenset(range(4))


def test_a_step_that_cannot_be_judged_does_not_end_the_way_up() -> None:
    answer, _ = bisected(ordered(64, unbounded=True), unjudged(at_least(12), 1, 2, 8))
    assert (answer.kind, answer.items) == (AnswerKind.THRESHOLD, (12,))


def test_values_that_change_more_than_once_have_no_threshold() -> None:
    answer, _ = bisected(ordered(12, at_once=4), lambda subset: BAD if len(subset) in (3, 4, 12) else GOOD)
    assert (answer.kind, answer.why) == (
        AnswerKind.UNDECIDED,
        "it fails at a smaller value and passes at a larger one: there is no threshold",
    )


@pytest.mark.parametrize("limit", range(16))
def test_a_budget_that_ends_leaves_what_is_known(limit: int) -> None:
    probe = ProbeCache(needs({7}))
    answer = find_smallest_difference(question(12, max_probes=limit), probe)
    assert probe.count() <= limit
    assert (answer.kind is AnswerKind.SINGLE) == (limit >= 13)
    assert answer.kind is AnswerKind.SINGLE or {*answer.open, *answer.known} >= {7}
    assert answer.kind is AnswerKind.SINGLE or f"{limit} probes, the maximum" in answer.why


def test_a_probe_may_say_that_its_budget_is_out() -> None:
    probe = ProbeCache(needs({7}))

    def until_the_fifth(asked: Round) -> list[ProbeResult]:
        if len(probe.rounds) == 4:
            raise OutOfBudget
        return probe(asked)

    answer = find_smallest_difference(question(12), until_the_fifth)
    assert (answer.known, answer.passing, answer.failing) == ((), frozenset(range(6)), frozenset(range(9)))
    assert answer.open == tuple(range(9))  # one of 6, 7 and 8 is needed, and any of the others may be beside it


@pytest.mark.parametrize("limit", range(24))
def test_of_a_search_that_was_cut_short_what_is_known_is_true(limit: int) -> None:
    answer = find_smallest_difference(question(12, max_probes=limit), ProbeCache(needs({2, 7, 8})))
    if answer.kind is AnswerKind.UNDECIDED:
        assert {2, 7, 8} >= {*answer.known}
        assert {*answer.known, *answer.open} >= {2, 7, 8}
        assert not {*answer.known} & {*answer.open}


def test_the_members_that_were_found_before_the_budget_ended_are_known() -> None:
    found = [
        find_smallest_difference(question(12, max_probes=limit), ProbeCache(needs({2, 7, 8}))).known
        for limit in range(24)
    ]
    assert [known for known, before in zip(found, [(), *found], strict=False) if known != before][:3] == [
        (8,), (2, 8), (2, 7, 8),
    ]  # fmt: skip


def test_where_answers_contradict_each_other_nothing_is_known() -> None:
    said = iter([BAD, GOOD, GOOD, BAD])
    asked = Observed(question(4), lambda _: [next(said)])
    for subset in (range(4), range(3), range(2)):
        list(asked.launch([frozenset(subset)], Purpose.RIGHT_EDGE, asked.all_units))
    assert undecided_answer(asked, "").known == (3,)
    list(asked.launch([frozenset(range(3))], Purpose.REPEAT, asked.all_units))
    assert undecided_answer(asked, "").known == ()


@pytest.mark.parametrize(
    ("asked", "rule"), [(question(12, at_once=4), needs({7})), (ordered(12, at_once=4), at_least(5))]
)
def test_proofs_and_both_ends_are_asked_side_by_side(asked: SearchQuestion, rule: Rule) -> None:
    answer, probe = bisected(asked, rule)
    mixed = [set(one.purposes) for one in probe.rounds if one.purpose_of_each]
    assert any({Purpose.PROOF_BAD, Purpose.PROOF_GOOD} <= purposes for purposes in mixed)
    assert {Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD} <= set.union(*mixed)
    assert all(len(one.subsets) == len(one.purposes) <= 4 for one in probe.rounds)
    alone = bisected(replace(asked, at_once=1), rule)[0]
    assert shown(answer) == shown(alone)
    assert len(probe.rounds) <= 10
