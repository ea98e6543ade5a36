"""The branches' outputs times their gates, added up (paper, eq. 5): one kernel forward, one backward.

The sum is written in the order that the output projection reads, [B, T, H, E], so that no copy turns it around.

Dimensions: B batch, H query heads, T tokens, E value width, c branches.
In the kernels: R rows, one of a token and a head each, E columns, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.fused.launch import CannotLaunchError, accumulator, check_dtypes, launch, padded, strided

MOST_BRANCHES = 3
# What a program holds of each branch. Reading is all it does, so that nothing is gained by choosing this.
ELEMENTS = 2048
WARPS = 4


def mixed(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    """The sum over branches of gate * output, [B, T, H, E], contiguous, in the dtype of the outputs [B, H, T, E].

    Sums are kept in float32 (float64 for float64) and rounded once. Gates may be of another dtype, as under autocast.
    Raises CannotLaunchError.
    """
    if not 1 <= len(outputs) <= MOST_BRANCHES or len(outputs) != gates_cBHT.shape[0]:
        raise CannotLaunchError(
            f"outputs: {len(outputs)} branches with {gates_cBHT.shape[0]} gates: expected as many gates as branches, "
            f"and 1 to {MOST_BRANCHES} of them"
        )
    check_dtypes(mix_forward, *outputs)
    check_dtypes(mix_forward, gates_cBHT)
    return _mix(list(outputs), gates_cBHT)


@torch.library.custom_op("nsa::mix", mutates_args=())
def _mix(outputs: list[Tensor], gates_cBHT: Tensor) -> Tensor:
    result = _like_the_sum(outputs)
    programs, constants = _plan(outputs, gates_cBHT)
    launch(
        mix_forward,
        programs,
        *_for_three(outputs),
        gates_cBHT,
        *gates_cBHT.stride(),
        result,
        result.shape[1],
        **constants,
        warps=WARPS,
    )
    return result


@torch.library.custom_op("nsa::mix_backward", mutates_args=())
def _mix_backward(grad_BTHE: Tensor, outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients of the outputs and of the gates, each written by the one program that holds its row."""
    grads, grad_gates = _like_the_inputs(outputs, gates_cBHT)
    programs, constants = _plan(outputs, gates_cBHT)
    first, second, third = (grads * MOST_BRANCHES)[:MOST_BRANCHES]
    launch(
        mix_backward,
        programs,
        *strided(grad_BTHE),
        *_for_three(outputs),
        gates_cBHT,
        *gates_cBHT.stride(),
        first,
        second,
        third,
        grad_gates,
        grad_BTHE.shape[0],
        grad_BTHE.shape[1],
        **constants,
        warps=WARPS,
    )
    return grads, grad_gates


@_mix.register_fake
def _(outputs: list[Tensor], _gates: Tensor) -> Tensor:
    return _like_the_sum(outputs)


