"""What the kernels share on the device: masked loads and stores, and the steps of a softmax and of its gradients.

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


@triton.jit
def forward_step(
    b_q, b_k, b_v, m_seen, b_highest, b_total, b_o, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr
):
    """A tile of keys into the running maximum and sum of each row [R], and into its output [R, E]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC) * EXPONENT  # [R, K]
    b_s = tl.where(m_seen, b_s, float("-inf"))
    b_higher = tl.maximum(b_highest, tl.max(b_s, 1))
    # Rows that have seen nothing yet would compute -inf - -inf.
    b_shift = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_p = power(b_s - b_shift[:, None], EXACT)  # [R, K]
    b_shrink = power(b_highest - b_shift, EXACT)
    b_total = b_total * b_shrink + tl.sum(b_p, 1)
    b_o = b_o * b_shrink[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee", out_dtype=ACC)
    return b_higher, b_total, b_o


@triton.jit
def query_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds to the gradient of the queries [R, D]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC) * EXPONENT  # [R, K]
    # A blind row has a log-sum-exp of -inf and sees nothing: the mask comes before the exponential.
    b_p = power(tl.where(m_seen, b_s - b_lse[:, None], float("-inf")), EXACT)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee", out_dtype=ACC)  # [R, K]
    b_ds = b_p * (b_dp - b_delta[:, None]) * SCALE
    return tl.dot(b_ds.to(b_k.dtype), b_k, input_precision="ieee", out_dtype=ACC)


@triton.jit
def key_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of rows into the gradients of keys [K, D] and values [K, E]; `m_seen` is [K, R]."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee", out_dtype=ACC) * EXPONENT  # [K, R]
    b_p = power(tl.where(m_seen, b_s - b_lse[None, :], float("-inf")), EXACT)  # [K, R]
    b_dv += tl.dot(b_p.to(b_do.dtype), b_do, input_precision="ieee", out_dtype=ACC)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)  # [K, R]
    b_ds = b_p * (b_dp - b_delta[None, :]) * SCALE
    b_dk += tl.dot(b_ds.to(b_q.dtype), b_q, input_precision="ieee", out_dtype=ACC)
    return b_dk, b_dv


@triton.jit
def softmax_step(
    b_q, b_k, b_v, m_seen, b_highest, b_total, b_o,
    MASKED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As forward_step, for an EXPONENT above zero; without MASKED all rows see all keys, and no mask is looked at."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, K]
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    # The scale goes into the subtraction, one fused multiply-add an element, and not into every score before.
    b_higher = tl.maximum(b_highest, tl.max(b_s, 1) * EXPONENT)
    b_shift = b_higher
    if MASKED:
        # Rows that have seen nothing yet would compute -inf - -inf.
        b_shift = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_p = power(b_s * EXPONENT - b_shift[:, None], EXACT)  # [R, K]
    b_shrink = power(b_highest - b_shift, EXACT)
    b_total = b_total * b_shrink + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision="ieee", out_dtype=ACC)
    return b_higher, b_total, b_o


@triton.jit
def query_gradient_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dq,
    MASKED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As query_step, added to `b_dq`, which the caller multiplies by the scale in the end."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, K]
    b_s = b_s * EXPONENT - b_lse[:, None]
    if MASKED:
        # A blind row has a log-sum-exp of -inf and sees nothing: the mask comes before the exponential.
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee", out_dtype=ACC)  # [R, K]
    b_ds = power(b_s, EXACT) * (b_dp - b_delta[:, None])
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee", out_dtype=ACC)


@triton.jit
def key_gradient_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv,
    MASKED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As key_step, `b_dk` without the scale as well; `m_seen` is [K, R]."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)  # [K, R]
    b_s = b_s * EXPONENT - b_lse[None, :]
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_p = power(b_s, EXACT)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee", out_dtype=ACC)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)  # [K, R]
    b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee", out_dtype=ACC)
    return b_dk, b_dv
