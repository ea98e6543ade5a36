"""Claim: what the counts of two sides decide, when "fixed" may be said, and what else differs between them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import run

from nsa_harness.core.experiment.claim import (
    FIRST,
    NO_GRADIENT,
    SECOND,
    ClaimReport,
    ClaimResult,
    ClaimTerms,
    FailureCount,
    FixStatus,
    SequentialTest,
    VerificationResult,
    compare_numbers,
    count,
    difference_text,
    effects,
    fix_status,
    lowest_failure_rate,
    verification_result,
)
from nsa_harness.core.experiment.statistics import passes_to_show
from nsa_harness.core.experiment.trial import ComputedNumber, Trial, make_trial
from nsa_harness.core.report import Status
from nsa_harness.core.search.question import ProbeResult

SUPPORTED, REFUTED, UNDECIDED, _ = ClaimResult
PASSED, ALIKE, OTHERWISE, UNJUDGED = ProbeResult
REPETITIONS = 100
MOST_WRONG = 9  # of a hundred, where each is wrong in at most 5 %: more are as rare as one in thirty
WITHOUT_FIRST = 4059  # with this seed, the first twelve pairs begin without the change


def trial(side: int, bad: bool | None = False, end: str = "", **facts: object) -> Trial:
    words = end or ("HANG · lock_cycle" if bad else "PASS" if bad is False else "ERROR · infra")
    counts_as = ProbeResult.UNRESOLVED if bad is None else ProbeResult.BAD if bad else ProbeResult.GOOD
    return Trial(config=side, counts_as=counts_as, end=words, dir="", wall_s=1.0, **facts)  # type: ignore[arg-type]


def agreed(**terms: object) -> ClaimTerms:
    return ClaimTerms(confidence=0.95, **terms)  # type: ignore[arg-type]


def contest(first: list[bool | None], second: list[bool | None], **terms: object) -> SequentialTest:
    """In turn, until one of both lists ends."""
    made, ends = SequentialTest(terms=agreed(**terms)), ([*first], [*second])
    while made.conclusion() is None and ends[made.next_side]:
        side = made.next_side
        made.add_trial(trial(side, ends[side].pop(0)))
    return made


def simulated(first: float, second: float, seed: int) -> SequentialTest:
    """Until it is decided, as the command asks; the failure has been seen before."""
    random, rates, made = Random(seed), (first, second), SequentialTest(terms=agreed(controls=14, order_seed=seed))
    while made.conclusion() is None:
        made.add_trial(trial(made.next_side, random.random() < rates[made.next_side]))
    return made


def results(first: float, second: float) -> Counter[ClaimResult]:
    found = (simulated(first, second, seed).conclusion() for seed in range(REPETITIONS))
    return Counter(one.result for one in found if one is not None)


TRUTHS = [
    pytest.param(0.3, 0.3, SUPPORTED, id="equal"),
    pytest.param(0.3, 0.15, REFUTED, id="halved"),
    pytest.param(0.8, 0.4, REFUTED, id="halved, and frequent"),
    pytest.param(0.3, 0.0, REFUTED, id="removed"),
    pytest.param(0.3, 0.6, SUPPORTED, id="made worse"),
    pytest.param(0.0, 0.3, SUPPORTED, id="brought in"),
    pytest.param(1.0, 0.0, REFUTED, id="deterministic, and removed"),
    pytest.param(1.0, 1.0, SUPPORTED, id="deterministic, and not removed"),
    pytest.param(0.0, 0.0, SUPPORTED, id="no failure"),
]


@pytest.mark.parametrize(("first", "second", "wrong"), TRUTHS)
def test_of_a_hundred_claims_of_one_truth_no_more_are_answered_wrongly_than_the_confidence_admits(
    first: float, second: float, wrong: ClaimResult
) -> None:
    assert results(first, second)[wrong] <= MOST_WRONG


@pytest.mark.parametrize(
    ("first", "second", "right", "least"),
    [(0.3, 0.0, SUPPORTED, 95), (1.0, 0.0, SUPPORTED, 100), (1.0, 1.0, REFUTED, 100), (0.3, 0.6, REFUTED, 95),
     (0.8, 0.4, SUPPORTED, 75), (0.0, 0.0, UNDECIDED, 100)],
)  # fmt: skip
def test_what_is_clear_is_answered(first: float, second: float, right: ClaimResult, least: int) -> None:
    assert results(first, second)[right] >= least


def test_a_failure_that_is_halved_is_told_with_both_counts_and_seldom_called_fixed() -> None:
    halved = (simulated(0.3, 0.15, seed) for seed in range(REPETITIONS))
    said = Counter(fix_status(one.count(FIRST), one.count(SECOND), 0.95) for one in halved)
    assert said[FixStatus.YES] <= MOST_WRONG
    made = simulated(0.3, 0.15, 1)
    found = made.conclusion()
    assert found is not None
    first, second = made.count(FIRST), made.count(SECOND)
    assert (found.result, fix_status(first, second, 0.95)) == (SUPPORTED, FixStatus.NO)
    assert (
        found.why
        == f"it fails less often: {first.bad} of {first.judged} without it and {second.bad} of {second.judged} with it"
    )


@pytest.mark.parametrize(
    ("first", "second", "pairs", "result", "why"),
    [
        (True, False, 5, SUPPORTED, "it fails less often: 5 of 5 without it and 0 of 5 with it"),
        (False, True, 3, REFUTED, "it does not prevent half of the failures: 0 of 3 without it and 3 of 3 with it"),
        (True, True, 6, REFUTED, "it does not prevent half of the failures: 6 of 6 without it and 6 of 6 with it"),
        (False, False, 3, UNDECIDED,
         "nothing failed in 3 runs of each side, so there is no failure to prevent"),
    ],
)  # fmt: skip
def test_sides_that_always_end_alike_take_few_pairs(
    first: bool, second: bool, pairs: int, result: ClaimResult, why: str
) -> None:
    made = contest([first] * 20, [second] * 20)
    found = made.conclusion()
    assert found is not None
    assert (made.pairs, found.result, found.why) == (pairs, result, why)


def test_sides_are_asked_in_turn_and_what_could_not_be_judged_is_asked_again() -> None:
    made, asked = SequentialTest(terms=agreed(order_seed=WITHOUT_FIRST)), []
    for bad in (True, None, False, True, False):
        asked.append(made.next_side)
        made.add_trial(trial(made.next_side, bad))
    assert asked == [FIRST, SECOND, SECOND, FIRST, SECOND]
    assert made.pairs == 2
    assert [(str(one), one.unjudged) for one in (made.count(FIRST), made.count(SECOND))] == [
        ("2 of 2", 0),
        ("0 of 2", 1),
    ]


def test_a_side_that_cannot_be_judged_is_given_up() -> None:
    made = contest([True, True], [None] * 9)
    found = made.conclusion()
    assert found is not None
    assert (found.result, found.why) == (UNDECIDED, "3 runs with it could not be judged")


def test_where_the_pairs_are_used_up_the_counts_are_told() -> None:
    found = contest([True, False] * 9, [False, True] * 9, max_pairs=5).conclusion()
    assert found is not None
    assert (found.result, found.why) == (UNDECIDED, "5 pairs do not decide it: 3 of 5 without it and 2 of 5 with it")


@given(ends=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_what_a_claim_says_agrees_with_its_counts(ends: list[tuple[bool, bool]]) -> None:
    made = contest([one for one, _ in ends], [other for _, other in ends])
    found = made.conclusion()
    first, second = made.count(FIRST), made.count(SECOND)
    assert (first.judged, second.judged) == (made.pairs, made.pairs)
    if found is not None and found.result is SUPPORTED:
        assert first.bad > second.bad
    if found is not None and found.result is REFUTED:
        assert second.bad * 2 > first.bad
    said = fix_status(first, second, 0.95)
    assert (said is None) == (first.bad == 0)
    assert said is not FixStatus.YES or second.bad == 0


# Fixed.


@pytest.mark.parametrize(
    ("bad", "of", "passes"), [(1, 1, 5), (7, 7, 2), (5, 5, 2), (1, 2, 9), (1, 5, 19), (3, 10, 11), (1, 20, 72)]
)
def test_a_count_says_how_many_passes_it_takes(bad: int, of: int, passes: int) -> None:
    assert passes_to_show(bad, of, 0.95) == passes


@given(bad=st.integers(1, 30), more=st.integers(0, 30))
def test_after_so_many_passes_a_failure_of_unknown_rate_would_have_shown(bad: int, more: int) -> None:
    """The chance of that many passes, by adding up all rates that these counts allow."""
    rates = [(step + 0.5) / 4000 for step in range(4000)]
    likely = [rate**bad * (1 - rate) ** more for rate in rates]
    passes = passes_to_show(bad, bad + more, 0.95)
    missed = [
        sum(weight * (1 - rate) ** runs for rate, weight in zip(rates, likely, strict=True)) / sum(likely)
        for runs in (passes - 1, passes)
    ]
    assert missed[1] <= 0.05 + 1e-4
    assert missed[0] > 0.05 - 1e-4


def counted(bad: int, of: int) -> FailureCount:
    return FailureCount(bad=bad, judged=of, unjudged=0, ends={})


def test_fixed_is_said_after_as_many_passes_as_a_verification_of_the_same_counts_takes() -> None:
    assert fix_status(counted(5, 5), counted(0, 1), 0.95) is FixStatus.NOT_YET
    assert fix_status(counted(5, 5), counted(0, 2), 0.95) is FixStatus.YES
    assert fix_status(counted(1, 5), counted(0, 18), 0.95) is FixStatus.NOT_YET
    assert fix_status(counted(1, 5), counted(0, 19), 0.95) is FixStatus.YES
    assert fix_status(counted(9, 30), counted(4, 30), 0.95) is FixStatus.NO
    assert fix_status(counted(0, 30), counted(0, 30), 0.95) is None


def decided(ends: list[ProbeResult], needed: int) -> VerificationResult | None:
    return verification_result([Trial(counts_as=one, end="", dir="", wall_s=1.0) for one in ends], needed)


def test_a_verification_stops_as_soon_as_it_is_decided() -> None:
    assert decided([], 1) is None
    assert decided([PASSED] * 13, 14) is None
    assert decided([PASSED] * 14, 14) is VerificationResult.FIXED
    assert decided([PASSED, UNJUDGED, ALIKE], 14) is VerificationResult.NOT_FIXED
    assert decided([PASSED, OTHERWISE], 2) is VerificationResult.FAILS_OTHERWISE
    assert decided([UNJUDGED, PASSED, UNJUDGED, UNJUDGED], 2) is None
    assert decided([PASSED, UNJUDGED, UNJUDGED, UNJUDGED], 2) is VerificationResult.UNDECIDED


def test_of_several_countings_the_lower_rate_decides() -> None:
    assert lowest_failure_rate([(1, 1), (1, 5)]) == (1, 5)
    assert lowest_failure_rate([(2, 2), (3, 3)]) == (3, 3)


# The order of the runs.


def order(seed: int, pairs: int) -> list[int]:
    made, asked = SequentialTest(terms=agreed(order_seed=seed, controls=pairs)), []
    while made.conclusion() is None:
        asked.append(made.next_side)
        made.add_trial(trial(made.next_side))
    return asked


def test_the_order_within_each_pair_is_drawn_and_the_same_seed_draws_it_again() -> None:
    drawn = [order(seed, 20) for seed in range(10)]
    assert drawn == [order(seed, 20) for seed in range(10)]
    firsts = Counter(one[start] for one in drawn for start in range(0, 40, 2))
    assert all({one[start], one[start + 1]} == {FIRST, SECOND} for one in drawn for start in range(0, 40, 2))
    assert 70 <= firsts[FIRST] <= 130


def test_a_program_that_fails_every_second_launch_supports_nothing() -> None:
    """In a fixed order one side has all its failures: each of these claims was answered by the alternation."""
    found: Counter[ClaimResult] = Counter()
    for seed in range(REPETITIONS):
        made = SequentialTest(terms=agreed(controls=14, order_seed=seed))
        while made.conclusion() is None:
            made.add_trial(trial(made.next_side, (len(made.trials) + seed) % 2 == 0))
        conclusion = made.conclusion()
        assert conclusion is not None
        found[conclusion.result] += 1
        assert "more often" not in conclusion.why
    assert found[SUPPORTED] <= MOST_WRONG


# Runs that are only slow.

HANGS, SLOW, ENDS = "hangs", "slow", "ends"


def slow_contest(*ends: str) -> SequentialTest:
    made = SequentialTest(terms=agreed(controls=14))
    while made.conclusion() is None:
        end = ends[made.next_side]
        wall_s = {HANGS: 40.0, SLOW: 20.0, ENDS: 18.0}[end]
        made.add_trial(replace(trial(made.next_side, end != ENDS, is_slow=end == SLOW), wall_s=wall_s))
    return made


@pytest.mark.parametrize(
    ("first", "second", "result", "pairs"),
    [
        (SLOW, ENDS, UNDECIDED, 5), (ENDS, SLOW, UNDECIDED, 3), (HANGS, SLOW, UNDECIDED, 6),
        (SLOW, SLOW, REFUTED, 6), (HANGS, ENDS, SUPPORTED, 5), (HANGS, HANGS, REFUTED, 6), (SLOW, HANGS, REFUTED, 6),
    ],
)  # fmt: skip
def test_a_deadline_between_both_sides_decides_nothing(
    first: str, second: str, result: ClaimResult, pairs: int
) -> None:
    made = slow_contest(first, second)
    found = made.conclusion()
    assert found is not None
    assert (found.result, made.pairs) == (result, pairs)
    assert found.is_by_deadline == (result is UNDECIDED)


def test_what_was_only_slow_without_the_change_is_never_called_fixed() -> None:
    made = slow_contest(SLOW, ENDS)
    assert fix_status(made.count(FIRST), made.count(SECOND), 0.95) is None
    assert [made.count(side).wall_s for side in (FIRST, SECOND)] == [20.0, 18.0]


def test_hangs_beside_slow_runs_decide_once_there_are_enough_of_them() -> None:
    made = SequentialTest(terms=agreed())
    while made.conclusion() is None:
        is_slow = len(made.trials) % 4 < 2
        made.add_trial(trial(made.next_side, made.next_side == FIRST, is_slow=is_slow and made.next_side == FIRST))
    found = made.conclusion()
    assert found is not None
    assert (found.result, made.pairs > 5) == (SUPPORTED, True)


# What else differs.


def computing(side: int, *norms: float, bad: bool = False, without: int | None = 0) -> Trial:
    numbers = tuple(ComputedNumber(step=step, name="grad_norm", value=norm) for step, norm in enumerate(norms, start=1))
    return trial(side, bad, computed=numbers, without_gradient=without)


def test_numbers_that_rounding_or_one_sides_own_runs_set_apart_are_the_same() -> None:
    alike = [computing(FIRST, 1.0, 2.0), computing(SECOND, 1.0, 2.001), computing(SECOND, 1.0, 2.001, 3.0)]
    found = compare_numbers(alike, 1e-3)
    assert (found.is_same, found.steps, found.name, found.step) == (True, 2, "grad_norm", 2)
    uneven = [computing(FIRST, 1.0), computing(FIRST, 1.2), computing(SECOND, 1.3), computing(SECOND, 1.3)]
    assert compare_numbers(uneven, 1e-3).is_same
    assert compare_numbers([computing(FIRST), computing(SECOND, 1.0)], 1e-3).is_same
    assert compare_numbers([trial(FIRST), computing(SECOND, 1.0)], 1e-3).is_same is None


@pytest.mark.parametrize("other", [1.5, math.nan, math.inf])
def test_a_number_that_is_another_one_is_told_with_its_step(other: float) -> None:
    found = compare_numbers([computing(FIRST, 1.0, 2.0), computing(SECOND, 1.0, other)], 1e-3)
    assert (found.is_same, found.step, found.first) == (False, 2, 2.0)
    assert difference_text(found).startswith("grad_norm of step 2 is 2 without it and ")


def test_a_parameter_that_gets_no_gradient_any_more_is_a_difference() -> None:
    found = compare_numbers([computing(FIRST, 1.0), computing(SECOND, 1.0, without=2)], 1e-3)
    assert (found.is_same, found.name, found.second) == (False, NO_GRADIENT, 2.0)


def test_only_the_first_steps_are_compared() -> None:
    long = [computing(FIRST, *[1.0] * 12), computing(SECOND, *[1.0] * 10, 2.0, 2.0)]
    assert compare_numbers(long, 1e-3).is_same
    assert compare_numbers(long, 1e-3).steps == 10


def test_a_mitigation_that_changes_what_is_computed_is_refuted_once_each_side_was_seen_twice() -> None:
    made = SequentialTest(terms=agreed(must_compute_same=True, tolerance=1e-3))
    told = SequentialTest(terms=agreed(tolerance=1e-3))
    for number in range(2):
        assert made.conclusion() is None, number
        for one in (computing(FIRST, 1.0, bad=True), computing(SECOND, 2.0)):
            made.add_trial(one)
            told.add_trial(one)
    found = made.conclusion()
    assert found is not None
    assert (found.result, told.conclusion()) == (REFUTED, None)
    assert found.why == (
        "it changes what is computed: grad_norm of step 1 is 1 without it and 2 with it "
        "(50 % apart; runs of one side: 0 %)"
    )


def test_effects_are_those_of_the_runs_that_passed_with_their_spread() -> None:
    trials = [
        trial(FIRST, step_s=1.0), trial(FIRST, step_s=3.0), trial(FIRST, True, step_s=9.0), trial(SECOND, step_s=2.5),
        trial(SECOND, step_s=3.5), trial(FIRST, rss_bytes=100), trial(SECOND, rss_bytes=150),
    ]  # fmt: skip
    step, whole, memory = effects(trials)
    assert step.first is not None
    assert (step.name, step.first.middle, step.first.low, step.first.high, step.first.count) == (
        "step time",
        2.0,
        1.0,
        3.0,
        2,
    )
    assert (step.change, step.overlaps) == (0.5, True)
    assert whole.name == "run time"
    assert (memory.change, memory.overlaps) == (0.5, False)


def test_a_report_tells_what_is_left_at_most() -> None:
    report = ClaimReport(text="", scenario="", key="", labels=("", ""), terms=agreed(max_pairs=10))
    begun = ClaimReport(**{**vars(report), "trials": (trial(FIRST), trial(SECOND, True))})
    assert (report.left_s, begun.left_s, begun.took_s) == (None, 18.0, 2.0)
    assert ClaimReport(**{**vars(begun), "budget_s": 5.0}).left_s == 3.0


def test_any_failure_is_a_bad_end_and_what_says_nothing_is_none() -> None:
    ends = [make_trial(run("a", status), lambda _: True).counts_as for status in Status]
    assert dict(zip(Status, ends, strict=True)) == {
        Status.PASS: PASSED, Status.FAIL: ALIKE, Status.HANG: ALIKE, Status.SKIP: UNJUDGED, Status.ERROR: UNJUDGED,
    }  # fmt: skip
    counts = count([trial(FIRST, True, "a"), trial(FIRST, True, "b"), trial(FIRST, True, "b")], FIRST)
    assert (counts.ends, list(counts.ends)) == ({"a": 1, "b": 2}, ["b", "a"])
    slow, raised = (make_trial(run("a", Status.FAIL, cause=cause), lambda _: True) for cause in ("slow", "exception"))
    assert (slow.is_slow, raised.is_slow) == (True, False)
    assert make_trial(run("a", missing_gradients=("w", "b")), lambda _: True).without_gradient == 2
