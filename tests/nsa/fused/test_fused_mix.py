"""The fused sum of the branches is the plain one: values, every gradient, and what torch asks of an operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_attention.ops.fused import mix as fused
from nsa_attention.ops.fused.launch import CannotLaunchError, launches
from nsa_attention.ops.fused.mix import mix_branches

TOLERANCE = 1e-10
# Branches, batch, heads, tokens, width.
CASES = [(1, 1, 1, 1, 1), (2, 2, 3, 33, 5), (3, 2, 5, 17, 20), (3, 1, 2, 50, 130)]


def leaves(branches: int, batch: int, heads: int, tokens: int, width: int) -> tuple[list[Tensor], Tensor]:
    """Outputs, and gates in the layout of the layer's gate, [branches, B, H, T] seen through [B, T, branches, H]."""
    outputs = [
        torch.randn(batch, heads, tokens, width, dtype=torch.float64, requires_grad=True) for _ in range(branches)
    ]
    return outputs, torch.rand(batch, tokens, branches, heads, dtype=torch.float64, requires_grad=True)


def seen(gates_BTcH: Tensor) -> Tensor:
    return gates_BTcH.permute(2, 0, 3, 1)


def plain(outputs: list[Tensor], gates_cBHT: Tensor) -> Tensor:
    terms = [gate.unsqueeze(-1).to(output.dtype) * output for gate, output in zip(gates_cBHT, outputs, strict=True)]
    return torch.stack(terms).sum(0).transpose(1, 2)


def with_gradients(operation, outputs: list[Tensor], gates: Tensor, upstream: Tensor) -> list[Tensor]:
    result = operation(outputs, seen(gates))
    return [result, *torch.autograd.grad(result, (*outputs, gates), upstream.to(result.dtype))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_and_its_gradients_are_the_plain_ones(case: tuple[int, ...]) -> None:
    outputs, gates = leaves(*case)
    upstream = torch.randn_like(plain(outputs, seen(gates)))
    before = launches.copy()
    ours = with_gradients(mix_branches, outputs, gates, upstream)
    assert launches["mix_forward"] == before["mix_forward"] + 1
    assert launches["mix_backward"] == before["mix_backward"] + 1
    assert ours[0].is_contiguous()
    for our, their in zip(ours, with_gradients(plain, outputs, gates, upstream), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16], ids=str)
def test_errors_are_at_most_twice_those_of_plain_torch(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    outputs, gates = leaves(3, 2, 3, 33, 20)
    outputs = [output.detach().to(dtype).requires_grad_() for output in outputs]
    gates = gates.detach().to(gate_dtype).requires_grad_()
    upstream = torch.randn_like(plain(outputs, seen(gates)))
    exact_inputs = [output.detach().double().requires_grad_() for output in outputs]
    exact = with_gradients(plain, exact_inputs, gates.detach().double().requires_grad_(), upstream)
    ours = with_gradients(mix_branches, outputs, gates, upstream)
    theirs = with_gradients(plain, outputs, gates, upstream)
    assert [tensor.dtype for tensor in ours] == [dtype] * 4 + [gate_dtype]
    for our, their, right in zip(ours, theirs, exact, strict=True):
        assert (our.double() - right).abs().max() <= 2 * (their.double() - right).abs().max()


def test_gradients_of_outputs_have_the_heads_of_a_token_side_by_side() -> None:
    outputs, gates = leaves(3, 2, 3, 9, 4)
    upstream = torch.randn_like(plain(outputs, seen(gates)))
    of_outputs, _ = fused._mix_backward(upstream, [output.detach() for output in outputs], seen(gates).detach())
    assert all(gradient.transpose(1, 2).is_contiguous() for gradient in of_outputs)


def test_layouts_that_are_not_contiguous_are_read_as_they_are() -> None:
    outputs, gates = leaves(3, 2, 3, 9, 4)
    upstream = torch.randn(9, 2, 4, 3, dtype=torch.float64).permute(1, 0, 3, 2)
    turned = [outputs[0].mT.contiguous().mT, outputs[1].transpose(1, 2).contiguous().transpose(1, 2), outputs[2]]
    wide = torch.cat((outputs[2], outputs[2]), -1)
    turned[2] = wide[..., :4]

    def of_turned(_: list[Tensor], gates_cBHT: Tensor) -> Tensor:
        return mix_branches(turned, gates_cBHT)

    ours = with_gradients(of_turned, outputs, gates, upstream)
    for our, their in zip(ours, with_gradients(plain, outputs, gates, upstream), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


def test_the_sum_is_the_same_in_every_run() -> None:
    outputs, gates = leaves(3, 2, 3, 33, 20)
    upstream = torch.randn_like(plain(outputs, seen(gates)))
    runs = [with_gradients(mix_branches, outputs, gates, upstream) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_no_tokens_are_no_launch() -> None:
    outputs, gates = leaves(2, 1, 3, 0, 4)
    before = launches.copy()
    assert mix_branches(outputs, seen(gates)).shape == (1, 0, 3, 4)
    assert launches == before


def test_frozen_gates_get_no_gradient() -> None:
    outputs, gates = leaves(2, 1, 2, 5, 3)
    result = mix_branches(outputs, seen(gates).detach())
    upstream = torch.randn_like(result)
    theirs = torch.autograd.grad(plain(outputs, seen(gates)), outputs, upstream)
    for our, their in zip(torch.autograd.grad(result, outputs, upstream), theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


def test_gradcheck() -> None:
    outputs, gates = leaves(3, 1, 2, 3, 2)

    def operation(gates: Tensor, *outputs: Tensor) -> Tensor:
        return mix_branches(outputs, seen(gates))

    assert torch.autograd.gradcheck(operation, (gates, *outputs))


def test_the_operators_keep_their_promises_to_torch() -> None:
    outputs, gates = leaves(3, 2, 3, 7, 4)
    torch.library.opcheck(fused._mix, (outputs, seen(gates)))
    grad = torch.randn_like(plain(outputs, seen(gates)))
    torch.library.opcheck(fused._mix_backward, (grad, [output.detach() for output in outputs], seen(gates).detach()))


def test_what_cannot_be_mixed_is_refused_by_name() -> None:
    outputs, gates = leaves(2, 1, 2, 5, 3)
    with pytest.raises(CannotLaunchError, match="2 branches with 1 gates"):
        mix_branches(outputs, seen(gates)[:1])
    with pytest.raises(CannotLaunchError, match="cast them to one"):
        mix_branches([outputs[0], outputs[1].float()], seen(gates))
