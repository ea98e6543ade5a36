"""Overrides: command line over environment over YAML, and the matrix."""

from __future__ import annotations

import pytest

from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.overrides import is_override, parse_override, variants, with_overrides
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import Node, parse_yaml
from nsa_harness.errors import UsageError
from nsa_harness.subject.environment import TABLE, environment_overrides
from nsa_harness.subject.program import PROGRAM


def tree_of(text: str) -> Node:
    root = parse_yaml(text, "s.yaml").root
    assert root is not None
    return root


def scenario_of(tree: Node) -> Scenario:
    result = check_scenario(tree, PROGRAM)
    assert result.scenario is not None, [str(mistake) for mistake in result.mistakes]
    return result.scenario


MATRIX = tree_of("name: x\nmatrix: {gc.mode: [reentrant, non_reentrant], gc.layers: [0:4, [2, 6]]}\n")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("gc.layers=0:4", True),
        ("train.steps=3", True),
        ("run.env.NCCL_DEBUG=INFO", True),
        ("gc_all@gc.mode=reentrant", False),
        ("./a=b.yaml", False),
        ("ddp_onestep", False),
    ],
)
def test_a_word_with_an_equals_sign_after_a_dotted_key_is_an_override(word: str, expected: bool) -> None:
    assert is_override(word) is expected


def test_an_override_is_read_as_yaml() -> None:
    words = ["gc.layers=[0-3,7]", "train.steps=3", "trace.grads=false", "run.env.A=1", "limits.stall_s=auto"]
    scenario = scenario_of(with_overrides(tree_of("name: x\n"), [parse_override(word) for word in words]))
    assert scenario.gc.layers == "0,1,2,3,7"
    assert scenario.train.steps == 3
    assert scenario.trace.grads is False
    assert scenario.run.env == {"A": "1"}
    assert scenario.limits.stall_s is None


def test_each_combination_of_a_matrix_is_a_scenario_with_its_values_in_the_name() -> None:
    found = {variant.suffix: scenario_of(variant.tree).gc for variant in variants(MATRIX)}
    assert list(found) == [
        "@gc.mode=reentrant,gc.layers=0:4",
        "@gc.mode=reentrant,gc.layers=2+6",
        "@gc.mode=non_reentrant,gc.layers=0:4",
        "@gc.mode=non_reentrant,gc.layers=2+6",
    ]
    assert found["@gc.mode=reentrant,gc.layers=2+6"].layers == "2,6"
    assert found["@gc.mode=reentrant,gc.layers=2+6"].mode.value == "reentrant"


def test_a_matrix_with_too_many_combinations_is_counted_and_refused() -> None:
    values = "[1, 2, 3, 4, 5, 6, 7, 8, 9]"
    huge = tree_of("name: x\nmatrix: {" + ", ".join(f"train.key_{number}: {values}" for number in range(12)) + "}\n")
    with pytest.raises(UsageError, match=r"s\.yaml:2:1: matrix: 9( x 9){11} = 282429536481 combinations; at most 1000"):
        next(variants(huge))


def test_an_override_of_a_matrix_key_takes_that_axis_away() -> None:
    tree = with_overrides(MATRIX, [parse_override("gc.layers=all")])
    assert [variant.suffix for variant in variants(tree)] == ["@gc.mode=reentrant", "@gc.mode=non_reentrant"]
    assert {scenario_of(variant.tree).gc.layers for variant in variants(tree)} == {"all"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("name=x", "command line: name: can be set only in a scenario file"),
        ("matrix.gc.mode=[]", "command line: matrix.gc.mode: can be set only in a scenario file"),
        (
            "gc.layers=",
            "command line: gc.layers: no value after `=`; `gc.layers=null` removes the value",
        ),
        (
            "gc.layers=[0,",
            "command line: gc.layers: not YAML: expected the node content, but found '<stream end>' "
            "while parsing a flow node in [0,",
        ),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(word: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_override(word)
    assert str(caught.value) == message


VALUES = {
    "NSA_GC_RANGE": ("0:6", "gc", "layers", "0:6"),
    "NSA_GC_LAYERS": ("6,2", "gc", "layers", "2,6"),
    "NSA_FORCE_BRANCH": ("sel", "model", "branch", "sel"),
    "NSA_DDP_STATIC_GRAPH": ("1", "parallel", "static_graph", True),
    "NSA_USE_FA2": ("1", "model", "impl", "flash"),
    "NSA_TRACE_GRADS": ("0", "trace", "grads", False),
    "NSA_TRACE_MODULE_BWD": ("1", "trace", "module_bwd", True),
    "NSA_TRACE_DDP_BUCKETS": ("1", "trace", "buckets", True),
    "NSA_MEM_DUMP_EVERY": ("5", "trace", "mem_dump_every", 5),
    "TORCH_BACKEND": ("gloo", "needs", "backend", "gloo"),
}


def test_every_documented_name_is_tried_here() -> None:
    assert set(VALUES) == set(TABLE)


@pytest.mark.parametrize("variable", TABLE)
def test_a_documented_name_sets_its_key_and_says_so(variable: str) -> None:
    text, section, key, value = VALUES[variable]
    (found,) = environment_overrides({variable: text, "HOME": "x"})
    scenario = scenario_of(with_overrides(tree_of("name: x\n"), [found.override]))
    assert getattr(getattr(scenario, section), key) == value
    assert found.note == f"{variable}={text} in the environment set {section}.{key}"


def test_every_wrong_value_and_name_of_the_environment_is_reported_at_once() -> None:
    environ = {
        "NSA_GC_RANG": "0:6",
        "NSA_GC_RANGE": "8:4",
        "NSA_GC_LAYERS": "2;6",
        "NSA_FORCE_BRANCH": "sell",
        "NSA_TRACE_GRADS": "maybe",
        "NSA_MEM_DUMP_EVERY": "-1",
        "TORCH_BACKEND": "mpi",
        "NSA_HARNESS_OUT": "not ours to judge",
    }
    with pytest.raises(UsageError) as caught:
        environment_overrides(environ)
    assert str(caught.value).splitlines() == [
        'environment NSA_GC_RANG: nsa.train does not know this name; did you mean "NSA_GC_RANGE"?',
        "environment NSA_GC_LAYERS: NSA_GC_RANGE is set too, and both choose gc.layers; unset one",
        'environment NSA_GC_RANGE: expected "start:stop" with start < stop, got "8:4"',
        'environment NSA_GC_LAYERS: expected layer numbers such as 2,6, got "2;6"',
        'environment NSA_FORCE_BRANCH: expected cmp, sel or win, got "sell"; did you mean "sel"?',
        'environment NSA_TRACE_GRADS: expected 0 or 1, got "maybe"',
        'environment NSA_MEM_DUMP_EVERY: expected a number of steps, got "-1"',
        'environment TORCH_BACKEND: expected auto, gloo or nccl, got "mpi"',
    ]
