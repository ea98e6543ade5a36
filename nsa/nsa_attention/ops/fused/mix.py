"""The gated sum of the branch outputs (NSA paper, eq. 5) as a Triton kernel.

The sum is written as [B, T, H, E], the order in which the output projection reads it, so no transposing copy is needed.
The backward pass needs no kernel for the sum: those of the branches apply the gates themselves (gates.py).

Dimensions: B batch, H query heads, T tokens, E value width, c branches. Inside a kernel: R rows, one per token and
head; o1 to o3 are the outputs, g the gates, y the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import load_heads, store_heads
from .launch import for_any_length, launch, next_power_of_two, triton_accumulator_dtype, with_strides

# Elements of each branch that one program holds. The kernel is limited by memory bandwidth, so tuning gains nothing.
ELEMENTS = 2048
WARPS = 4


def weighted_sum(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    """Return the sum of the outputs of three branches, weighted by their gates, shape [B, T, H, E].

    This function is not differentiable. Sums are accumulated in float32 (float64 for float64 tensors) and rounded once.
    Gates may have a different dtype, as under autocast.
    """
    result = empty_sum(outputs)
    batch, tokens, heads, width = result.shape
    rows = max(1, ELEMENTS // next_power_of_two(width))
    launch(
        mix_forward,
        batch * -(-tokens * heads // rows),
        *(part for output in outputs for part in with_strides(output)),
        *(gates_cBHT, *gates_cBHT.stride(), result, tokens),
        HEADS=heads,
        E=width,
        E_PADDED=next_power_of_two(width),
        ACC=triton_accumulator_dtype(torch.promote_types(outputs[0].dtype, gates_cBHT.dtype)),
        ROWS=rows,
        warps=WARPS,
    )
    return result


def empty_sum(outputs: Sequence[Tensor]) -> Tensor:
    """Return an uninitialized tensor for the gated sum of the branch outputs, shape [B, T, H, E]."""
    batch, heads, tokens, width = outputs[0].shape
    return outputs[0].new_empty((batch, tokens, heads, width))


@for_any_length
def mix_forward(
    p_o1, s_o1b, s_o1h, s_o1t,
    p_o2, s_o2b, s_o2h, s_o2t,
    p_o3, s_o3b, s_o3h, s_o3t,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_y,
    tokens,
    HEADS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gated sum of the branch outputs. Each program writes ROWS rows."""
    row_tiles = tl.cdiv(tokens * HEADS, ROWS)
    i_b = (tl.program_id(0) // row_tiles).to(tl.int64)
    o_row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)  # [R]
    o_head, o_token, m_row = (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64), o_row < tokens * HEADS
    p_gate = p_g + i_b * s_gb + o_head * s_gh + o_token * s_gt  # [R]
    b_y = _term(p_o1, i_b * s_o1b + o_head * s_o1h + o_token * s_o1t, p_gate, m_row, E, E_PADDED, ACC)  # [R, E]
    p_gate += s_gc
    b_y += _term(p_o2, i_b * s_o2b + o_head * s_o2h + o_token * s_o2t, p_gate, m_row, E, E_PADDED, ACC)
    p_gate += s_gc
    b_y += _term(p_o3, i_b * s_o3b + o_head * s_o3h + o_token * s_o3t, p_gate, m_row, E, E_PADDED, ACC)
    store_heads(p_y, (i_b * tokens * HEADS + o_row) * E, m_row, b_y, E, E_PADDED)


@triton.jit
def _term(p_o, o_row, p_gate, m_row, E: tl.constexpr, E_PADDED: tl.constexpr, ACC: tl.constexpr):
    """Return one branch's output multiplied by its gate, shape [R, E]."""
    b_gate = tl.load(p_gate, mask=m_row, other=0.0).to(ACC)  # [R]
    return load_heads(p_o, o_row, m_row, E, E_PADDED).to(ACC) * b_gate[:, None]  # [R, E]
