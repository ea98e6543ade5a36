"""YAML 1.2 with positions: what words mean, and what a hostile text comes to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.scenario.yaml_tree import ParsedYaml, merge, origin_of, parse_yaml, plain, scalar, value_text


def messages(parsed: ParsedYaml) -> list[str]:
    return [str(mistake) for mistake in parsed.mistakes]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("0:6", "0:6"),
        ("1:30", "1:30"),
        ("1e3", 1000.0),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        (".5", 0.5),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_plain_word_means_what_yaml_1_2_says(word: str, value: object) -> None:
    assert scalar(word) == value
    assert type(scalar(word)) is type(value)


def test_infinity_and_not_a_number_are_numbers() -> None:
    assert scalar("-.inf") == -math.inf
    assert math.isnan(float(str(scalar(".nan"))))


def test_a_quoted_word_is_text_and_a_key_knows_its_place() -> None:
    parsed = parse_yaml('gc:\n  layers: "1"\ntags: [a, b]\n', "s.yaml")
    assert parsed.root is not None
    assert plain(parsed.root) == {"gc": {"layers": "1"}, "tags": ["a", "b"]}
    assert str(origin_of(parsed.root, ("gc", "layers"))) == "s.yaml:2:3"
    assert str(origin_of(parsed.root, ("tags", 1))) == "s.yaml:3:11"
    assert str(origin_of(parsed.root, ("gc", "nothing"))) == "s.yaml:1:1"


def test_duplicate_keys_are_all_reported_at_once() -> None:
    parsed = parse_yaml("a: 1\na: 2\nb: {c: 1, c: 2}\n", "s.yaml")
    assert messages(parsed) == [
        "s.yaml:2:1: a: given twice, first in line 1; keep one",
        "s.yaml:3:11: b.c: given twice, first in line 3; keep one",
    ]


def test_a_nul_character_is_refused_at_each_of_its_places() -> None:
    """No argument, environment variable or path can contain one, so the launch would fail."""
    document = parse_yaml('run:\n  args: ["a\\0b", "\\0"]\n  env: {A: "\\0"}\n', "s.yaml")
    refused = "the character U+0000 is not allowed in a YAML file"
    assert list(map(str, document.mistakes)) == [
        f"s.yaml:2:10: run.args.0: {refused}",
        f"s.yaml:2:18: run.args.1: {refused}",
        f"s.yaml:3:9: run.env.A: {refused}",
    ]


def test_maps_merge_and_lists_replace() -> None:
    under = parse_yaml("gc: {mode: reentrant, layers: all}\ntags: [a, b]\n", "base.yaml").root
    over = parse_yaml("gc: {layers: 0:2}\ntags: [c]\n", "child.yaml").root
    assert under is not None
    assert over is not None
    tree = merge(under, over)
    assert plain(tree) == {"gc": {"mode": "reentrant", "layers": "0:2"}, "tags": ["c"]}
    assert str(origin_of(tree, ("gc", "mode"))) == "base.yaml:1:6"
    assert str(origin_of(tree, ("gc", "layers"))) == "child.yaml:1:6"


@given(st.text(max_size=200))
def test_any_text_is_either_a_tree_or_a_mistake(text: str) -> None:
    parsed = parse_yaml(text, "s.yaml")
    assert (parsed.root is None) <= bool(parsed.mistakes)
    assert all("\n" not in message and message.isprintable() for message in messages(parsed))


def test_a_value_is_shown_without_what_a_terminal_obeys() -> None:
    assert value_text("a\x1b[31m\u202e") == '"a\\x1b[31m\\u202e"'
    assert value_text("x" * 100) == f'"{"x" * 60}..."'
    assert value_text(None) == "nothing"
