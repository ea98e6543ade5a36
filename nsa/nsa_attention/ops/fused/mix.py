"""The gated sum of the branch outputs (NSA paper, eq. 5) as Triton kernels.

The sum is written as [B, T, H, E], the order in which the output projection reads it, so no transposing copy is needed.

Dimensions: B batch, H query heads, T tokens, E value width, c branches. Inside a kernel: R rows, one per token and
head; o1 to o3 are the outputs, g the gates, y the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import NAMESPACE
from .device import load_heads, store_heads
from .launch import (
    CannotLaunchError,
    check_dtypes,
    for_any_length,
    launch,
    next_power_of_two,
    triton_accumulator_dtype,
    with_strides,
)

MAX_BRANCHES = 3
# Elements of each branch that one program holds. The kernels are limited by memory bandwidth, so tuning gains nothing.
ELEMENTS = 2048
WARPS = 4


def mix_branches(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    """Return the sum of at most three branch outputs, weighted by their gates, shape [B, T, H, E].

    Sums are accumulated in float32 (float64 for float64 tensors) and rounded once. Gates may have a different dtype, as
    under autocast. Raises CannotLaunchError for a wrong number of gates and for dtypes that the kernel does not
    support.
    """
    if not 1 <= len(outputs) <= MAX_BRANCHES or len(outputs) != gates_cBHT.shape[0]:
        raise CannotLaunchError(
            f"outputs: {len(outputs)} branches with {gates_cBHT.shape[0]} gates: expected as many gates as branches, "
            f"and 1 to {MAX_BRANCHES} of them"
        )
    check_dtypes(mix_forward, *outputs)
    check_dtypes(mix_forward, gates_cBHT)
    return _mix(list(outputs), gates_cBHT)


@torch.library.custom_op(f"{NAMESPACE}::mix", mutates_args=())
def _mix(outputs: list[Tensor], gates_cBHT: Tensor) -> Tensor:
    return weighted_sum(outputs, gates_cBHT)


def weighted_sum(outputs: list[Tensor], gates_cBHT: Tensor) -> Tensor:
    """Return the result of `mix_branches`. Not differentiable."""
    result = empty_sum(outputs)
    programs, constants = _plan(outputs, gates_cBHT)
    launch(
        mix_forward,
        programs,
        *(*_for_three(outputs), gates_cBHT, *gates_cBHT.stride(), result),
        result.shape[1],
        **constants,
        warps=WARPS,
    )
    return result


@torch.library.custom_op(f"{NAMESPACE}::mix_backward", mutates_args=())
def _mix_backward(grad_BTHE: Tensor, outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    grads, grad_gates = _like_the_inputs(outputs, gates_cBHT)
    programs, constants = _plan(outputs, gates_cBHT)
    launch(
        mix_backward,
        programs,
        *(*_for_three(outputs), gates_cBHT, *gates_cBHT.stride(), *with_strides(grad_BTHE)),
        *(*(grads * MAX_BRANCHES)[:MAX_BRANCHES], grad_gates),
        *grad_BTHE.shape[:2],
        **constants,
        warps=WARPS,
    )
    return grads, grad_gates


@_mix.register_fake
def _(outputs: list[Tensor], _gates: Tensor) -> Tensor:
    return empty_sum(outputs)


@_mix_backward.register_fake
def _(_grad: Tensor, outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    return _like_the_inputs(outputs, gates_cBHT)


def _save_context(ctx: Any, inputs: tuple[list[Tensor], Tensor], output: Tensor) -> None:  # noqa: ARG001, torch calls by name
    outputs, gates_cBHT = inputs
    ctx.save_for_backward(*outputs, gates_cBHT)


def _backward(ctx: Any, grad_BTHE: Tensor) -> tuple[list[Tensor], Tensor]:
    *outputs, gates_cBHT = ctx.saved_tensors
    return _mix_backward(grad_BTHE, outputs, gates_cBHT)


_mix.register_autograd(_backward, setup_context=_save_context)


def empty_sum(outputs: list[Tensor]) -> Tensor:
    """Return an uninitialized tensor for the gated sum of the branch outputs, shape [B, T, H, E]."""
    batch, heads, tokens, width = outputs[0].shape
    return outputs[0].new_empty((batch, tokens, heads, width))


def _like_the_inputs(outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return uninitialized tensors for the gradients of the branch outputs and gates."""
    # In the gradients of outputs, the heads of a token are adjacent in memory, because their readers load one token at
    # a time.
    grads = [empty_sum(outputs).transpose(1, 2) for _ in outputs]
    return grads, gates_cBHT.new_empty(gates_cBHT.shape)


