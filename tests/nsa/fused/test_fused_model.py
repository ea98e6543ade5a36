"""The model on the fused kernels is the model on plain torch, however it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from nsa_attention.config import Branch, Compression, Implementation, NSAConfig
from nsa_attention.model import Recompute, TinyLM
from nsa_attention.ops.dispatch import MissingImplementationError, implementation_for
from nsa_attention.ops.fused import launch, tuning
from nsa_attention.ops.fused.launch import Tile
from nsa_attention.ops.packed import compressed_starts
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention
from nsa_attention.parallelize import checkpoint_layers, compile_layers
from nsa_attention.warmup import uses_fused_kernels, warm_up
from nsa_attention.world import World

TOLERANCE = 1e-10
SPANNED = {"spanned_forward", "spanned_backward_queries", "spanned_backward_keys"}
SELECTED = {
    "ranked_blocks",
    "selected_unions",
    "selected_forward",
    "selected_backward_queries",
    "selected_keys",
    "selected_segments",
    "selected_backward_keys",
}


@pytest.fixture
def small(tiny: NSAConfig) -> NSAConfig:
    return replace(tiny, layers=1, heads=2, groups=1, seq_len=21)


def pair(config: NSAConfig) -> tuple[TinyLM, TinyLM]:
    """The same weights on the fused kernels and on plain torch."""
    fused, plain = (TinyLM.from_config(config, name).double() for name in (Implementation.TRITON, Implementation.EAGER))
    fused.load_state_dict(plain.state_dict())
    launch.launches.clear()
    return fused, plain


def gradients(model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    logits = model(tokens_BT)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    return logits.detach(), list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def assert_same(fused: nn.Module, plain: nn.Module, tokens_BT: Tensor) -> None:
    torch.testing.assert_close(gradients(fused, tokens_BT), gradients(plain, tokens_BT), rtol=0, atol=TOLERANCE)


def tokens(config: NSAConfig) -> Tensor:
    return torch.randint(config.vocab, (1, config.seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("branches", "kernels"),
    [
        ((Branch.CMP, Branch.SEL, Branch.WIN), SPANNED | SELECTED | {"mix_forward"}),
        ((Branch.SEL,), {"spanned_forward"} | SELECTED),
        ((Branch.WIN,), SPANNED),
    ],
    ids=["all", "sel", "win"],
)
def test_output_and_gradients_are_those_of_plain_torch(
    small: NSAConfig, branches: tuple[Branch, ...], kernels: set[str]
) -> None:
    config = replace(small, branches=branches, compression=Compression.MEAN)
    assert_same(*pair(config), tokens(config))
    assert set(launch.launches) - {"selected_backward_sum"} == kernels | {"rotated"}


@pytest.mark.parametrize("mode", list(Recompute))
def test_checkpointing_changes_no_bit_and_chooses_no_block_twice(small: NSAConfig, mode: Recompute) -> None:
    fused, _ = pair(small)

    def step() -> list[Tensor]:
        fused.zero_grad()
        fused(tokens(small)).square().sum().backward()
        return [parameter.grad for parameter in fused.parameters()]

    kept = step()
    once = launch.launches["ranked_blocks"]
    checkpoint_layers(fused, {0}, mode)
    for first, second in zip(kept, step(), strict=True):
        assert torch.equal(first, second)
    assert launch.launches["ranked_blocks"] == 2 * once
    assert launch.launches["selected_forward"] == 3  # of these the third is the recomputation


def test_compiled_layers_compute_what_plain_torch_computes(small: NSAConfig) -> None:
    fused, plain = pair(small)
    compile_layers(fused, backend="aot_eager")
    assert_same(fused, plain, tokens(small))
    assert launch.launches["selected_forward"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_on_the_fused_kernels_compute_the_gradients_of_one_process_on_plain_torch(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    program = Path(__file__).with_name("wrapped_fused.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(ROOT / "nsa"), str(ROOT / "tests" / "nsa")])
    done = subprocess.run(
        [*launcher, str(program), str(result)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    distances: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    assert distances.keys() == {"ddp", "ddp gc", "fsdp", "fsdp gc"}
    assert max(distances.values()) < TOLERANCE


class TestTheWholeOperation:
    lengths = (17, 0, 5, 11)

    def inputs(self, starts: Tensor | None, total: int) -> tuple[Tensor, KeysAndValues, Tensor]:
        blocks = max(0, (total - 6) // 3 + 1) if starts is None else int(compressed_starts(starts, 6, 3)[-1])

        def leaf(heads: int, length: int) -> Tensor:
            return torch.randn(1, heads, length, 4, dtype=torch.float64, requires_grad=True)

        lengths = {"compressed": blocks, "selected": total, "sliding": total}
        pairs = {name: (leaf(1, length), leaf(1, length)) for name, length in lengths.items()}
        gates = torch.rand(3, 1, 2, total, dtype=torch.float64, requires_grad=True)
        return leaf(2, total), KeysAndValues(**pairs), gates

    selection = Selection(block_len=6, block_stride=3, select_len=5, select_count=4, scale=0.5)

    def test_of_packed_sequences_is_the_same_on_both_backends(self) -> None:
        starts = torch.tensor([0, 17, 17, 22, 33], dtype=torch.int32)
        q, branches, gates = self.inputs(starts, 33)
        leaves = [q, gates, *branches.compressed, *branches.selected, *branches.sliding]
        results = []
        for implementation in (Implementation.TRITON, Implementation.EAGER):
            output = sparse_attention(
                q, branches, gates, self.selection, window=7, implementation=implementation, cu_seqlens=starts
            )
            results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
        torch.testing.assert_close(*results, rtol=0, atol=TOLERANCE)

    def test_of_one_packed_sequence_is_that_without_packing(self) -> None:
        q, branches, gates = self.inputs(None, 20)
        starts = torch.tensor([0, 20], dtype=torch.int32)
        packed, plain = (
            sparse_attention(q, branches, gates, self.selection, window=7, cu_seqlens=given) for given in (starts, None)
        )
        torch.testing.assert_close(packed, plain, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("name", ["flash", "torch"])
    def test_insists_on_the_flash_attention_that_was_asked_for(self, name: str) -> None:
        q, branches, gates = self.inputs(None, 20)
        with pytest.raises(MissingImplementationError, match=f"--impl {name}: .* runs on CUDA only"):
            sparse_attention(q, branches, gates, self.selection, window=7, implementation=Implementation(name))


class TestTheWarmUp:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), backend=None)

    def warmed(self, model: TinyLM, config: NSAConfig, file: Path) -> str:
        return warm_up(model, self.world, batch=1, tokens=config.seq_len, autocast=nullcontext, file=file)

    def test_runs_every_kernel_of_a_step_and_leaves_no_trace_in_the_model(
        self, small: NSAConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning, "_tiles", {})  # what other tests have settled
        fused, _ = pair(small)
        state = torch.random.get_rng_state()
        said = self.warmed(fused, small, tmp_path / "tuning.json")
        assert set(launch.launches) - {"selected_backward_sum"} == SPANNED | SELECTED | {"rotated", "mix_forward"}
        assert launch.launches["ranked_blocks"] == 2  # the second ranks the blocks of documents, by a table
        assert all(parameter.grad is None for parameter in fused.parameters())
        assert not any(module.runs for module in fused.modules() if hasattr(module, "runs"))
        assert torch.equal(state, torch.random.get_rng_state())
        assert said.startswith("warm-up: one layer forward and backward, 0 tile sizes determined, ")
        assert not (tmp_path / "tuning.json").exists()  # in the interpreter nothing is measured

    def test_keeps_what_was_measured_or_says_why_not(
        self, small: NSAConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = torch.empty(1, 1, 1, 1)
        measured = replace(tuning.TuningKey.of("any", tensor, tensor, tensor, "any"), device="a GPU")
        monkeypatch.setitem(tuning._tiles, measured, Tile(rows=16, keys=16))
        config = replace(small, branches=(Branch.WIN,))
        kept, blocked = tmp_path / "new" / "tuning.json", tmp_path / "file" / "tuning.json"
        (tmp_path / "file").write_text("")
        assert self.warmed(pair(config)[0], config, kept).endswith(f"; kept in {kept}")
        assert '"a GPU"' in kept.read_text()
        assert f"; not kept: {blocked}: " in self.warmed(pair(config)[0], config, blocked)

    def test_is_for_models_on_the_fused_kernels(self, small: NSAConfig) -> None:
        fused, plain = pair(small)
        device = torch.device("cpu")
        assert uses_fused_kernels(fused, device, torch.float64)
        assert not uses_fused_kernels(plain, device, torch.float64)


def test_who_ran_is_counted_for_every_part(small: NSAConfig) -> None:
    fused, _ = pair(small)
    fused(tokens(small))
    counted: dict[str, Counter[Any]] = {
        name: module.runs for name, module in fused.named_modules() if hasattr(module, "runs")
    }
    assert {name.rsplit(".", 1)[-1] for name in counted} == {"cmp", "sel", "chooser", "win", "gate_mlp"}
    for runs in counted.values():
        assert [(used.name, used.reason, count) for used, count in runs.items()] == [("triton", "asked for", 1)]


def test_the_interpreter_is_never_chosen_for_anyone() -> None:
    q = torch.randn(1, 2, 5, 4)
    assert implementation_for(Implementation.AUTO, q, q, q)[1].name == "fused_cpu"
