"""Settings: every source, which of them wins, and all mistakes at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from nsa_attention.config import CI, PRODUCTION, SHAPES, Attention, Branch, Implementation, NSAConfig
from nsa_attention.options import SettingsError
from nsa_attention.settings import Settings, read_settings
from nsa_attention.values import Data, Phase, Wrapper


def read(*arguments: str, **environment: str) -> Settings:
    return read_settings(arguments, environment)


def mistakes(*arguments: str, **environment: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments, environment)
    return str(caught.value).splitlines()


def test_without_any_source_the_ci_shape_takes_one_step() -> None:
    settings = read()
    assert (settings.model, settings.steps, settings.wrapper, settings.phase) == (CI, 1, Wrapper.NONE, Phase.STEP)
    assert settings.gc.of(4) == frozenset()


def test_every_documented_environment_name_is_read() -> None:
    settings = read(
        NSA_TRACE_GRADS="1",
        NSA_TRACE_MODULE_BWD="true",
        NSA_TRACE_DDP_BUCKETS="yes",
        NSA_GC_RANGE="0:2",
        NSA_FORCE_BRANCH="win",
        NSA_DDP_STATIC_GRAPH="on",
        NSA_USE_FA2="1",
        NSA_MEM_DUMP_EVERY="100",
        TORCH_BACKEND="gloo",
        NSA_OUT_DIR="elsewhere",
    )
    assert settings.trace_grads
    assert settings.trace_module_bwd
    assert settings.trace_buckets
    assert settings.static_graph
    assert settings.gc.of(4) == {0, 1}
    assert settings.model.branches == (Branch.WIN,)
    assert settings.impl is Implementation.FLASH
    assert (settings.mem_dump_every, settings.backend, settings.out_dir) == (100, "gloo", Path("elsewhere"))


def test_a_set_of_layers_has_its_own_environment_name() -> None:
    assert read(NSA_GC_LAYERS="3,1").gc.of(4) == {1, 3}


def test_what_came_later_is_off_unless_asked_for() -> None:
    off = read()
    assert (off.compile, off.comm_hook, off.barrier_after_backward) == (False, "none", False)
    assert not off.model.stop_gradient_gates
    words = ("--compile", "--barrier-after-backward", "--stop-gradient-gates", "--comm-hook", "bf16", "--ddp", "1")
    on = read(*words)
    assert (on.compile, on.comm_hook, on.barrier_after_backward) == (True, "bf16", True)
    assert on.model.stop_gradient_gates


def test_the_command_line_wins_over_the_environment() -> None:
    settings = read("--no-trace-grads", "--gc", "none", "--branch", "all", NSA_TRACE_GRADS="1", NSA_GC_RANGE="0:2")
    assert not settings.trace_grads
    assert settings.gc.of(4) == frozenset()


def test_an_empty_environment_value_counts_as_not_set() -> None:
    assert not read(NSA_TRACE_GRADS="").trace_grads


def test_the_seeds_own_spellings_work() -> None:
    settings = read("--dataset", "text", "--ddp", "1", "--steps", "3")
    assert (settings.data, settings.wrapper, settings.steps) == (Data.TEXT, Wrapper.DDP, 3)
    assert read("--ddp", "0").wrapper is Wrapper.NONE


def test_a_config_file_gives_options_and_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("shape: showcase\ndim: 64\nheads: 4\nsteps: 7\nstatic_graph: true\ngc: [0]\n", encoding="utf-8")
    settings = read("--steps", "9", CONFIG=str(path))
    assert settings.model == replace(SHAPES["showcase"], dim=64, heads=4)
    assert (settings.steps, settings.static_graph) == (9, True)
    assert settings.gc.of(1) == {0}
    assert read("--config", str(path)).steps == 7


def test_all_mistakes_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("dimm: 64\nheads: many\nsteps: 0\n", encoding="utf-8")
    found = mistakes(
        *("--phase", "sideways", "--layers", "none", "--bucket-cap-mb", "-1"),
        CONFIG=str(path),
        NSA_TRACE_GRAD="1",
        NSA_GC_RANGE="4:2",
        NSA_GC_LAYERS="1,x",
        NSA_FORCE_BRANCH="both",
        NSA_MEM_DUMP_EVERY="often",
    )
    assert sorted(found) == sorted(
        [
            f"{path}: dimm: no such option; did you mean dim?",
            f'{path}: heads: expected a whole number, got "many"',
            f'{path}: steps: expected a whole number of at least 1, got "0"',
            '--phase: expected step, data, forward or backward, got "sideways"',
            '--layers: expected a whole number of at least 1, got "none"',
            '--bucket-cap-mb: expected a number above 0, got "-1"',
            "NSA_TRACE_GRAD: no such setting; did you mean NSA_TRACE_GRADS?",
            "NSA_GC_LAYERS: NSA_GC_RANGE is set too; keep one of them",
            'NSA_GC_RANGE: expected "start:stop" with start < stop, got "4:2"',
            'NSA_GC_LAYERS: expected layer numbers such as "2,6", got "1,x"',
            'NSA_FORCE_BRANCH: expected cmp, sel or win, got "both"',
            'NSA_MEM_DUMP_EVERY: expected a whole number of at least 0, got "often"',
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gc", "2,9"), "--gc: layer 9 does not exist; the model has layers 0 to 3"),
        (("--gc", "0:5"), "--gc: layer 4 does not exist; the model has layers 0 to 3"),
        (("--gc", "1-2"), '--gc: expected none, all, a range such as "0:6" or a set such as "2,6", got "1-2"'),
        (
            ("--wrapper", "manual", "--ddp", "1"),
            "--ddp: means --wrapper ddp, but --wrapper manual is given; keep one of them",
        ),
        (
            ("--attention", "vanilla", "--branch", "cmp"),
            "--branch: attention vanilla has no branches; use --branch all or --attention nsa",
        ),
        (
            ("--attention", "stock", "--impl", "eager"),
            "--impl eager: attention stock has one implementation; use --impl auto",
        ),
        (
            ("--branch", "cmp+sel", "--impl", "flash"),
            "--impl flash: it computes the branch win alone, and the branches are cmp+sel; use --impl auto",
        ),
        (
            ("--attention", "stock", "--stop-gradient-gates"),
            "--stop-gradient-gates: attention stock has no gates; use --attention nsa",
        ),
        (
            ("--wrapper", "fsdp", "--comm-hook", "bf16"),
            "--comm-hook: bf16 is a DDP hook, but --wrapper is fsdp; use --wrapper ddp",
        ),
        (
            ("--wrapper", "fsdp1", "--dtype", "float16"),
            "--dtype: float16 needs loss scaling, which --wrapper fsdp1 does not support; use --dtype bfloat16",
        ),
        (
            ("--data", "no/such/file"),
            "--data: expected synthetic, text, stories, hf:PATH, or the path of a file, a folder or a pattern of "
            'files, got "no/such/file"',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_errors(arguments: tuple[str, ...], message: str) -> None:
    assert mistakes(*arguments) == [message]


def test_the_names_of_the_harness_are_left_alone() -> None:
    assert read(NSA_HARNESS_REPEAT="3").steps == 1


def test_a_file_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n", encoding="utf-8")
    assert mistakes(CONFIG=str(path)) == [f'{path}: expected "name: value" lines, got list']
    (broken := tmp_path / "broken.yaml").write_text("steps: [", encoding="utf-8")
    assert mistakes(CONFIG=str(broken))[0].startswith(f"{broken}: cannot be read as YAML: ")


def test_production_checkpoints_every_layer_unless_told_otherwise() -> None:
    assert read("--shape", "production").gc.of(12) == frozenset(range(12))
    assert read("--shape", "production", "--gc", "none").gc.of(12) == frozenset()


def test_the_named_shapes_are_those_of_the_reports() -> None:
    assert PRODUCTION.dim == 768
    assert (PRODUCTION.layers, PRODUCTION.heads, PRODUCTION.groups) == (12, 12, 2)
    assert (PRODUCTION.block_len, PRODUCTION.block_stride, PRODUCTION.select_len) == (32, 16, 64)
    assert (PRODUCTION.select_count, PRODUCTION.window, PRODUCTION.seq_len) == (16, 512, 2048)
    assert (SHAPES["minimal"].layers, SHAPES["minimal"].seq_len) == (2, 512)
    assert (SHAPES["showcase"].layers, SHAPES["showcase"].dim, SHAPES["showcase"].batch) == (1, 128, 8)
    assert set(SHAPES) == {"ci", "minimal", "repro", "showcase", "shake", "production"}


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"heads": 7}, "shape x: heads: expected a multiple of groups (2), got 7"),
        ({"d_k": 5}, "shape x: d_k: expected an even number (rotary positions turn pairs), got 5"),
        ({"layers": 0}, "shape x: layers: expected at least 1, got 0"),
        (
            {"block_stride": 17},
            "shape x: block_stride: expected at most block_len (16), got 17: tokens between two blocks would belong "
            "to none",
        ),
        (
            {"select_count": 2},
            "shape x: select_count: expected at least 3 (block 0, the current and the previous one are always "
            "chosen), got 2",
        ),
        (
            {"attention": Attention.STOCK, "dim": 100},
            "shape x: dim: expected a multiple of heads (8) for the stock layer, got 100",
        ),
        ({"branches": ()}, "shape x: branches: expected one or more different branches, got []"),
    ],
)
def test_an_impossible_shape_says_why(changes: dict[str, object], mistake: str) -> None:
    with pytest.raises(ValueError, match="shape x") as caught:
        NSAConfig(name="x", **changes)  # type: ignore[arg-type]
    assert str(caught.value) == mistake


def test_importing_the_package_leaves_the_environment_alone() -> None:
    look = "import os; before = dict(os.environ); import nsa_attention.settings; print(dict(os.environ) == before)"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
