"""A layer on the fused kernels is one operator: what it launches and saves, and what hooks see and change of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nsa_attention import attention as attention_module
from nsa_attention import branches, compression
from nsa_attention.attention import NSAttention
from nsa_attention.config import Implementation, LayerConfig, NSAConfig
from nsa_attention.model import TinyLM
from nsa_attention.observe import ModuleBackwardTrace, traced_modules
from nsa_attention.ops import dispatch
from nsa_attention.ops.fused import launch
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies
from nsa_attention.ops.selection import Selection
from nsa_attention.projections import TokenContext
from nsa_attention.samples import Observer
from nsa_attention.vanilla_attention import VanillaAttention

TOLERANCE = 1e-10
FORWARD = {
    "rotated": 1,  # queries and keys of all branches
    "spanned_forward": 2,
    "ranked_blocks": 1,
    "selected_unions": 1,
    "selected_forward": 1,
    "mix_forward": 1,
}
BACKWARD = {
    "rotated": 2,  # the gradients, and the keys of the sliding branch, which are not saved
    "mix_forward": 1,  # the sum is not saved
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


def test_a_step_launches_seven_kernels_forward_and_thirteen_backward(attention: NSAttention) -> None:
    launch.launches.clear()
    output = attention(tokens(attention.config))
    assert launch.launches == Counter(FORWARD)
    launch.launches.clear()
    output.square().sum().backward()
    assert launch.launches == Counter(BACKWARD)
    assert sum(FORWARD.values()) == 7
    assert sum(BACKWARD.values()) == 13


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_may_use_atomics_and_computes_the_same(small: NSAConfig, compiled: bool) -> None:
    x, layers = tokens(small), []
    for deterministic in (True, False):
        layer = NSAttention.from_config(small, Implementation.TRITON, deterministic=deterministic).double()
        layers.append(layer)
    layers[1].load_state_dict(layers[0].state_dict())
    expected = step(layers[0], x)
    launch.launches.clear()
    if compiled:
        layers[1].compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(step(layers[1], x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert launch.launches["spanned_statistics"] == 2
    assert launch.launches["spanned_backward_queries"] == 0


def test_the_constructor_of_a_layer_has_the_option() -> None:
    assert NSAttention(8, 2, 1).deterministic
    assert not NSAttention(8, 2, 1, deterministic=False).deterministic


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
    """Return the bytes that are saved for the backward pass, each storage once, without the parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters)


@dataclass(frozen=True)
class Shape:
    """A layer in float16 on a device without data. An output is a tensor [1, T, heads x width], the unit of memory."""

    heads: int
    groups: int
    width: int
    length: int

    def layer_and_input(self) -> tuple[NSAttention, Tensor, TokenContext]:
        dim = self.heads * self.width
        with META:
            layer = NSAttention(dim, self.heads, self.groups, dtype=torch.float16)
            x = torch.empty(1, self.length, dim, dtype=torch.float16, requires_grad=True)
            return layer, x, TokenContext(rotary_cos_sin(rotary_frequencies(self.width, device=META), self.length))

    @property
    def output_bytes(self) -> int:
        return 2 * self.length * self.heads * self.width

    @property
    def dense_bytes(self) -> int:
        """What scaled_dot_product_attention saves: queries, keys, values, output and log-sum-exp."""
        return self.output_bytes * (2 * self.heads + 2 * self.groups) // self.heads + 4 * self.heads * self.length


BENCHMARK = Shape(64, 4, 128, 65536)


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device_reason", lambda *_: None)


@pytest.mark.usefixtures("any_device")
def test_the_operator_saves_at_most_three_outputs_more_than_a_dense_one() -> None:
    layer, x, context = BENCHMARK.layer_and_input()
    q, branches = layer._rotate(*layer.project(x), context)
    pairs = [tuple(tensor.detach().requires_grad_() for tensor in pair) for pair in branches.values()]
    leaves, gates = q.detach().requires_grad_(), layer.gates(x).detach().requires_grad_()
    arguments = (leaves, pairs, gates, Selection.of(layer.config))
    saved = saved_bytes(lambda: gated_attention(*arguments, window=layer.config.window)[0], layer)
    more = (saved - BENCHMARK.dense_bytes) / BENCHMARK.output_bytes
    assert 2 < more <= 3


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    "shape",
    [
        BENCHMARK,
        Shape(32, 8, 128, 65536),
        Shape(12, 2, 64, 8192),
        Shape(12, 3, 64, 8192),
        Shape(16, 8, 128, 8192),
        Shape(8, 8, 128, 8192),
        Shape(32, 32, 64, 8192),
    ],
    ids=lambda shape: f"{shape.heads} heads of width {shape.width} in {shape.groups} groups",
)
def test_a_layer_saves_at_most_three_outputs_more_than_a_dense_layer(shape: Shape) -> None:
    layer, x, context = shape.layer_and_input()
    # Its input and the rotary cosines and sines; the output projection reads what attention saves.
    dense_layer = shape.dense_bytes + shape.output_bytes + 2 * shape.length * shape.width
    more = (saved_bytes(lambda: layer(x, context=context), layer) - dense_layer) / shape.output_bytes
    assert 2 < more <= 3


def test_a_dense_layer_saves_as_much_as_is_assumed() -> None:
    """On a CPU, where scaled_dot_product_attention runs, and copies its output for the output projection."""
    heads, groups, width, length = 8, 2, 64, 256
    config = NSAttention(heads * width, heads, groups).config
    layer, x = VanillaAttention(config), torch.randn(1, length, heads * width, requires_grad=True)
    context = TokenContext(rotary_cos_sin(rotary_frequencies(width), length))
    shape = Shape(heads, groups, width, length)
    copied, rotary, float32 = 2 * shape.output_bytes, context.cos_sin.nbytes, 4 * heads * length
    dense_layer = 2 * (shape.dense_bytes - float32 + shape.output_bytes) + float32
    assert saved_bytes(lambda: layer(x, context=context), layer) == dense_layer + copied + rotary


@pytest.mark.parametrize("groups", [2, 1], ids=["1 head per group", "2 heads per group"])
@pytest.mark.parametrize("changes", [False, True], ids=["as it is", "changed by hooks"])
def test_gradients_do_not_depend_on_what_is_computed_again(
    small: NSAConfig, groups: int, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = NSAttention.from_config(replace(small, groups=groups), Implementation.TRITON).double()
    x = tokens(layer.config)
    before = step(layer, x)
    if changes:
        for name in ("cmp.k_proj", "cmp.v_proj", "win.k_proj", "win.v_proj", "out_proj"):
            layer.get_submodule(name).register_forward_hook(lambda _, __, output: 1.5 * output)
        layer.out_proj.register_forward_pre_hook(lambda _, arguments: (arguments[0].mul_(2), *arguments[1:]))
        layer.cmp.v_blocks.register_forward_pre_hook(lambda _, arguments: (arguments[0].mul(2), *arguments[1:]))
    again = step(layer, x)
    for module in (attention_module, branches, compression):
        monkeypatch.setattr(module, "origin_of", lambda *_: None)
    monkeypatch.setattr(layer.win, "sources", lambda *_: [])
    for ours, theirs in zip(again, step(layer, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert changes != torch.allclose(again[0], before[0])
