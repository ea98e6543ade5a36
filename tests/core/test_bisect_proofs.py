"""Bisect: an answer is certain only if its proofs agree, also while other failures and flaky runs hide results."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from bisected import BAD, DIFFERENT, GOOD, UNRESOLVED, Rule, at_least, bisected, needs, question, shown, sometimes

from nsa_harness.core.search.exact_search import Contradiction
from nsa_harness.core.search.minimal import LiteralJudge, judge_set
from nsa_harness.core.search.question import AnswerKind, ProbeCache, ProbeResult, Purpose, Subset

SEEDS = range(80)


def hidden(rule: Rule, item: int, unless: int, counts_as: ProbeResult = DIFFERENT) -> Rule:
    """What has this item and not the other one ends otherwise."""
    return lambda subset: counts_as if item in subset and unless not in subset else rule(subset)


@pytest.mark.parametrize("counts_as", [DIFFERENT, UNRESOLVED])
def test_of_flaky_culprits_beside_another_failure_hardly_one_is_named_wrongly_for_certain(
    counts_as: ProbeResult,
) -> None:
    """Several of these answers were, while one passing run showed that a member is needed."""
    wrong = 0
    for seed in SEEDS:
        *pair, item, unless = Random(seed).sample(range(12), 4)
        rule = hidden(sometimes(needs({pair[0]}, {pair[1]}), 0.8, seed), item, unless, counts_as)
        answer, probe = bisected(question(12, controls=14, max_probes=1000), rule)
        was_seen = any(said is counts_as for _, said in probe.told)
        wrong += was_seen and answer.confidence == 1 and shown(answer) != (AnswerKind.SEVERAL, tuple(sorted(pair)))
    assert wrong == 0


def test_a_rest_that_could_not_be_judged_leaves_room_for_another_culprit() -> None:
    answer, _ = bisected(question(12), hidden(needs({2}, {9}), 2, 9, UNRESOLVED))
    assert (*shown(answer), answer.confidence) == (AnswerKind.SINGLE, (9,), 0.5)
    assert answer.why.endswith("so there may be more culprits")


def test_a_result_that_only_other_failures_hide_is_certain() -> None:
    answer, probe = bisected(question(12), hidden(needs({7}), 6, 8))
    assert (*shown(answer), answer.confidence) == (AnswerKind.SINGLE, (7,), 1.0)
    assert probe.count(Purpose.PROOF_GOOD) == 6  # as many as show a failure of every second run


def test_a_proof_that_fails_in_another_way_is_launched_again() -> None:
    launches: list[Subset] = []

    def two_faced(subset: Subset) -> ProbeResult:
        launches.append(subset)
        if len(subset) in (0, 12) or needs({7})(subset) is GOOD:
            return needs({7})(subset)
        return DIFFERENT if subset == {7} and launches.count(subset) % 2 == 0 else BAD

    answer, probe = bisected(question(12), two_faced)
    assert (*shown(answer), answer.confidence) == (AnswerKind.SINGLE, (7,), 1.0)
    assert [counts_as for subset, counts_as in probe.told if subset == {7}].count(BAD) >= 6
    answer, _ = bisected(question(12), lambda subset: DIFFERENT if subset == {7} else needs({7})(subset))
    assert answer.kind is AnswerKind.UNDECIDED


def test_where_every_set_is_launched_one_that_passes_and_fails_is_a_contradiction() -> None:
    results = iter([BAD, BAD, GOOD])
    probes = ProbeCache(question(3), lambda asked: [next(results) for _ in asked.subsets])
    with pytest.raises(Contradiction):
        judge_set(LiteralJudge(probes), frozenset({1}), Purpose.PROOF_BAD, times=3)


def test_one_passing_run_without_a_member_does_not_show_that_it_is_needed() -> None:
    """More items can turn a failure into a pass here, so each set is launched; {4} passes twice by chance."""
    lies = [2]

    def masked(subset: Subset) -> ProbeResult:
        if subset == {4} and lies[0]:
            lies[0] -= 1
            return GOOD
        return BAD if len(subset) == 12 or (4 in subset and 8 not in subset) else GOOD

    answer, _ = bisected(question(12), masked)
    assert answer.confidence < 1 or shown(answer) == (AnswerKind.SINGLE, (4,))


@pytest.mark.parametrize("counts_as", [DIFFERENT, UNRESOLVED])
def test_any_so_many_are_told_as_a_number_or_not_for_certain(counts_as: ProbeResult) -> None:
    for seed in range(40):
        item, unless = Random(seed).sample(range(12), 2)
        answer, _ = bisected(question(12, max_probes=1000), hidden(at_least(2 + seed % 9), item, unless, counts_as))
        assert answer.confidence < 1 or answer.kind is AnswerKind.UNDECIDED, (seed, answer)


def test_failures_that_come_in_bursts_are_no_independent_runs() -> None:
    """Each run has the luck of the run before it in four of five cases."""
    answers, alone = [], []
    for seed in range(20):
        random, luck = Random(seed), [0.5]

        def rule(subset: Subset, random: Random = random, luck: list[float] = luck) -> ProbeResult:
            luck[0] = random.random() if random.random() < 0.2 else luck[0]
            return BAD if 7 in subset and luck[0] < 0.5 else GOOD

        answers.append(bisected(question(12, controls=14, max_probes=1000), rule))
        alone.append(bisected(question(12, controls=14), sometimes(needs({7}), 0.5, seed)))
    seen = [(answer, probe) for answer, probe in answers if "failures in bursts" in answer.why]
    assert len(seen) >= 8
    assert all(shown(answer) == (AnswerKind.SINGLE, (7,)) for answer, _ in seen if answer.confidence >= 0.95)
    assert mean(probe.count() for _, probe in seen) > 1.5 * mean(probe.count() for _, probe in alone)
    assert sum("bursts" in answer.why for answer, _ in alone) <= 2
