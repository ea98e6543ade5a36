"""What the kernels share on the device: rows of a tile, masked loads and stores, and the exponentials of a softmax.

Half types take powers of two with log2(e) folded into the scale, one multiplication an element. For float32 and float64
that multiplication costs accuracy where logits are large, so there (`EXACT`) everything stays in base e.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(p_rows, s_row, o_row, m_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows `o_row` of a matrix whose last dimension is dense; zeros where there is nothing."""
    o_column = tl.arange(0, PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, PADDED]


@triton.jit
def store_rows(p_rows, s_row, o_row, m_row, b_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    o_column = tl.arange(0, PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_column < WIDTH)[None, :])


@triton.jit
def load_heads(p_rows, o_row, m_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows that begin at the offsets `o_row`, int64: one of a token and a head each."""
    o_column = tl.arange(0, PADDED)
    p_tile = p_rows + o_row[:, None] + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, PADDED]


@triton.jit
def store_heads(p_rows, o_row, m_row, b_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    o_column = tl.arange(0, PADDED)
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
    b_safe = tl.where(b_total == 0.0, 1.0, b_total)
    if EXACT:
        b_log = b_highest + tl.log(b_safe)
    else:
        b_log = (b_highest + tl.log2(b_safe)) * _LN_2
    return tl.where(b_total == 0.0, float("-inf"), b_log)


@triton.jit
def as_exponent(b_lse, EXACT: tl.constexpr):
    """A natural logarithm in the base that `power` takes."""
    if EXACT:
        b_exponent = b_lse
    else:
        b_exponent = b_lse / _LN_2
    return b_exponent
