"""Device functions that all kernels share.

For half-precision dtypes, kernels compute powers of two with log2(e) folded into the scale, which saves a
multiplication per element. For float32 and float64 (`EXACT`) this would cost accuracy for large logits, so base e is
used.

Naming in all kernels: `i_` is a program index, `p_` a pointer, `s_kb` the stride of `p_k` along B, `b_` a tile, `o_`
offsets, `m_` a mask, and `do` the gradient of `o`. Arguments have this order: tensors with their strides, dense
tensors, sizes (first of dimensions, then numbers of tiles and parts), the constants of launch.kernel_constants in its
order, lengths, and tile sizes. A constant that is padded to a power of two ends in _PADDED.

Dimensions: R rows of a tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(p_rows, s_row, o_row, m_row, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Load the rows `o_row` of a matrix. Masked elements are 0."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, WIDTH_PADDED]


@triton.jit
def store_rows(p_rows, s_row, o_row, m_row, b_rows, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Store a tile to the rows `o_row` of a matrix."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row.to(tl.int64)[:, None] * s_row + o_column[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_column < WIDTH)[None, :])


@triton.jit
def load_heads(p_rows, o_row, m_row, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Load one row per token and head, each from its own offset in `o_row`."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row[:, None] + o_column[None, :]
    return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)  # [R, WIDTH_PADDED]


@triton.jit
def store_heads(p_rows, o_row, m_row, b_rows, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Store one row per token and head, each to its own offset in `o_row`."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + o_row[:, None] + o_column[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_column < WIDTH)[None, :])


@triton.jit
def power(b_exponent, EXACT: tl.constexpr):
    """Return e^x if EXACT, otherwise 2^x."""
    if EXACT:
        b_power = tl.exp(b_exponent)
    else:
        b_power = tl.exp2(b_exponent)
    return b_power


@triton.jit
def log_sum(b_highest, b_total, EXACT: tl.constexpr):
    """Return the natural log of a sum of exponentials, given its highest exponent and its scaled total.

    `b_total` is the sum relative to the power of the highest exponent. The result is -inf for an empty sum.
    """
    # For an empty sum the highest exponent is -inf, and so is the result.
    b_safe = tl.where(b_total == 0.0, 1.0, b_total)
    if EXACT:
        b_log = b_highest + tl.log(b_safe)
    else:
        b_log = (b_highest + tl.log2(b_safe)) * _LN_2
    return b_log


@triton.jit
def as_exponent(b_lse, EXACT: tl.constexpr):
    """Convert a natural logarithm to the base that `power` uses."""
    if EXACT:
        b_exponent = b_lse
    else:
        b_exponent = b_lse / _LN_2
    return b_exponent
