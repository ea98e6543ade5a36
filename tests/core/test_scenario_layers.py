"""The forms of a choice of layers."""

from __future__ import annotations

import re

import pytest

from nsa_harness.core.scenario.layers import layers_of, parse_layers


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("none", "none"),
        ("all", "all"),
        ("0:6", "0:6"),
        ("2,6", "2,6"),
        ([6, 2, 2], "2,6"),
        (["0-2", 5], "0,1,2,5"),
    ],
)
def test_every_form_has_one_canonical_text_that_reads_back(given: object, canonical: str) -> None:
    assert parse_layers(given) == canonical
    assert parse_layers(canonical) == canonical


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8:4", 'expected "start:stop" with start < stop, got "8:4"'),
        ("4:4", 'expected "start:stop" with start < stop, got "4:4"'),
        ("some", 'expected none, all, "start:stop" with start < stop, or a list such as [2, 6], got "some"'),
        (7, 'expected none, all, "start:stop" with start < stop, or a list such as [2, 6], got 7'),
        ([], "expected at least one layer in the list; write none for no layer"),
        ([-1], "expected layer numbers such as 0, 1 or 4-6, got -1 in the list"),
        ([True], "expected layer numbers such as 0, 1 or 4-6, got true in the list"),
        (["5-2"], 'expected layer numbers such as 0, 1 or 4-6, got "5-2" in the list'),
    ],
)
def test_every_other_form_is_refused_with_what_was_expected(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_layers(given)
    assert str(caught.value) == message


def test_a_choice_names_its_layers() -> None:
    assert layers_of("none", 4) == ()
    assert layers_of("all", 4) == (0, 1, 2, 3)
    assert layers_of("1:3", 4) == (1, 2)
    assert layers_of("0,3", 4) == (0, 3)
