"""Bisect, where only neighbours can be switched on together: the smallest failing range, and nothing else asked."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from random import Random
from statistics import mean

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
    hull,
    in_a_row,
    named,
    needs,
    shown,
    sometimes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.search.effort import total_probes, worst_case_stages
from nsa_harness.core.search.question import AnswerKind, ProbeResult, Purpose, SearchAnswer, Subset

AT_ONCE = pytest.mark.parametrize("at_once", [1, 2, 4])
SIZES = [1, 2, 3, 5, 8, 12]


def ranges(items: int) -> list[frozenset[int]]:
    """All of them, and the single items."""
    return [frozenset(hull(ends)) for ends in combinations_with_replacement(range(items), 2)]


def side_by_side(subset: Subset) -> bool:
    return not subset or len(hull(subset)) == len(subset)


def launchable(probe: ProbeCache, answer: SearchAnswer) -> bool:
    asked = [subset for one in probe.rounds for subset in one.subsets]
    commands = [subset for subset in (answer.passing, answer.failing) if subset is not None]
    return all(map(side_by_side, (*asked, *answer.groups, *commands)))


def more(items: int, case: str) -> int:
    """Probes that this case adds at worst."""
    return sum(part.probes for part in worst_case_stages(in_a_row(items)) if part.only_if == case)


def is_smallest(rule: Rule, subset: Subset) -> bool:
    ends = {min(subset), max(subset)} if len(subset) > 1 else set[int]()
    return rule(subset) is BAD and all(rule(subset - {end}) is GOOD for end in ends)


@AT_ONCE
@pytest.mark.parametrize("items", SIZES)
def test_every_range_and_every_single_item_is_found_and_proven(items: int, at_once: int) -> None:
    asked = in_a_row(items, at_once=at_once)
    for culprit in ranges(items):
        rule = needs(culprit)
        answer, probe = bisected(asked, rule)
        assert (*shown(answer), answer.confidence) == (*named(culprit), 1.0)
        assert answer.failing == culprit
        assert answer.passing is not None
        assert rule(answer.passing) is GOOD
        assert launchable(probe, answer)
        assert probe.count() <= total_probes(worst_case_stages(asked))


@pytest.mark.parametrize(("items", "average", "worst"), [(12, 6.7, 8), (48, 10.6, 12)])
def test_a_range_takes_a_halving_for_each_of_its_ends(items: int, average: float, worst: int) -> None:
    probes = [bisected(in_a_row(items), needs(culprit))[1] for culprit in ranges(items)[:: items // 12]]
    assert mean(probe.count(*EDGES) for probe in probes) <= average
    assert max(probe.count(*EDGES) for probe in probes) <= worst
    assert max(probe.search() for probe in probes) <= worst + 2  # is the last one enough? does only the length count?


@pytest.mark.parametrize("items", [3, 5, 8, 12])
def test_of_a_pair_the_smallest_range_that_holds_it_is_the_answer(items: int) -> None:
    for pair in combinations(range(items), 2):
        answer, probe = bisected(in_a_row(items), needs(pair))
        assert (*shown(answer), answer.failing) == (*named(hull(pair)), frozenset(hull(pair)))
        assert ("cannot be tested with ranges" in answer.why) == (len(hull(pair)) > 2)
        assert probe.count() <= total_probes(worst_case_stages(in_a_row(items)))


@pytest.mark.parametrize("items", [3, 5, 8, 12])
def test_two_culprits_are_both_found(items: int) -> None:
    for pair in combinations(range(items), 2):
        answer, probe = bisected(in_a_row(items), needs(pair[:1], pair[1:]))
        assert (*shown(answer), answer.confidence) == (AnswerKind.SEVERAL, pair, 1.0)
        assert set(answer.groups) == {frozenset({one}) for one in pair}
        assert launchable(probe, answer)
        rare = more(items, "there are several culprits") + more(items, "only the number may matter")
        assert probe.count() <= total_probes(worst_case_stages(in_a_row(items))) + rare


def test_ranges_that_overlap_are_told_apart_and_all_that_lies_beside_them_is_proven() -> None:
    culprits = [range(2, 5), range(4, 8), (9, 10)]
    answer, probe = bisected(in_a_row(12), needs(*culprits))
    assert (answer.kind, answer.groups) == (AnswerKind.SEVERAL, tuple(frozenset(one) for one in culprits))
    assert (answer.confidence, answer.failing, answer.passing) == (1.0, {2, 3, 4}, {5, 6, 7, 8, 9})
    proofs = list(dict.fromkeys(one.subsets[0] for one in probe.rounds if one.purpose is Purpose.PROOF_GOOD))
    passed = [frozenset(range(10, 12)), frozenset(range(5, 10)), frozenset(range(3, 7)), frozenset(range(4))]
    assert {*proofs} == {frozenset(range(3, 12)), frozenset(range(5, 12)), *passed}


@pytest.mark.parametrize("items", SIZES[1:])
def test_any_so_many_in_a_row_are_told_as_a_number(items: int) -> None:
    for count in range(1, items):
        answer, probe = bisected(in_a_row(items), at_least(count))
        assert shown(answer) == (AnswerKind.COUNT, (count,))
        every = items - count < (7 if count == 1 else 5)  # of this length and of the next shorter one
        assert (answer.confidence == 1.0, answer.why == "") == (every, every)
        assert (answer.passing, answer.failing) == (frozenset(range(1, count)), frozenset(range(count)))
        assert launchable(probe, answer)
        assert probe.count() <= total_probes(worst_case_stages(in_a_row(items))) + more(
            items, "only the number may matter"
        )


@pytest.mark.parametrize("others", [[range(7, 10)], [range(9, 12)]])
def test_of_a_range_of_the_same_length_that_passes_no_number_is_told(others: list[range]) -> None:
    answer, _ = bisected(in_a_row(12), needs(range(3), *others))
    assert (answer.kind, answer.groups) == (AnswerKind.SEVERAL, tuple(map(frozenset, (range(3), *others))))


@pytest.mark.parametrize("rule", [needs({7}), needs(range(4, 9)), needs({3, 8}), needs({2}, {9})])
def test_a_flaky_failure_is_mostly_found(rule: Rule) -> None:
    exact = bisected(in_a_row(12), rule)[0]
    found = [bisected(in_a_row(12), sometimes(rule, 0.6, seed)) for seed in range(10)]
    assert sum(shown(answer) == shown(exact) for answer, _ in found) >= 8
    assert all(launchable(probe, answer) for answer, probe in found)


def test_where_more_may_pass_than_fewer_the_range_is_shrunk_from_its_ends_and_asked_itself() -> None:
    def masked(subset: Subset) -> ProbeResult:
        return BAD if len(subset) == 12 or ({4, 5} <= subset and 8 not in subset) else GOOD

    answer, probe = bisected(in_a_row(12), masked)
    assert (*shown(answer), answer.failing) == (AnswerKind.RANGE, (4, 6), {4, 5})
    assert launchable(probe, answer)


@pytest.mark.parametrize("blind", [DIFFERENT, UNRESOLVED])
def test_a_range_whose_prefixes_cannot_be_judged_is_found_from_its_other_end(blind: ProbeResult) -> None:
    answer, probe = bisected(
        in_a_row(12), lambda subset: blind if 0 in subset and 6 <= len(subset) <= 10 else needs({7, 8})(subset)
    )
    assert (*shown(answer), answer.failing) == (AnswerKind.RANGE, (7, 9), {7, 8})
    assert launchable(probe, answer)


def test_of_what_cannot_be_judged_away_the_smallest_failing_range_is_said() -> None:
    def half_blind(subset: Subset) -> ProbeResult:
        return UNRESOLVED if 0 < len(subset) < 6 and subset & {4, 5} else needs({4, 5})(subset)

    answer, probe = bisected(in_a_row(12), half_blind)
    assert (answer.kind, answer.failing) == (AnswerKind.UNDECIDED, frozenset(answer.open))
    assert len(answer.open) == 6
    assert {4, 5} <= set(answer.open)
    assert launchable(probe, answer)


def chosen_by(seed: int, items: int) -> Rule:
    """Any answer for each set, the same each time; the ends are what they should be."""

    def rule(subset: Subset) -> ProbeResult:
        if len(subset) in (0, items):
            return BAD if subset else GOOD
        return Random(f"{seed} {sorted(subset)}").choice(tuple(ProbeResult))

    return rule


@given(items=st.integers(1, 10), seed=st.integers(0), at_once=st.sampled_from([1, 2, 4]))
@settings(max_examples=150, deadline=None)
def test_whatever_the_answers_only_neighbours_are_asked_and_no_false_claim_is_certain(
    items: int, seed: int, at_once: int
) -> None:
    rule = chosen_by(seed, items)
    answer, probe = bisected(in_a_row(items, at_once=at_once), rule)
    assert launchable(probe, answer)
    if answer.confidence < 1.0:
        return
    if answer.kind is AnswerKind.COUNT:
        lengths = {rule(one): len(one) for one in ranges(items) if answer.items[0] - 1 <= len(one) <= answer.items[0]}
        assert lengths in ({BAD: answer.items[0], GOOD: answer.items[0] - 1}, {BAD: 1})
    else:
        assert all(is_smallest(rule, group) for group in answer.groups or (answer.failing or frozenset(),))


@given(data=st.data(), items=st.integers(13, 60))
@settings(max_examples=40, deadline=None)
def test_any_ranges_among_many_items_are_all_found(data: st.DataObject, items: int) -> None:
    spans = st.tuples(st.integers(0, items - 1), st.integers(0, items - 1))
    culprits = {frozenset(hull(ends)) for ends in data.draw(st.lists(spans, min_size=1, max_size=4))}
    smallest = {one for one in culprits if not any(other < one for other in culprits)}
    answer, probe = bisected(in_a_row(items), needs(*culprits))
    assert set(answer.groups or (answer.failing,)) == smallest
    assert launchable(probe, answer)