@_mix_backward.register_fake
def _(_grad: Tensor, outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    return _like_the_inputs(outputs, gates_cBHT)


def _keep(ctx: Any, inputs: tuple[list[Tensor], Tensor], output: Tensor) -> None:  # noqa: ARG001, torch calls by name
    outputs, gates_cBHT = inputs
    ctx.save_for_backward(*outputs, gates_cBHT)


def _differentiate(ctx: Any, grad_BTHE: Tensor) -> tuple[list[Tensor], Tensor]:
    *outputs, gates_cBHT = ctx.saved_tensors
    return _mix_backward(grad_BTHE, outputs, gates_cBHT)


_mix.register_autograd(_differentiate, setup_context=_keep)


def _like_the_sum(outputs: list[Tensor]) -> Tensor:
    batch, heads, tokens, width = outputs[0].shape
    return outputs[0].new_empty((batch, tokens, heads, width))


def _like_the_inputs(outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    return [output.new_empty(output.shape) for output in outputs], gates_cBHT.new_empty(gates_cBHT.shape)


def _plan(outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[int, dict[str, Any]]:
    """How many programs, and the constants of both kernels."""
    batch, heads, tokens, width = outputs[0].shape
    columns = padded(width)
    rows = max(1, ELEMENTS // columns)
    programs = batch * -(-tokens * heads // rows)
    return programs, {
        "BRANCHES": len(outputs),
        "HEADS": heads,
        "WIDTH": width,
        "ROWS": rows,
        "COLUMNS": columns,
        "ACC": accumulator(torch.promote_types(outputs[0].dtype, gates_cBHT.dtype)),
    }


def _for_three(outputs: list[Tensor]) -> list[Any]:
    """Each output with its strides; a kernel has three of them, of which it reads as many as there are."""
    return [part for output in (outputs * MOST_BRANCHES)[:MOST_BRANCHES] for part in strided(output)]


@triton.jit
def mix_forward(
    first,
    first_batch,
    first_head,
    first_token,
    second,
    second_batch,
    second_head,
    second_token,
    third,
    third_batch,
    third_head,
    third_token,
    gates,
    gate_branch,
    gate_batch,
    gate_head,
    gate_token,
    result,
    tokens,
    BRANCHES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    i_batch, o_row, m_row = _rows(tokens, HEADS, ROWS)
    o_head, o_token = (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64)  # [R]
    o_column = tl.arange(0, COLUMNS)[None, :]  # [1, E]
    m_tile = m_row[:, None] & (o_column < WIDTH)  # [R, E]
    p_gate = gates + i_batch * gate_batch + o_head * gate_head + o_token * gate_token  # [R]
    p_output = first + i_batch * first_batch + o_head * first_head + o_token * first_token  # [R]
    b_sum = _term(p_output, p_gate, o_column, m_row, m_tile, ACC)  # [R, E]
    if BRANCHES > 1:
        p_output = second + i_batch * second_batch + o_head * second_head + o_token * second_token
        p_gate += gate_branch
        b_sum += _term(p_output, p_gate, o_column, m_row, m_tile, ACC)
    if BRANCHES > 2:
        p_output = third + i_batch * third_batch + o_head * third_head + o_token * third_token
        p_gate += gate_branch
        b_sum += _term(p_output, p_gate, o_column, m_row, m_tile, ACC)
    p_result = result + (i_batch * tokens * HEADS + o_row) * WIDTH  # [R]
    tl.store(p_result[:, None] + o_column, b_sum.to(result.dtype.element_ty), mask=m_tile)


@triton.jit
def _term(p_output, p_gate, o_column, m_row, m_tile, ACC: tl.constexpr):
    b_gate = tl.load(p_gate, mask=m_row, other=0.0).to(ACC)  # [R]
    return tl.load(p_output[:, None] + o_column, mask=m_tile, other=0.0).to(ACC) * b_gate[:, None]  # [R, E]


@triton.jit
def mix_backward(
    grad,
    grad_batch,
    grad_token,
    grad_head,
    first,
    first_batch,
    first_head,
    first_token,
    second,
    second_batch,
    second_head,
    second_token,
    third,
    third_batch,
    third_head,
    third_token,
    gates,
    gate_branch,
    gate_batch,
    gate_head,
    gate_token,
    grad_first,
    grad_second,
    grad_third,
    grad_gates,
    batch,
    tokens,
    BRANCHES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    i_batch, o_row, m_row = _rows(tokens, HEADS, ROWS)
    o_head, o_token = (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64)  # [R]
    o_column = tl.arange(0, COLUMNS)[None, :]  # [1, E]
    m_tile = m_row[:, None] & (o_column < WIDTH)  # [R, E]
    p_grad = grad + i_batch * grad_batch + o_head * grad_head + o_token * grad_token  # [R]
    b_grad = tl.load(p_grad[:, None] + o_column, mask=m_tile, other=0.0).to(ACC)  # [R, E]
    p_gate = gates + i_batch * gate_batch + o_head * gate_head + o_token * gate_token  # [R]
    # Gradients are contiguous, those of the gates branch by branch.
    o_out = (i_batch * HEADS + o_head) * tokens + o_token  # [R]
    p_grad_gate = grad_gates + o_out  # [R]
    branch_rows = tl.cast(batch, tl.int64) * HEADS * tokens
    p_output = first + i_batch * first_batch + o_head * first_head + o_token * first_token  # [R]
    p_grad_output = grad_first + o_out * WIDTH  # [R]
    _term_gradients(b_grad, p_output, p_gate, p_grad_output, p_grad_gate, o_column, m_row, m_tile)
    if BRANCHES > 1:
        p_output = second + i_batch * second_batch + o_head * second_head + o_token * second_token
        p_grad_output = grad_second + o_out * WIDTH
        p_gate += gate_branch
        p_grad_gate += branch_rows
        _term_gradients(b_grad, p_output, p_gate, p_grad_output, p_grad_gate, o_column, m_row, m_tile)
    if BRANCHES > 2:
        p_output = third + i_batch * third_batch + o_head * third_head + o_token * third_token
        p_grad_output = grad_third + o_out * WIDTH
        p_gate += gate_branch
        p_grad_gate += branch_rows
        _term_gradients(b_grad, p_output, p_gate, p_grad_output, p_grad_gate, o_column, m_row, m_tile)


@triton.jit
def _term_gradients(b_grad, p_output, p_gate, p_grad_output, p_grad_gate, o_column, m_row, m_tile):
    b_gate = tl.load(p_gate, mask=m_row, other=0.0).to(b_grad.dtype)  # [R]
    b_grad_output = b_grad * b_gate[:, None]  # [R, E]
    tl.store(p_grad_output[:, None] + o_column, b_grad_output.to(p_grad_output.dtype.element_ty), mask=m_tile)
    b_output = tl.load(p_output[:, None] + o_column, mask=m_tile, other=0.0).to(b_grad.dtype)  # [R, E]
    tl.store(p_grad_gate, tl.sum(b_grad * b_output, 1).to(p_grad_gate.dtype.element_ty), mask=m_row)


@triton.jit
def _rows(tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The sequence of this program, its rows within it, in the order of the sum, and which of them exist."""
    row_tiles = tl.cdiv(tokens * HEADS, ROWS)
    i_batch = (tl.program_id(0) // row_tiles).to(tl.int64)
    o_row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)  # [R]
    return i_batch, o_row, o_row < tokens * HEADS
