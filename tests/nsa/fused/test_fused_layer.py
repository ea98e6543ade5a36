"""A layer on the fused kernels is one operator: what it launches and saves, and what hooks see and change of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nsa_attention.attention import NSAttention, TokenContext, selection_from
from nsa_attention.config import Implementation, LayerConfig, NSAConfig
from nsa_attention.model import TinyLM
from nsa_attention.observe import ModuleBackwardTrace, traced_modules
from nsa_attention.ops import dispatch
from nsa_attention.ops.fused import launch
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies
from nsa_attention.samples import Observer

TOLERANCE = 1e-10
FORWARD = {"spanned_forward": 2, "ranked_blocks": 1, "selected_unions": 1, "selected_forward": 1, "mix_forward": 1}
BACKWARD = {
    "selected_unions": 1,
    "spanned_backward_queries": 2,
    "spanned_backward_keys": 2,
    "selected_backward_queries": 1,
    "selected_keys": 1,
    "selected_segments": 1,
    "selected_backward_keys": 1,
    "selected_backward_sum": 1,
}
META = torch.device("meta")


@pytest.fixture
def small(tiny: NSAConfig) -> NSAConfig:
    return replace(tiny, layers=1, heads=2, groups=1, seq_len=21)


@pytest.fixture
def attention(small: NSAConfig) -> NSAttention:
    return NSAttention.from_config(small, Implementation.TRITON).double()


def tokens(config: LayerConfig, length: int = 21) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, length, config.dim, dtype=torch.float64, generator=generator)


def step(layer: NSAttention, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    output = layer(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))]


def test_a_step_launches_six_kernels_forward_and_ten_backward(attention: NSAttention) -> None:
    launch.launches.clear()
    output = attention(tokens(attention.config))
    assert launch.launches == Counter(FORWARD)
    launch.launches.clear()
    output.square().sum().backward()
    assert launch.launches == Counter(BACKWARD)
    assert sum(FORWARD.values()) == 6
    assert sum(BACKWARD.values()) == 10


def test_a_hook_on_a_branch_sees_its_output_and_may_change_it(attention: NSAttention) -> None:
    x, seen = tokens(attention.config), dict[str, Tensor]()
    together = step(attention, x)
    plain = NSAttention.from_config(attention.config, Implementation.EAGER).double()
    plain.load_state_dict(attention.state_dict())
    handles = [
        layer.win.register_forward_hook(lambda _, __, output, name=name: seen.setdefault(name, output))
        for name, layer in (("fused", attention), ("plain", plain))
    ]
    for apart in (step(attention, x), step(plain, x)):
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(seen["fused"], seen["plain"], rtol=0, atol=TOLERANCE)
    assert seen["fused"].requires_grad
    for handle in handles:
        handle.remove()
    for layer in (attention, plain):
        layer.win.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
    torch.testing.assert_close(attention(x), plain(x), rtol=0, atol=TOLERANCE)
    assert not torch.allclose(attention(x), together[0])


def test_a_hook_of_the_chooser_sees_the_blocks_and_costs_no_launch(attention: NSAttention) -> None:
    x, chosen = tokens(attention.config), list[Tensor]()
    attention.sel.chooser.register_forward_hook(lambda _, __, indices: chosen.append(indices))
    launch.launches.clear()
    attention(x)
    assert launch.launches == Counter(FORWARD)
    plain = NSAttention.from_config(attention.config, Implementation.EAGER).double()
    plain.load_state_dict(attention.state_dict())
    plain.sel.chooser.register_forward_hook(lambda _, __, indices: chosen.append(indices))
    plain(x)
    assert torch.equal(*(indices.sort(-1).values for indices in chosen))


def test_a_hook_of_the_chooser_may_choose_other_blocks(attention: NSAttention) -> None:
    x = tokens(attention.config)
    plain = NSAttention.from_config(attention.config, Implementation.EAGER).double()
    plain.load_state_dict(attention.state_dict())
    before = attention(x)
    for layer in (attention, plain):
        layer.sel.chooser.register_forward_hook(lambda _, __, indices: torch.zeros_like(indices))
    for ours, theirs in zip(step(attention, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert not torch.allclose(attention(x), before)


def test_telemetry_changes_neither_the_launches_nor_a_bit(small: NSAConfig) -> None:
    model = TinyLM.from_config(small, Implementation.TRITON).double()
    inputs = torch.arange(21)[None] % small.vocab
    before = model(inputs)
    observer = Observer(model)
    observer.watch()
    launch.launches.clear()
    assert torch.equal(model(inputs), before)
    assert launch.launches == Counter(FORWARD)
    assert [row.layer for row in observer.selections()] == ["0"]
    assert [row.branch for row in observer.gates()] == ["cmp", "sel", "win"]
    assert observer.activation_dtypes()["blocks.0.attn.sel"] is torch.float64


def test_the_backward_pass_can_be_followed_through_the_branches(
    small: NSAConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyLM.from_config(small, Implementation.TRITON).double()
    ModuleBackwardTrace(traced_modules(model)).step = 4
    model(torch.arange(21)[None] % small.vocab).square().mean().backward()
    lines = capsys.readouterr().out.splitlines()
    assert {f"[MODULE-BWD] step=4 blocks.0.attn.{name}" for name in ("cmp", "sel", "win")} <= set(lines)


def test_a_compiler_traces_the_layer_whole(attention: NSAttention) -> None:
    x = tokens(attention.config)
    expected = step(attention, x)  # Triton is imported at the first call
    attention.compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(step(attention, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def saved_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """What is kept for the backward pass, each storage once and without the parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def test_what_a_layer_saves_at_the_shape_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator saves at most the memory of three outputs more than a dense one, and the whole layer of four."""
    monkeypatch.setattr(dispatch, "_device_reason", lambda *_: None)
    heads, groups, length, width = 64, 4, 65536, 128
    with META:
        layer = NSAttention(heads * width, heads, groups, dtype=torch.float16)
        x = torch.empty(1, length, heads * width, dtype=torch.float16, requires_grad=True)
        context = TokenContext(rotary_cos_sin(rotary_frequencies(width, device=META), length))
    output = x.numel() * x.element_size()
    # Queries, keys, values, output and log-sum-exp.
    dense_operator = output * (2 + 2 * groups / heads) + 4 * heads * length
    q, raw = layer.project(x, context.cos_sin)
    pairs = [
        tuple(tensor.detach().requires_grad_() for tensor in layer.branch(branch).prepare(*pair, context))
        for branch, pair in raw.items()
    ]
    leaves, gates = q.detach().requires_grad_(), layer.gates(x).detach().requires_grad_()
    arguments = (leaves, pairs, gates, selection_from(layer.config))
    saved = saved_bytes(lambda: gated_attention(*arguments, window=layer.config.window), layer)
    assert dense_operator + 2 * output < saved <= dense_operator + 3 * output
    # The input, and the joint weight of the projections.
    dense_layer = dense_operator + output + 2 * layer.q_proj.weight.numel() * (1 + 2 * groups / heads)
    assert saved_bytes(lambda: layer(x, context=context), layer) <= dense_layer + 4 * output
