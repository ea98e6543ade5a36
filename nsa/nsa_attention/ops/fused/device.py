"""What the kernels share on the device: masked loads and stores, and the base of their exponents (steps: steps.py).

Half types take powers of two with log2(e) folded into the scale, one multiplication an element. For float32 and float64
that multiplication costs accuracy where logits are large, so there (`EXACT`) everything stays in base e.

All kernels speak one dialect. `i_` is an index of the program, `p_` a pointer, `s_kb` the stride of `p_k` along B, `b_`
a tile, `o_` offsets, `m_` a mask; `do` is the gradient of `o`. Arguments come in this order: tensors with their
strides, dense tensors, sizes (of dimensions, then of what they are cut into), the constants of launch.constants
in its order, lengths, and the sizes of the tile. A constant that is padded to a power of two ends in _PADDED.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(p_rows, s_row, o_row, m_row, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Rows `o_row` of a matrix whose last dimension is dense; zeros where there is nothing."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, WIDTH_PADDED]


@triton.jit
def store_rows(p_rows, s_row, o_row, m_row, b_rows, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_column < WIDTH)[None, :])


@triton.jit
def load_heads(p_rows, o_row, m_row, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Rows that begin at the offsets `o_row`, int64: one of a token and a head each."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row[:, None] + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, WIDTH_PADDED]


@triton.jit
def store_heads(p_rows, o_row, m_row, b_rows, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row[:, None] + o_column[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_column < WIDTH)[None, :])


@triton.jit
def power(b_exponent, EXACT: tl.constexpr):
    if EXACT:
        b_power = tl.exp(b_exponent)
    else:
        b_power = tl.exp2(b_exponent)
    return b_power


@triton.jit
def log_sum(b_highest, b_total, EXACT: tl.constexpr):
    """Natural logarithm of a sum of powers, from its highest exponent; minus infinity for an empty sum."""
    # Of an empty sum the highest exponent is minus infinity, and so is what comes out.
    b_safe = tl.where(b_total == 0.0, 1.0, b_total)
    if EXACT:
        b_log = b_highest + tl.log(b_safe)
    else:
        b_log = (b_highest + tl.log2(b_safe)) * _LN_2
    return b_log


@triton.jit
def as_exponent(b_lse, EXACT: tl.constexpr):
    """A natural logarithm in the base that `power` takes."""
    if EXACT:
        b_exponent = b_lse
    else:
        b_exponent = b_lse / _LN_2
    return b_exponent
