"""Outputs times gates by tiles: what products of whole tensors give, and their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_attention.ops import mixing


def leaves(branches: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs = [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(branches)]
    return outputs, torch.rand(branches, *shape[:3], dtype=dtype, requires_grad=True)


@given(st.integers(1, 3), *(st.integers(1, 3),) * 2, st.integers(1, 40), st.integers(1, 6), st.integers(1, 200))
def test_of_any_shape_in_tiles_of_any_size_it_is_the_sum_with_its_gradients(
    branches: int, batch: int, heads: int, tokens: int, width: int, elements: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "TILE_ELEMENTS", elements)
        outputs, gates = leaves(branches, batch, heads, tokens, width)
        ours = mixing.mix_by_tiles(outputs, gates)
        theirs = sum(gate.unsqueeze(-1) * output for gate, output in zip(gates, outputs, strict=True)).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        upstream = torch.randn_like(ours)
        both = (torch.autograd.grad(mixed, [*outputs, gates], upstream) for mixed in (ours, theirs))
        for our, their in zip(*both, strict=True):
            torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


def test_torch_finds_the_operators_sound() -> None:
    outputs, gates = leaves(3, 2, 2, 9, 4)
    torch.library.opcheck(mixing._mix, (outputs, gates))
    saved = ([output.detach() for output in outputs], gates.detach())
    torch.library.opcheck(mixing._mix_backward, (torch.randn(2, 9, 2, 4, dtype=torch.float64), *saved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_of_a_wider_dtype_give_the_dtype_that_a_product_has(dtype: torch.dtype) -> None:
    outputs, gates = leaves(3, 2, 2, 9, 4, dtype=torch.float32)
    narrow = [output.detach().to(dtype).requires_grad_() for output in outputs]
    ours = mixing.mix_by_tiles(narrow, gates)
    theirs = sum(gate.unsqueeze(-1) * output for gate, output in zip(gates, narrow, strict=True)).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    both = (torch.autograd.grad(mixed.square().sum(), [*narrow, gates]) for mixed in (ours, theirs))
    for our, their in zip(*both, strict=True):
        torch.testing.assert_close(our, their)


def test_frozen_gates_leave_the_outputs_their_gradients() -> None:
    outputs, gates = leaves(2, 1, 2, 9, 4)
    mixing.mix_by_tiles(outputs, gates.detach()).sum().backward()
    assert gates.grad is None
    for output, gate in zip(outputs, gates, strict=True):
        torch.testing.assert_close(output.grad, gate.detach().unsqueeze(-1).expand_as(output))