def _plan(outputs: list[Tensor], gates_cBHT: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the number of programs and the compile-time constants for the forward and backward kernels."""
    batch, heads, tokens, width = outputs[0].shape
    rows = max(1, ELEMENTS // next_power_of_two(width))
    programs = batch * -(-tokens * heads // rows)
    return programs, {
        "HEADS": heads,
        "E": width,
        "E_PADDED": next_power_of_two(width),
        "ACC": triton_accumulator_dtype(torch.promote_types(outputs[0].dtype, gates_cBHT.dtype)),
        "BRANCHES": len(outputs),
        "ROWS": rows,
    }


def _for_three(outputs: list[Tensor]) -> list[Any]:
    """Return the outputs and their strides as kernel arguments, with placeholders for missing branches."""
    return [part for output in (outputs * MAX_BRANCHES)[:MAX_BRANCHES] for part in with_strides(output)]


@for_any_length
def mix_forward(
    p_o1, s_o1b, s_o1h, s_o1t,
    p_o2, s_o2b, s_o2h, s_o2t,
    p_o3, s_o3b, s_o3h, s_o3t,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_y,
    tokens,
    HEADS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, BRANCHES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gated sum of the branch outputs. Each program writes ROWS rows."""
    i_b, o_row, o_head, o_token, m_row = _rows(tokens, HEADS, ROWS)
    p_gate = p_g + i_b * s_gb + o_head * s_gh + o_token * s_gt  # [R]
    b_y = _term(p_o1, i_b * s_o1b + o_head * s_o1h + o_token * s_o1t, p_gate, m_row, E, E_PADDED, ACC)  # [R, E]
    if BRANCHES > 1:
        p_gate += s_gc
        b_y += _term(p_o2, i_b * s_o2b + o_head * s_o2h + o_token * s_o2t, p_gate, m_row, E, E_PADDED, ACC)
    if BRANCHES > 2:
        p_gate += s_gc
        b_y += _term(p_o3, i_b * s_o3b + o_head * s_o3h + o_token * s_o3t, p_gate, m_row, E, E_PADDED, ACC)
    store_heads(p_y, (i_b * tokens * HEADS + o_row) * E, m_row, b_y, E, E_PADDED)


@triton.jit
def _term(p_o, o_row, p_gate, m_row, E: tl.constexpr, E_PADDED: tl.constexpr, ACC: tl.constexpr):
    """Return one branch's output multiplied by its gate, shape [R, E]."""
    b_gate = tl.load(p_gate, mask=m_row, other=0.0).to(ACC)  # [R]
    return load_heads(p_o, o_row, m_row, E, E_PADDED).to(ACC) * b_gate[:, None]  # [R, E]


@for_any_length
def mix_backward(
    p_o1, s_o1b, s_o1h, s_o1t,
    p_o2, s_o2b, s_o2h, s_o2t,
    p_o3, s_o3b, s_o3h, s_o3t,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_dy, s_dyb, s_dyt, s_dyh,
    p_do1, p_do2, p_do3, p_dg,
    batch, tokens,
    HEADS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, BRANCHES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the branch outputs and gates. Each program writes ROWS rows."""
    i_b, o_row, o_head, o_token, m_row = _rows(tokens, HEADS, ROWS)
    b_dy = load_heads(p_dy, i_b * s_dyb + o_head * s_dyh + o_token * s_dyt, m_row, E, E_PADDED).to(ACC)  # [R, E]
    p_gate = p_g + i_b * s_gb + o_head * s_gh + o_token * s_gt  # [R]
    # Gradients of outputs have the memory layout of the sum, those of gates are contiguous per branch.
    o_out = i_b * tokens * HEADS + o_row  # [R]
    p_dgate = p_dg + (i_b * HEADS + o_head) * tokens + o_token  # [R]
    branch_rows = tl.cast(batch, tl.int64) * HEADS * tokens
    o_in = i_b * s_o1b + o_head * s_o1h + o_token * s_o1t  # [R]
    _term_gradients(b_dy, p_o1, o_in, p_gate, p_do1, o_out, p_dgate, m_row, E, E_PADDED)
    if BRANCHES > 1:
        o_in = i_b * s_o2b + o_head * s_o2h + o_token * s_o2t
        p_gate += s_gc
        p_dgate += branch_rows
        _term_gradients(b_dy, p_o2, o_in, p_gate, p_do2, o_out, p_dgate, m_row, E, E_PADDED)
    if BRANCHES > 2:
        o_in = i_b * s_o3b + o_head * s_o3h + o_token * s_o3t
        p_gate += s_gc
        p_dgate += branch_rows
        _term_gradients(b_dy, p_o3, o_in, p_gate, p_do3, o_out, p_dgate, m_row, E, E_PADDED)


@triton.jit
def _term_gradients(
    b_dy, p_o, o_in, p_gate, p_do, o_out, p_dgate, m_row, E: tl.constexpr, E_PADDED: tl.constexpr
):  # fmt: skip
    """Write the gradients of one branch's output and gate."""
    b_gate = tl.load(p_gate, mask=m_row, other=0.0).to(b_dy.dtype)  # [R]
    store_heads(p_do, o_out * E, m_row, b_dy * b_gate[:, None], E, E_PADDED)
    b_o = load_heads(p_o, o_in, m_row, E, E_PADDED).to(b_dy.dtype)  # [R, E]
    tl.store(p_dgate, tl.sum(b_dy * b_o, 1).to(p_dgate.dtype.element_ty), mask=m_row)


@triton.jit
def _rows(tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the batch index, rows, heads, tokens and mask of the current program."""
    row_tiles = tl.cdiv(tokens * HEADS, ROWS)
    i_b = (tl.program_id(0) // row_tiles).to(tl.int64)
    o_row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)  # [R]
    return i_b, o_row, (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64), o_row < tokens * HEADS
