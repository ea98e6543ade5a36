"""The fused sum of the branches is the plain one, in every layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_attention.ops.fused.launch import launches
from nsa_attention.ops.fused.mix import weighted_sum
from nsa_attention.ops.mixing import gated_sum

TOLERANCE = 1e-10
# Batch, heads, tokens, width.
CASES = [(1, 1, 1, 1), (2, 3, 33, 5), (2, 5, 17, 20), (1, 2, 50, 130)]


def inputs(batch: int, heads: int, tokens: int, width: int) -> tuple[list[Tensor], Tensor]:
    """Outputs, and gates in the layout of the layer's gate, [branches, B, H, T] seen through [B, T, branches, H]."""
    outputs = [torch.randn(batch, heads, tokens, width, dtype=torch.float64) for _ in range(3)]
    return outputs, torch.rand(batch, tokens, 3, heads, dtype=torch.float64).permute(2, 0, 3, 1)


def plain(outputs: list[Tensor], gates_cBHT: Tensor) -> Tensor:
    terms = [gate.unsqueeze(-1).to(output.dtype) * output for gate, output in zip(gates_cBHT, outputs, strict=True)]
    return torch.stack(terms).sum(0).transpose(1, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_is_the_plain_one(case: tuple[int, ...]) -> None:
    outputs, gates = inputs(*case)
    before = launches.copy()
    ours = weighted_sum(outputs, gates)
    assert launches["mix_forward"] == before["mix_forward"] + 1
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, plain(outputs, gates), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(gated_sum(outputs, gates), plain(outputs, gates), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16], ids=str)
def test_errors_are_at_most_twice_those_of_plain_torch(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    outputs, gates = inputs(2, 3, 33, 20)
    outputs, gates = [output.to(dtype) for output in outputs], gates.to(gate_dtype)
    exact = plain([output.double() for output in outputs], gates.double())
    ours = weighted_sum(outputs, gates)
    assert ours.dtype is dtype
    assert (ours.double() - exact).abs().max() <= 2 * (plain(outputs, gates).double() - exact).abs().max()


def test_layouts_that_are_not_contiguous_are_read_as_they_are() -> None:
    outputs, gates = inputs(2, 3, 9, 4)
    turned = [outputs[0].mT.contiguous().mT, outputs[1].transpose(1, 2).contiguous().transpose(1, 2)]
    turned.append(torch.cat((outputs[2], outputs[2]), -1)[..., :4])
    torch.testing.assert_close(weighted_sum(turned, gates), plain(outputs, gates), rtol=0, atol=TOLERANCE)


def test_no_tokens_are_no_launch() -> None:
    before = launches.copy()
    assert weighted_sum(*inputs(1, 3, 0, 4)).shape == (1, 0, 3, 4)
    assert launches == before
