"""What a bisection varies, said as a configuration, as words of a command line, and to people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.scenario.layers import layers_of, parse_layers
from nsa_harness.core.scenario.overrides import parse_override
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import plain
from nsa_harness.core.search.question import AnswerKind, SearchAnswer
from nsa_harness.core.search.subject import (
    Subject,
    SubjectForm,
    answer_for_subject,
    describe_layers,
    format_layers,
    format_override,
)
from nsa_harness.subject.options import branch_subject

LAYERS = Subject(form=SubjectForm.LAYERS, key="gc.layers", noun="layer", items=tuple(range(12)))
LENGTH = Subject(form=SubjectForm.VALUE, key="model.seq_len", noun="model.seq_len", items=(32, 64, 128), good=16)
KEYS = Subject(
    form=SubjectForm.KEYS,
    key="keys",
    noun="key",
    items=("gc.mode", "run.env.NCCL_DEBUG", "train.steps"),
    good_values=("non_reentrant", None, 1),
    bad_values=("reentrant", "INFO", 2),
)


def test_layers_are_said_as_none_as_a_range_or_one_by_one():
    assert LAYERS.overrides(()) == ("gc.layers=none",)
    assert LAYERS.overrides(range(6)) == ("gc.layers=0:6",)
    assert LAYERS.overrides((7,)) == ("gc.layers=[7]",)
    assert LAYERS.overrides((0, 1, 2, 8)) == ("gc.layers=[0-2,8]",)


@given(st.sets(st.integers(0, 95)))
def test_what_is_said_of_layers_is_read_back_as_the_same_layers(layers):
    word = format_override("gc.layers", sorted(layers))
    choice = parse_layers(plain(parse_override(word).value))
    assert set(layers_of(choice, 96)) == layers


def test_a_range_for_people_is_inclusive_with_the_code_form_behind_it():
    assert describe_layers((0, 1, 2, 3, 4, 5)) == "0-5 [0:6]"
    assert describe_layers((3, 8)) == "3 and 8"
    assert describe_layers((7,)) == "7"
    assert format_layers("all") == "all"
    assert format_layers("2,6") == "[2,6]"
    assert format_layers("2") == "[2]"


def test_an_ordered_subject_takes_the_largest_value_that_is_switched_on():
    assert LENGTH.config(()) == {"model.seq_len": 16}
    assert LENGTH.config((0, 1)) == {"model.seq_len": 64}
    assert LENGTH.question == "model.seq_len in (16, 128]"


def test_of_seeds_it_is_said_whether_it_is_the_data_or_a_race():
    seeds = Subject(form=SubjectForm.CHOICE, key="train.seed", noun="seed", items=(1, 2, 3))
    data = answer_for_subject(seeds, SearchAnswer(kind=AnswerKind.CHOICE, items=(1,)))
    assert data.why.startswith("the cause is the data")
    race = answer_for_subject(seeds, SearchAnswer(kind=AnswerKind.INDEPENDENT, p_bad=0.4, why="6 of 15 runs failed"))
    assert race.why.startswith("the cause is a race")
    assert race.why.endswith("6 of 15 runs failed")
    both = answer_for_subject(seeds, SearchAnswer(kind=AnswerKind.CHOICE, items=(1,), p_bad=0.7))
    assert both.why.startswith("the data matters, but there is also a race")
    always = answer_for_subject(seeds, SearchAnswer(kind=AnswerKind.INDEPENDENT))
    assert always.why.startswith("the cause is neither")
    assert answer_for_subject(seeds, SearchAnswer(kind=AnswerKind.NONE, why="w")).why == "w"


def test_keys_have_their_good_value_where_they_are_off_and_no_override_takes_a_variable_away():
    assert KEYS.config((0,)) == {"gc.mode": "reentrant", "run.env.NCCL_DEBUG": None, "train.steps": 1}
    assert KEYS.overrides((0,)) == ("gc.mode=reentrant", "train.steps=1")
    assert KEYS.unset_variables((0,)) == {"NCCL_DEBUG"}
    assert KEYS.unset_variables((1,)) == frozenset()


def test_without_any_branch_the_attention_is_the_dense_one():
    branches = branch_subject(Scenario(name="x"))
    assert branches.items == ("cmp", "sel", "win")
    assert branches.config(()) == {"model.attention": "vanilla", "model.branch": "all"}
    assert branches.config((1, 2)) == {"model.branch": "sel+win"}
    assert branches.config((0, 1, 2)) == {"model.branch": "all"}


@pytest.mark.parametrize("text", ["off", "1e3", "null", "a b", "it's", "[x]", "", "0x10", "ok"])
def test_a_text_survives_the_command_line_whatever_yaml_would_make_of_it(text):
    assert plain(parse_override(format_override("run.env.X", text)).value) == text


def test_people_read_a_choice_in_a_few_words():
    assert LAYERS.describe(range(12)) == "all 12 layers"
    assert LAYERS.describe(()) == "no layer"
    assert LAYERS.describe((7,)) == "layer 7"
    assert LENGTH.describe((0,)) == "model.seq_len 32"
    assert KEYS.describe((0, 2)) == "keys gc.mode, train.steps"


def test_only_layers_lie_side_by_side_so_keys_that_interact_are_a_set():
    found = SearchAnswer(kind=AnswerKind.RANGE, items=(0, 2))
    assert answer_for_subject(LAYERS, found) == found
    assert answer_for_subject(KEYS, found) == SearchAnswer(kind=AnswerKind.SET, items=(0, 1))
