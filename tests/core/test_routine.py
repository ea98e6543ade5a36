"""What a rank does again and again, and what is due by it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.collectives.call_history import ExpectedCall, comes_later, expected_next, leaves_a_loop


@pytest.mark.parametrize(
    ("sites", "following", "times"),
    [
        ("ab", None, 0),  # never stood there before
        ("aba", "b", 1),
        ("ababa", "b", 2),
        ("abacaba", "c", 1),  # the same one back, the longer past decides
        ("abaca", None, 0),  # went on in different ways from alike pasts
        ("xabyabxab", "y", 1),
        ("aabaa", "b", 1),
    ],
)
def test_what_followed_where_it_stood_alike_for_the_longest_way_back_is_due(
    sites: str, following: str | None, times: int
) -> None:
    found = expected_next(tuple(sites), len(sites))
    assert (found and sites[found.at], found.times if found else 0) == (following, times)


def test_a_routine_is_what_was_done_twice_before() -> None:
    once, twice = expected_next(tuple("aba"), 3), expected_next(tuple("ababa"), 5)
    assert once is not None
    assert twice is not None
    assert (once.is_trusted, twice.is_trusted) == (False, True)


def test_only_what_lies_before_counts() -> None:
    assert expected_next(tuple("abab"), 2) is None
    assert expected_next((), 0) is None
    assert expected_next(("a",), 1) is None


def test_what_was_passed_over_came_later_in_the_round_before() -> None:
    round_before = "abcabc"
    assert comes_later(round_before, ExpectedCall(at=3, times=1), 6, "b")
    assert comes_later(round_before, ExpectedCall(at=3, times=1), 6, "c")
    assert not comes_later(round_before, ExpectedCall(at=3, times=1), 6, "a"), "that is due itself"
    assert not comes_later(round_before, ExpectedCall(at=3, times=1), 6, "x")


def test_who_went_on_so_before_ends_a_loop_and_leaves_nothing_out() -> None:
    twice_round = "aaabaaab"
    assert leaves_a_loop([*twice_round, "a", "b"], 9)
    assert not leaves_a_loop("aaab", 3), "never went on so before"
    assert not leaves_a_loop("cbab", 3), "that followed something else"


@given(st.lists(st.integers(), min_size=1, max_size=5, unique=True), st.integers(2, 5), st.integers(0, 4))
def test_in_a_periodic_history_the_next_of_the_round_is_due(body: list[int], rounds: int, into: int) -> None:
    sites = [*body * rounds, *body[: into % len(body)]]
    found = expected_next(tuple(sites), len(sites))
    if len(body) == 1 and len(sites) < 2:
        return
    assert found is not None
    assert sites[found.at] == body[len(sites) % len(body)]
    assert found.times == sum(
        (one, following) == (sites[-1], body[len(sites) % len(body)]) for one, following in itertools.pairwise(sites)
    )


@given(st.text("abc", max_size=12))
def test_what_the_sites_are_called_decides_nothing(sites: str) -> None:
    names = {"a": "q", "b": "r", "c": "s"}
    renamed = [names[one] for one in sites]
    assert expected_next(tuple(sites), len(sites)) == expected_next(tuple(renamed), len(renamed))
