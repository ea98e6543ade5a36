"""The order of the probes of a bisection: drawn from a seed, the same when a search goes on, and mixed in a proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count, cycle, pairwise
from random import Random

import pytest
from bisected import BAD, GOOD, bisected, needs, question
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.search.bayesian import BayesianSearch
from nsa_harness.core.search.minimal import judge_set
from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    PROOFS,
    AnswerKind,
    OutOfBudget,
    ProbeCache,
    ProbeResult,
    Purpose,
    QuestionKind,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
    expected_result,
)

SEEDS = st.text("abc0123456789", max_size=6)
KINDS = st.sampled_from([QuestionKind.SET, QuestionKind.ORDERED, QuestionKind.RANGE, QuestionKind.CHOICE])
CULPRITS = st.sampled_from([({5},), ({2, 6},), ({1}, {7})])
RATES = st.sampled_from([1.0, 0.7, 0.5])


class Program:
    """The n-th run of a set ends in the same way in each search, whatever was launched before it."""

    def __init__(self, culprits: tuple[set[int], ...], rate: float) -> None:
        self._fails, self._rate = needs(*culprits), rate

    def run(self, subset: Subset, number: int) -> ProbeResult:
        is_lucky = Random(f"{sorted(subset)} {number}").random() >= self._rate
        return GOOD if is_lucky else self._fails(subset)


def searched(
    asked: SearchQuestion, program: Program, stored: list[Subset], most: int
) -> tuple[SearchAnswer, list[Subset], list[Subset]]:
    """Search until `most` probes were launched. The probes `stored` are known and not launched again.

    Returns the answer, all probes in their order, and those that were launched.
    """
    requested: list[Subset] = []
    launched: list[Subset] = []
    numbers: defaultdict[Subset, count[int]] = defaultdict(count)
    known = list(stored)

    def probe(round_: Round) -> list[ProbeResult]:
        answers = []
        for subset in round_.subsets:
            if subset in known:
                known.remove(subset)
            elif len(launched) == most:
                raise OutOfBudget
            else:
                launched.append(subset)
            requested.append(subset)
            answers.append(program.run(subset, next(numbers[subset])))
        return answers

    return find_smallest_difference(asked, probe), requested, launched


@given(kind=KINDS, culprits=CULPRITS, rate=RATES, seed=SEEDS, at_once=st.sampled_from([1, 3]), part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_search_cut_short_anywhere_goes_on_in_the_same_order_and_repeats_no_run(
    kind: QuestionKind, culprits: tuple[set[int], ...], rate: float, seed: str, at_once: int, part: float
) -> None:
    asked = question(9, kind=kind, order_seed=seed, at_once=at_once, max_probes=300)
    answer, whole, _ = searched(asked, Program(culprits, rate), [], 300)
    cut = int(part * len(whole))
    _, _, stored = searched(asked, Program(culprits, rate), [], cut)
    assert stored == whole[:cut]
    continued, requested, launched = searched(asked, Program(culprits, rate), stored, 300)
    assert (continued, requested, launched) == (answer, whole, whole[cut:])


@given(seeds=st.lists(st.integers(0, 10**6), min_size=30, max_size=30, unique=True))
@settings(max_examples=3, deadline=None)
def test_the_seed_alone_decides_the_order(seeds: list[int]) -> None:
    def order(seed: int, rule: Callable[[Subset], ProbeResult]) -> tuple[Subset, ...]:
        return tuple(one.subsets[0] for one in bisected(question(12, order_seed=str(seed)), rule)[1].rounds)

    always = {order(seed, needs({7})) for seed in seeds}
    assert always == {order(seed, needs({7})) for seed in seeds}
    assert len(always) > 10
    flaky = [
        asked.rounds for asked in (bisected(question(4, flaky=True, order_seed=str(s)), needs({2}))[1] for s in seeds)
    ]
    firsts = [rounds[0].purpose for rounds in flaky]
    assert {*firsts} == {Purpose.CONTROL_GOOD, Purpose.CONTROL_BAD}


@given(
    requests=st.lists(
        st.tuples(st.frozensets(st.integers(0, 8), max_size=3), st.sampled_from(sorted(PROOFS))), max_size=20
    ),
    seed=SEEDS,
    at_once=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_proofs_that_run_ahead_are_mixed_and_run_once(
    requests: list[tuple[Subset, Purpose]], seed: str, at_once: int
) -> None:
    rounds: list[Round] = []

    def probe(round_: Round) -> list[ProbeResult]:
        rounds.append(round_)
        return [expected_result(purpose) for purpose in round_.purposes]

    probes = ProbeCache(question(9, order_seed=seed, at_once=at_once), probe)
    probes.launch_ahead(requests, probes.all_units, until_surprise=True)
    ran = [pair for one in rounds for pair in zip(one.subsets, one.purposes, strict=True)]
    assert sorted(map(str, ran)) == sorted(map(str, requests))
    assert all(one.probes_left == len(ran) - end for one, end in zip(rounds, ends_of(rounds), strict=True))
    probes.launch_ahead(requests, probes.all_units)
    assert all(expected_result(why) in list(probes.launch([subset], why, ())) for subset, why in requests)
    assert len(probes.observations) == len(ran)
    failing = [expected_result(purpose) is BAD for _, purpose in ran]
    rarer = sum(failing) * 2 < len(failing)
    longest = -(-failing.count(not rarer) // max(failing.count(rarer), 1))
    text = "".join("x" if one is rarer else "o" for one in failing)
    assert max(map(len, text.split("x"))) <= 2 * longest


def ends_of(rounds: list[Round]) -> list[int]:
    done = [len(one.subsets) for one in rounds]
    return [sum(done[: number + 1]) for number in range(len(done))]


def test_after_a_result_that_refutes_the_answer_nothing_more_runs_ahead() -> None:
    told: list[Subset] = []
    probes = ProbeCache(question(9), lambda asked: [told.append(one) or GOOD for one in asked.subsets])  # type: ignore[func-returns-value]
    alone, rest = frozenset({3}), frozenset(range(9)) - {3}
    requests = [(alone, Purpose.PROOF_BAD)] * 3 + [(rest, Purpose.PROOF_GOOD)] * 3
    probes.launch_ahead(requests, probes.all_units, until_surprise=True)
    assert told.index(alone) == len(told) - 1
    probes = ProbeCache(question(9), lambda asked: [BAD for _ in asked.subsets])
    probes.launch_ahead(requests, probes.all_units, until_surprise=True)  # there is one more culprit
    assert len(probes.observations) == 6


@given(
    culprits=st.sampled_from([({2}, {9}), ({4, 7},), ({5},)]),
    start=st.integers(1, 30),
    length=st.integers(3, 6),
    verdict=st.sampled_from([GOOD, BAD]),
    seed=SEEDS,
)
@settings(max_examples=300, deadline=None)
def test_a_few_consecutive_runs_that_all_end_alike_make_no_wrong_answer_certain(
    culprits: tuple[set[int], ...], start: int, length: int, verdict: ProbeResult, seed: str
) -> None:
    numbers = count()

    def rule(subset: Subset) -> ProbeResult:
        return verdict if start <= next(numbers) < start + length else needs(*culprits)(subset)

    answer, _ = bisected(question(12, order_seed=seed, max_probes=1000, controls=14), rule)
    if answer.confidence == 1.0 and answer.kind is not AnswerKind.UNDECIDED:
        groups = answer.groups or (
            frozenset(range(*answer.items) if answer.kind is AnswerKind.RANGE else answer.items),
        )
        assert {*groups} == {*map(frozenset, culprits)}


@pytest.mark.parametrize(("results", "in_turn"), [((BAD, BAD, BAD, GOOD, GOOD, GOOD), True), ((BAD, GOOD), False)])
def test_where_runs_seem_to_end_like_the_run_before_an_end_runs_between_two_runs_of_a_set(
    results: tuple[ProbeResult, ...], in_turn: bool
) -> None:
    end, alone, told = frozenset(range(9)), frozenset({3}), list[Subset]()
    luck = cycle(results)

    def probe(round_: Round) -> list[ProbeResult]:
        told.extend(round_.subsets)
        return [next(luck) if subset == end else GOOD for subset in round_.subsets]

    probes = ProbeCache(question(9), probe)
    list(probes.launch([frozenset(), end] * 24, Purpose.REPEAT, end))
    told.clear()
    assert judge_set(BayesianSearch(probes, end, 0.001), alone, Purpose.ALONE) is GOOD
    assert told.count(alone) > 5
    assert ((alone, alone) not in pairwise(told)) is in_turn


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_proofs_that_each_member_is_needed_run_in_turn_with_the_proofs_that_all_of_them_fail(seed: str) -> None:
    _, probe = bisected(question(12, order_seed=seed), needs({4, 7}))
    proofs = [one.purpose for one in probe.rounds if one.purpose in PROOFS]
    assert sorted(proofs[:4]) == [Purpose.DROP_ONE] * 3 + [Purpose.PROOF_BAD]
    assert sorted(proofs[4:7]) == [Purpose.DROP_ONE] * 2 + [Purpose.PROOF_BAD]
