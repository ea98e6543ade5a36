"""Bisect against any program at all: it ends, and what it claims for certain is true."""

from __future__ import annotations

from random import Random

from bisected import (
    BAD,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.search.question import AnswerKind, ProbeResult, SearchAnswer, Subset

BOUND = 4000  # probes: far above any search, far below one that does not end

AT_ONCE = st.sampled_from([1, 2, 4])


def members(answer: SearchAnswer) -> list[Subset]:
    if answer.kind is AnswerKind.SEVERAL:
        return list(answer.groups)
    if answer.kind is AnswerKind.RANGE:
        return [frozenset(range(*answer.items))]
    return [frozenset(answer.items)]


def is_smallest(rule: Rule, subset: Subset) -> bool:
    return rule(subset) is BAD and all(rule(subset - {member}) is not BAD for member in subset)


def holds(answer: SearchAnswer, rule: Rule) -> bool:
    """What is claimed for certain; the rest says itself that it is not."""
    if answer.confidence < 1.0 or answer.kind in (AnswerKind.NONE, AnswerKind.UNDECIDED):
        return bool(answer.why) or answer.p_bad is not None
    if answer.kind is AnswerKind.THRESHOLD:
        (length,) = answer.items
        return (rule(frozenset(range(length - 1))), rule(frozenset(range(length)))) == (GOOD, BAD)
    return all(is_smallest(rule, subset) for subset in members(answer))


def chosen_by(seed: int, answers: tuple[ProbeResult, ...], items: int) -> Rule:
    """Any answer for each set, the same each time; the ends are what they should be."""

    def rule(subset: Subset) -> ProbeResult:
        if len(subset) in (0, items):
            return BAD if subset else GOOD
        return Random(f"{seed} {sorted(subset)}").choice(answers)

    return rule


@given(items=st.integers(13, 120), at_once=AT_ONCE, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_interaction_among_many_items_is_found(items: int, at_once: int, data: st.DataObject) -> None:
    culprit = data.draw(st.frozensets(st.integers(0, items - 1), min_size=1, max_size=4))
    answer, probe = bisected(question(items, at_once=at_once), needs(culprit))
    assert shown(answer) == named(culprit)
    assert probe.count() <= BOUND


@given(items=st.integers(13, 60), data=st.data())
@settings(max_examples=40, deadline=None)
def test_independent_culprits_among_many_items_are_all_found(items: int, data: st.DataObject) -> None:
    culprits = data.draw(st.frozensets(st.integers(0, items - 1), min_size=2, max_size=5))
    answer, _ = bisected(question(items), needs(*({one} for one in culprits)))
    assert shown(answer) == (AnswerKind.SEVERAL, tuple(sorted(culprits)))


@given(items=st.integers(1, 10), seed=st.integers(0), at_once=AT_ONCE)
@settings(max_examples=150, deadline=None)
def test_answers_without_order_end_and_no_false_claim_is_certain(items: int, seed: int, at_once: int) -> None:
    rule = chosen_by(seed, (GOOD, BAD), items)
    answer, probe = bisected(question(items, at_once=at_once), rule)
    assert holds(answer, rule)
    assert probe.count() <= BOUND


@given(items=st.integers(1, 10), seed=st.integers(0), at_once=AT_ONCE)
@settings(max_examples=150, deadline=None)
def test_answers_of_all_kinds_end_and_no_false_claim_is_certain(items: int, seed: int, at_once: int) -> None:
    rule = chosen_by(seed, tuple(ProbeResult), items)
    for asked in (question(items, at_once=at_once), ordered(items, at_once=at_once)):
        answer, probe = bisected(asked, rule)
        assert holds(answer, rule)
        assert probe.count() <= BOUND


@given(items=st.integers(2, 12), seed=st.integers(0), share=st.floats(0, 0.6), data=st.data())
@settings(max_examples=150, deadline=None)
def test_points_that_cannot_be_judged_hide_an_answer_but_never_change_it(
    items: int, seed: int, share: float, data: st.DataObject
) -> None:
    culprit = data.draw(st.frozensets(st.integers(0, items - 1), min_size=1, max_size=3))

    def rule(subset: Subset) -> ProbeResult:
        blind = 0 < len(subset) < items and Random(f"{seed} {sorted(subset)}").random() < share
        return UNRESOLVED if blind else needs(culprit)(subset)

    answer, _ = bisected(question(items), rule)
    assert answer.kind is AnswerKind.UNDECIDED or culprit <= members(answer)[0]
    assert holds(answer, rule)


def against_its_probes(answer: SearchAnswer, probe: ProbeCache) -> list[Subset]:
    """What was asked and ended otherwise than an answer says that is certain without an if."""
    if (
        answer.confidence < 1.0
        or answer.why
        or answer.kind in (AnswerKind.NONE, AnswerKind.INDEPENDENT, AnswerKind.UNDECIDED)
    ):
        return []
    if answer.kind is AnswerKind.THRESHOLD:
        return [one for one, said in probe.told if said is (BAD if len(one) < answer.items[0] else GOOD)]
    said_to_fail = members(answer)
    return [one for one, said in probe.told if said is (GOOD if any(group <= one for group in said_to_fail) else BAD)]


@given(
    items=st.integers(1, 12),
    seed=st.integers(0),
    at_once=AT_ONCE,
    flaky=st.booleans(),
    weights=st.tuples(*[st.integers(0, 9)] * 4).filter(any),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_answered_a_search_ends_and_its_answer_fits_its_own_probes(
    items: int, seed: int, at_once: int, flaky: bool, weights: tuple[int, ...]
) -> None:
    """Answers by chance, of all four kinds or of few, the ends' too."""
    random = Random(seed)
    asked = {"at_once": at_once, "flaky": flaky, "max_probes": 300}
    for one in (question(items, **asked), ordered(items, **asked), ordered(items, unbounded=True, **asked)):
        answer, probe = bisected(one, lambda _: random.choices(list(ProbeResult), weights)[0])
        assert probe.count() <= 300
        assert not against_its_probes(answer, probe), answer
        assert 0.0 <= answer.confidence <= 1.0
        if answer.failing is not None and answer.items:
            assert BAD in [said for subset, said in probe.told if subset == answer.failing]
        if answer.passing is not None and answer.items:
            assert GOOD in [said for subset, said in probe.told if subset == answer.passing]


@given(items=st.integers(2, 60), data=st.data(), at_once=AT_ONCE)
@settings(max_examples=100, deadline=None)
def test_a_zone_ends_where_it_is_said_to_and_what_is_sought_begins_in_it(
    items: int, data: st.DataObject, at_once: int
) -> None:
    smallest = data.draw(st.integers(1, items))
    blind = data.draw(st.sets(st.integers(1, items - 1), max_size=items))
    rule = unjudged(at_least(smallest), *blind, counts_as=ProbeResult.DIFFERENT)
    answer, _ = bisected(ordered(items, at_once=at_once), rule)
    if answer.kind is AnswerKind.THRESHOLD:
        assert answer.items == (smallest,)
        return
    _, between, above = answer.zones
    counts = [rule(frozenset(range(length))) for length in range(items + 1)]
    assert counts[between.start - 1 : between.start + 1] == [GOOD, ProbeResult.DIFFERENT]
    assert counts[between.stop - 1 : between.stop + 1] == [ProbeResult.DIFFERENT, BAD]
    assert smallest - 1 in answer.open
    assert (between.stop, answer.open) == (above.start, tuple(range(between.start - 1, between.stop)))


@given(items=st.integers(1, 12), seed=st.integers(0), rate=st.floats(0.3, 1.0), at_once=AT_ONCE)
@settings(max_examples=15, deadline=None)
def test_answers_by_chance_end_and_say_that_they_are_not_certain(
    items: int, seed: int, rate: float, at_once: int
) -> None:
    random = Random(seed)
    answer, probe = bisected(
        question(items, at_once=at_once, max_probes=BOUND),
        lambda subset: BAD if random.random() < rate and subset else GOOD,
    )
    assert probe.count() <= BOUND
    assert answer.p_bad is None or answer.confidence < 1.0
