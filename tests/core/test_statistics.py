"""Rates from counts: intervals that hold, and a test that may be looked at after every pair."""

from __future__ import annotations

from math import comb
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.experiment.statistics import RateDifferenceTest, RateRatioTest, interval, runs_to_show

SEEDS = range(400)


def separated(first: float, second: float, seed: int, pairs: int = 100) -> int | None:
    """After how many pairs; None: never."""
    random, seen = Random(seed), RateDifferenceTest()
    for _ in range(pairs):
        seen.add_pair(random.random() < first, random.random() < second)
        if seen.is_shown(0.95):
            return seen.pairs
    return None


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3, 0.5, 0.9])
def test_equal_rates_are_seldom_called_apart_however_often_one_looks(rate: float) -> None:
    assert sum(separated(rate, rate, seed) is not None for seed in SEEDS) <= 0.05 * len(SEEDS)


@pytest.mark.parametrize(("first", "second", "pairs"), [(0.0, 1.0, 4), (0.0, 0.5, 16), (0.1, 0.9, 10), (0.2, 0.8, 18)])
def test_rates_that_differ_are_told_apart_soon(first: float, second: float, pairs: int) -> None:
    taken = [separated(first, second, seed) for seed in SEEDS]
    assert None not in taken
    assert sum(one or 0 for one in taken) / len(taken) <= pairs


def test_rates_that_are_alike_are_seen_to_be() -> None:
    alike, apart = RateDifferenceTest(), RateDifferenceTest()
    for turn in range(60):
        alike.add_pair(turn % 2 == 0, turn % 2 == 1)
        apart.add_pair(turn % 5 == 0, turn % 2 == 0)
    assert alike.differs_by_less_than(0.2, 0.95)
    assert not alike.differs_by_less_than(0.1, 0.95)
    assert not apart.differs_by_less_than(0.2, 0.95)
    assert not RateDifferenceTest().differs_by_less_than(0.2, 0.95)


@given(of=st.integers(1, 40), rate=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_an_interval_holds_the_rate_as_often_as_it_says(of: int, rate: float) -> None:
    """Over all counts, each as likely as this rate makes it."""
    held = (interval(bad, of)[0] <= rate <= interval(bad, of)[1] for bad in range(of + 1))
    chances = (comb(of, bad) * rate**bad * (1 - rate) ** (of - bad) for bad in range(of + 1))
    assert sum(chance for inside, chance in zip(held, chances, strict=True) if inside) >= 0.95 - 1e-6


@pytest.mark.parametrize(
    ("bad", "of", "low", "high"),
    [(0, 3, 0.0, 0.708), (3, 3, 0.292, 1.0), (9, 16, 0.299, 0.802), (0, 0, 0.0, 1.0), (2500, 5000, 0.486, 0.514)],
)
def test_an_interval_is_that_of_the_tables(bad: int, of: int, low: float, high: float) -> None:
    assert interval(bad, of) == pytest.approx((low, high), abs=1e-3)


def test_so_many_tries_show_what_happens_so_often() -> None:
    assert (runs_to_show(0.5, 0.95), runs_to_show(0.2, 0.95)) == (5, 14)


def exceeded(first: float, second: float, seed: int, pairs: int = 100) -> int | None:
    """After how many pairs the second rate is shown to be more than half of the first; None: never."""
    random, seen = Random(seed), RateRatioTest(0.5)
    for _ in range(pairs):
        seen.add_pair(random.random() < first, random.random() < second)
        if seen.is_shown(0.95):
            return seen.pairs
    return None


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.15), (1.0, 0.5), (0.9, 0.45), (0.6, 0.1), (0.5, 0.0)])
def test_a_rate_of_at_most_that_share_is_seldom_said_to_be_more(first: float, second: float) -> None:
    assert sum(exceeded(first, second, seed) is not None for seed in SEEDS) <= 0.05 * len(SEEDS)


@pytest.mark.parametrize(("first", "second", "pairs"), [(1.0, 1.0, 6), (0.0, 1.0, 3), (0.8, 0.8, 20), (0.3, 0.6, 20)])
def test_a_rate_of_more_than_that_share_is_seen_to_be_soon(first: float, second: float, pairs: int) -> None:
    taken = [exceeded(first, second, seed) for seed in SEEDS]
    assert None not in taken
    assert sum(one or 0 for one in taken) / len(taken) <= pairs
