"""Linear layers that compute their input again in the backward pass: equal to those of torch, and saving less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nsa_attention.attention import NSAttention
from nsa_attention.config import LayerConfig, NSAConfig
from nsa_attention.ops.recompute import RecomputingLinear, call_linear, linear, origin_of


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
    return list(torch.autograd.grad(output, inputs, weights))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_output_and_gradients_are_those_of_torch_bit_for_bit(half: bool) -> None:
    x, first, second, bias = inputs = leaves((2, 5, 8), (3, 8), (4, 8), (7,))
    autocast: AbstractContextManager[object] = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with autocast:
        hidden = functional.silu(x)
        ours = linear(hidden, [first, second], bias, origin_of(hidden, functional.silu, x))
        theirs = functional.linear(functional.silu(x), torch.cat((first, second)), bias)
    assert ours.dtype is theirs.dtype is (torch.bfloat16 if half else torch.float32)
    assert torch.equal(ours, theirs)
    for our, their, leaf in zip(gradients(ours, inputs), gradients(theirs, inputs), inputs, strict=True):
        assert our.dtype is leaf.dtype
        assert torch.equal(our, their)


def test_its_input_is_not_saved_and_neither_are_joined_weights() -> None:
    x, first, second = leaves((5, 8), (3, 8), (4, 8))
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = functional.silu(x)
        linear(hidden, [first, second], None, origin_of(hidden, functional.silu, x))
    assert set(saved) == {tensor.data_ptr() for tensor in (x, first, second)}


def test_goes_through_checkpointing() -> None:
    inputs = x, first, second = leaves((5, 8), (3, 8), (4, 8))

    def run(x: Tensor) -> Tensor:
        hidden = functional.silu(x)
        return linear(hidden, [first, second], None, origin_of(hidden, functional.silu, x))

    checkpointed = checkpoint(run, x, use_reentrant=False)
    for ours, theirs in zip(gradients(checkpointed, inputs), gradients(run(x), inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = leaves((5, 8), (3, 8))
    weight.requires_grad_(requires_grad=False)
    assert torch.equal(*(gradients(f(x, w), [x])[0] for f, w in ((linear, [weight]), (functional.linear, weight))))
    x.requires_grad_(requires_grad=False)
    assert not linear(x, [weight]).requires_grad


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.mul_(2)], ids=["another tensor", "in place"])
def test_a_changed_input_has_no_origin(change: Callable[[Tensor], Tensor]) -> None:
    inputs = x, weight = leaves((5, 8), (3, 8))
    hidden = functional.silu(x)
    origin = origin_of(hidden, functional.silu, x)
    ours = gradients(linear(change(hidden), [weight], None, origin), inputs)
    theirs = gradients(functional.linear(2 * functional.silu(x), weight), inputs)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def test_a_layer_takes_the_place_of_any_module() -> None:
    (x,) = leaves((5, 8))
    module = RecomputingLinear(8, 3)
    replaced = nn.Sequential(module)
    assert torch.equal(call_linear(replaced, x, None), call_linear(module, x, origin_of(x, torch.clone, x)))


@pytest.mark.parametrize("part", ["out_proj", "gate_mlp.hidden", "cmp.k_proj", "cmp.k_blocks.hidden", "win.v_proj"])
def test_a_part_of_a_layer_may_be_replaced(tiny: NSAConfig, part: str) -> None:
    """As adapters for fine-tuning do: the module around the original one changes its output."""
    torch.manual_seed(0)
    config: LayerConfig = replace(tiny, layers=1)
    layer, x = NSAttention.from_config(config).double(), torch.randn(1, 40, config.dim, dtype=torch.float64)

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        @property
        def weight(self) -> Tensor:
            return self.base.weight

        @property
        def out_features(self) -> int:
            return self.base.out_features

        def forward(self, x: Tensor, *others: object) -> Tensor:
            result: Tensor = self.base(x, *others) * self.scale
            return result

    owner, _, name = part.rpartition(".")
    setattr(layer.get_submodule(owner), name, Adapter(layer.get_submodule(part)))
    weights = [parameter for _, parameter in sorted(layer.named_parameters())]

    def loss(*_: Tensor) -> Tensor:
        return layer(x).square().mean()

    for weight, gradient in zip(weights, torch.autograd.grad(loss(), weights), strict=True):
        direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            step = 1e-6 * direction
            after = loss(weight.add_(step))
            before = loss(weight.sub_(2 * step))
            weight.add_(step)
        torch.testing.assert_close((after - before) / 2e-6, (gradient * direction).sum(), rtol=1e-4, atol=1e-9)
