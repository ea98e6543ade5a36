"""Modules are called by the names the user knows, whatever is wrapped around them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import nn

from nsa_harness.probe.names import ModuleNames, is_detail, strip
from nsa_harness.probe.status_file import StatusFileWriter


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("blocks.3.attn", "blocks.3.attn"),
        ("module.blocks.3", "blocks.3"),
        ("module.module.head", "head"),
        ("_fsdp_wrapped_module.blocks.1._checkpoint_wrapped_module.mlp", "blocks.1.mlp"),
        ("_orig_mod.module.blocks.0", "blocks.0"),
        ("net.module.conv", "net.module.conv"),
        ("module", ""),
    ],
)
def test_wrappers_leave_no_trace_in_a_name(path: str, name: str) -> None:
    assert strip(path) == name


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("blocks.3.attn.query", True),
        ("transformer.h.0.mlp.2", True),
        ("blocks.3.attn", False),
        ("layers.0.linear1", False),
        ("3", False),
        ("model.embed_tokens", False),
        ("Linear", False),
    ],
)
def test_a_detail_is_below_a_named_part_of_a_numbered_block(name: str, detail: bool) -> None:
    assert is_detail(name) is detail


@pytest.fixture
def names(tmp_path: Path) -> ModuleNames:
    return ModuleNames(StatusFileWriter(str(tmp_path / "1.board"), rank=0, world_size=1))


def test_the_outermost_module_called_names_all_inside_it(names: ModuleNames) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)])})
    assert names.find(model).name == "ModuleDict"
    assert names.find(model["blocks"][0]).name == "blocks.0"


def test_only_torchs_own_leaves_inside_a_part_of_a_block_have_no_mark(names: ModuleNames) -> None:
    class Own(nn.Linear):
        pass

    part = nn.ModuleDict({"query": nn.Linear(1, 1), "inner": nn.Sequential(nn.ReLU()), "own": Own(1, 1)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"attn": part})]), "head": nn.Linear(1, 1)})
    names.find(model)
    silent = {names.find(member).name for member in model.modules() if names.find(member).skips_events}
    assert silent == {"blocks.0.attn.query", "blocks.0.attn.inner.0"}


def test_what_never_waits_and_what_is_deep_inside_a_block_has_no_backward_mark(names: ModuleNames) -> None:
    class Part(nn.ModuleDict):
        pass

    attention = Part({"branch": Part({"inner": Part()})})
    block = nn.ModuleDict({"norm": nn.LayerNorm(1), "drop": nn.Dropout(), "act": nn.ReLU(), "attn": attention})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "norm": nn.LayerNorm(1)})
    names.find(model)
    silent = {names.find(member).name for member in model.modules() if names.find(member).skips_backward}
    assert silent == {"blocks.0.norm", "blocks.0.drop", "norm", "blocks.0.attn.branch.inner"}
    assert not names.find(model["blocks"][0]["attn"]["branch"]["inner"]).skips_events, "its forward is marked"


def test_a_second_tree_has_a_prefix_and_a_wrapper_around_the_first_has_none(names: ModuleNames) -> None:
    first, second = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    assert names.find(first).name == "Sequential"
    assert names.find(second).name == "Sequential"
    assert (names.find(first[0]).name, names.find(second[0]).name) == ("0", "Sequential.0")
    both = nn.ModuleDict({"encoder": first, "decoder": second})
    assert names.find(both).name == "ModuleDict"
    assert (names.find(first[0]).name, names.find(second[0]).name) == ("encoder.0", "decoder.0")


def test_a_module_at_the_address_of_a_dead_one_gets_its_own_name(names: ModuleNames) -> None:
    dead = nn.Linear(1, 1)
    known = names.find(dead)
    assert names.called[id(dead)] is known
    del dead
    gc.collect()
    assert known.module() is None
    assert names.called == {}
    for _ in range(50):
        module = nn.ReLU()
        assert names.find(module).name == "ReLU"
        del module
