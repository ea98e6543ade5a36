"""Places as spans, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.search.question import are_valid_spans, indices_in, last_index, spans_of


@given(st.frozensets(st.integers(0, 40)))
def test_places_come_back_as_they_were_and_equal_sets_have_equal_spans(places: frozenset[int]) -> None:
    spans = spans_of(places)
    assert indices_in(spans) == places
    assert spans_of(sorted(places, reverse=True)) == spans
    assert last_index(spans) == max(places, default=None)
    assert are_valid_spans(spans, 41)


def test_neighbours_are_one_span() -> None:
    assert spans_of({0, 1, 2, 7, 9, 10}) == ((0, 3), (7, 8), (9, 11))
    assert spans_of(range(100_000)) == ((0, 100_000),)
    assert spans_of(()) == ()


@pytest.mark.parametrize("spans", [((0, 13),), ((-1, 2),), ((3, 3),), ((4, 6), (0, 2)), ((0, 2), (2, 4))])
def test_what_is_no_spans_of_twelve_items_is_told(spans: tuple[tuple[int, int], ...]) -> None:
    assert not are_valid_spans(spans, 12)
