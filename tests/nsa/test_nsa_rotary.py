"""Rotary positions by tiles: what products of whole tensors give, and their gradient."""

from __future__ import annotations

import nsa_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_attention.ops import rotary
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies, rotate
from nsa_attention.projections import split_heads


def expected(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([reference.rotate(row, range(x.shape[2])) for row in x])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.integers(1, 300))
def test_of_any_shape_in_tiles_of_any_size_output_and_gradient_are_the_reference_s(
    batch: int, heads: int, tokens: int, pairs: int, elements: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "TILE_ELEMENTS", elements)
        x = torch.randn(batch, tokens, heads * 2 * pairs, dtype=torch.float64, requires_grad=True)
        angles = reference.angles(range(tokens), 2 * pairs)
        ours = rotate(split_heads(x, heads), torch.stack((angles.cos(), angles.sin())))
        theirs = expected(split_heads(x, heads))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        upstream = torch.randn_like(theirs)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, x, upstream)[0] for y in (ours, theirs)), rtol=0, atol=1e-12
        )


def test_torch_finds_the_operator_sound() -> None:
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    cos_sin = rotary_cos_sin(rotary_frequencies(6), 9).double()
    queries, keys = split_heads(x, 2), split_heads(x[..., :6], 1)
    torch.library.opcheck(rotary._rotate, ([queries, keys], [cos_sin] * 2, 1.0, [False, False], "tiles"))
    torch.library.opcheck(rotary._rotate, ([queries, keys], [cos_sin] * 2, -1.0, [True, True], "tiles"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_tensors_take_the_tiles_and_are_as_near_to_float64_as_products_of_whole_tensors(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 2, 700, 64).to(dtype)
    assert rotary.is_eager_on_cpu(x)
    cos_sin = rotary_cos_sin(rotary_frequencies(64), 700)
    ours = rotate(x, cos_sin)
    monkeypatch.setattr(rotary, "is_eager_on_cpu", lambda _: False)
    whole, truth = rotate(x, cos_sin), expected(x.double())
    ours_off, whole_off = (float((each.double() - truth).abs().max()) for each in (ours, whole))
    assert ours.dtype is dtype
    assert ours_off <= 2 * whole_off
